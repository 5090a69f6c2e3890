"""csrc/cached_attention.cu on the CPU: what it writes bit for bit, and the attention against float64."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from emulation import ONLY_BFLOAT16, EmulationError, InPlace, Result, compile_for_cpu, planted
from new_tokens import attend, check, make, written
from reference import assert_same_bits

ENTRY = """
using namespace jax_fp8;

extern "C" int cached_attention(const void* query, const void* key, const void* value, int64_t type, int64_t is_fp8,
                                void* keys, void* values, float* key_scales, float* value_scales,
                                const int32_t* lengths, const int32_t* step, const float* cos, const float* sin,
                                void* attended, int64_t batch, int64_t kv_heads, int64_t queries, int64_t head_dim,
                                int64_t slots, int64_t prompt_slots, int64_t pairs, int64_t window, double scale,
                                double logit_cap) {
  return launch_cached_attention({query, key, value, static_cast<SourceType>(type), is_fp8 != 0, keys, values,
                                  key_scales, value_scales, lengths, step, cos, sin, attended,
                                  {batch, kv_heads, queries, head_dim, slots, prompt_slots, pairs},
                                  static_cast<int32_t>(window), static_cast<float>(scale),
                                  static_cast<float>(logit_cap)}, nullptr);
}
"""
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
LAUNCH = "cached_attention.cu"
# The multiprocessors of the emulation, 4 with 2 blocks each, are enough for clusters of 8 blocks for one head.
FEW_SLOTS = ((LAUNCH, "constexpr int kFewestSlots = 64;", "constexpr int kFewestSlots = 1;"),)
SIXTEEN = (*FEW_SLOTS, (LAUNCH, "kBlocksOnMultiprocessor = 2", "kBlocksOnMultiprocessor = 4"))
NO_CLUSTERS = (*FEW_SLOTS, ("kernel_launch.h", "compiled.ptxVersion >= 90", "false"))
# Kernels for few caches, for 16 lanes and for at most 4 queries at once, so that a planted mistake compiles sooner.
FEW_KERNELS = (
    *ONLY_BFLOAT16,
    (LAUNCH, "if (sizes.head_dim <= 64) return launch_by_queries<8>(call, heads, stream);", ""),
    (LAUNCH, "return launch_by_queries<32>(call, heads, stream);", "return cudaErrorInvalidValue;"),
    (LAUNCH, "return launch<C, kLanes, 8>(call, heads, stream);", "return launch<C, kLanes, 4>(call, heads, stream);"),
)


def run(problem, changes=()):
    """The result, keys, values and, of FP8, their scales."""
    batch, kv_heads, group, head_dim = problem.query.shape
    scales = [None, None] if problem.scales is None else [InPlace(array) for array in problem.scales]
    pairs = 0 if problem.rotary is None else problem.rotary[0].shape[1]
    attended = Result(problem.query.shape, problem.query.dtype)
    keys, values, *found = compile_for_cpu("cached_attention.cu", ENTRY, tuple(changes)).call(
        "cached_attention",
        *(problem.query, problem.key, problem.value, SOURCES.index(problem.query.dtype), int(bool(problem.scales))),
        *(InPlace(problem.keys), InPlace(problem.values), *scales, problem.lengths, np.int32(problem.step)[None]),
        *(problem.rotary or (None, None)),
        *(attended, batch, kv_heads, group, head_dim, problem.keys.shape[2], problem.prompt_slots, pairs),
        *(problem.window, float(problem.scale), float(problem.logit_cap)),
    )
    return found[-1], keys, values, *found[:-1]


# ---- numbers --------------------------------------------------------------------------------------------------------

CASES = {
    "float32": {"dtype": np.float32, "group": 1, "head_dim": 64},
    "bfloat16": {"group": 4, "head_dim": 128, "slots": 200, "prompt_slots": 150, "step": 30},
    "float16": {"dtype": np.float16, "group": 2, "head_dim": 80, "kv_heads": 3},
    "FP8": {"cache": E4M3, "group": 4, "head_dim": 128, "slots": 200, "prompt_slots": 150, "step": 30},
    "FP8 of one query": {"cache": E4M3, "group": 1, "head_dim": 64, "slots": 200, "prompt_slots": 150, "step": 45},
    "FP8 and float32": {"dtype": np.float32, "cache": E4M3, "group": 8, "head_dim": 24, "kv_heads": 2},
    "FP8 and float16": {"dtype": np.float16, "cache": E4M3, "group": 1, "head_dim": 128},
    "5 queries": {"group": 5, "head_dim": 48, "slots": 130, "prompt_slots": 120},
    "8 queries of 256 features": {"group": 8, "head_dim": 256},
    "16 queries": {"group": 16, "head_dim": 128, "batch": 1},
    "11 queries": {"group": 11, "head_dim": 64, "cache": E4M3, "batch": 1, "pairs": 4},
    "256 features in FP8": {"cache": E4M3, "group": 2, "head_dim": 256, "pairs": 128},
    "the first new token": {"step": 0, "group": 1},
    "a prompt of no token": {"step": 0, "lengths": [0, 0], "group": 4},
    "the last slot": {"step": 15, "slots": 40, "prompt_slots": 24, "lengths": [24, 23]},
    "no slots of prompts": {"prompt_slots": 0, "step": 12, "slots": 13, "lengths": [0, 0]},
    "rotated": {"pairs": 8, "head_dim": 16, "group": 4},
    "rotated, FP8": {"pairs": 32, "head_dim": 64, "cache": E4M3, "group": 1},
    "rotated partly": {"pairs": 10, "head_dim": 80, "dtype": np.float32},
    "rotated partly, FP8": {"pairs": 5, "head_dim": 64, "dtype": np.float16, "cache": E4M3},
    "a window of one": {"window": 1},
    "a window within new tokens": {"window": 3, "step": 9},
    "a window into the prompt": {"window": 12, "step": 4, "lengths": [24, 9], "cache": E4M3},
    "a window beyond all": {"window": 1000, "group": 4},
    "a cap": {"logit_cap": 1.5, "scale": 1.0, "group": 4},
    "a cap in float32": {"logit_cap": 30.0, "scale": 2.0, "dtype": np.float32},
}


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    problem = make(**CASES[case])
    check(problem, run(problem))


# With 1 to 16 blocks, more of them than slots, and without clusters.
@pytest.mark.parametrize("changes", [FEW_SLOTS, SIXTEEN, NO_CLUSTERS], ids=["8", "16", "none"])
@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_blocks_of_a_cluster(cache, changes):
    for lengths, step, slots in (([150], 30, 200), ([1], 0, 200), ([3], 1, 8), ([0], 0, 200)):
        prompt_slots = 150 if slots == 200 else 4
        shape = {"batch": 1, "lengths": lengths, "step": step, "slots": slots, "prompt_slots": prompt_slots}
        problem = make(cache=cache, group=3, head_dim=80, **shape)
        check(problem, run(problem, changes))


def test_which_slots_are_for_clusters():
    """Each power of two, by what the number of allocated slots is worth."""
    for slots in (127, 128, 256, 512):
        problem = make(batch=1, slots=slots, prompt_slots=100, lengths=[70], step=20)
        check(problem, run(problem))


def test_many_heads():
    """More heads than the device has blocks, each alone; a row of each length."""
    problem = make(batch=3, kv_heads=3, group=4, slots=140, prompt_slots=100, lengths=[100, 1, 33], step=39)
    check(problem, run(problem))


@pytest.mark.parametrize("cache", [BFLOAT16, E4M3])
def test_large_logits(cache):
    """A naive exponential overflows from 89 on; here a maximum rises from batch to batch, and falls in another row."""
    problem = make(cache=cache, group=2, head_dim=16, slots=300, prompt_slots=280, lengths=[280, 280], scale=1.0)
    rising = np.linspace(0, 8, 280)
    problem.keys[0, :, :280] = (problem.keys[0, :, :280].astype(np.float32) * rising[:, None]).astype(cache)
    problem.keys[1, :, :280] = (problem.keys[1, :, :280].astype(np.float32) * rising[::-1, None]).astype(cache)
    problem = replace(problem, query=(problem.query.astype(np.float32) * 30).astype(BFLOAT16))
    found = run(problem)
    for array, wanted in zip(found[1:], written(problem), strict=True):
        assert_same_bits(array, wanted)
    wanted, _ = attend(problem, written(problem))
    np.testing.assert_allclose(found[0].astype(np.float64), wanted, rtol=2**-7, atol=2e-3)


def test_what_is_not_finite():
    """A NaN that is seen spoils its head; rows that are not finite have the scale 1."""
    problem = make(cache=E4M3, kv_heads=2, group=2, head_dim=64, batch=2)
    problem.key[0, 0, 3], problem.key[0, 1, 60], problem.value[1, 0, 2] = np.nan, np.inf, -np.inf
    attended, keys, values, *scales = run(problem)
    expected = written(problem)
    for array, wanted in zip((keys, values, *scales), expected, strict=True):
        assert_same_bits(array, wanted)
    assert scales[0][0, :, problem.own].tolist() == [1, 1] and scales[1][1, 0, problem.own] == 1
    is_nan = np.isnan(attended.astype(np.float32))
    assert is_nan[0, 0].all() and not is_nan[1].any()


def test_numbers_out_of_range_count_as_the_nearest():
    problem = make(lengths=[24, 0], step=15)
    wrong = replace(problem, lengths=np.int32([2**31 - 1, -(2**31)]), step=2**31 - 1)
    for ours, other in zip(run(wrong), run(problem), strict=True):
        assert_same_bits(ours, other)
    problem = make(step=0)
    for ours, other in zip(run(replace(problem, step=-5)), run(problem), strict=True):
        assert_same_bits(ours, other)


def test_no_rows():
    problem = make(batch=0, lengths=[])
    assert run(problem)[0].shape == (0, 1, 2, 16)


def test_another_formula_would_be_noticed():
    problem = make(pairs=8, window=9, logit_cap=2.0, scale=1.0)
    attended, *caches = run(problem)
    for wrong in (
        {"window": 8},
        {"window": 10},
        {"window": 0},
        {"logit_cap": 2.1},
        {"logit_cap": 0.0},
        {"scale": 1.01},
    ):
        with pytest.raises(AssertionError):
            check(replace(problem, **wrong), (attended, *caches))
    for other in (replace(problem, rotary=None), replace(problem, value=problem.key)):
        with pytest.raises(AssertionError):
            check(other, (attended, *caches))


# ---- planted mistakes -----------------------------------------------------------------------------------------------

KERNEL, CALL = "device/cached_attention.cuh", "device/cached_attention_call.cuh"
TOKEN, PARTS = "device/cached_attention_token.cuh", "device/cached_attention_parts.cuh"
SOFTMAX = "device/cached_attention_softmax.cuh"
EXIT = "  arrive_at_cluster_with_nothing();\n  wait_for_cluster();\n"
MISTAKES = {
    "slots beyond the end": (KERNEL, "first + Lanes::slot_of(i) < end ? logits.of", "true ? logits.of"),
    "slots beyond the end are read": (KERNEL, "number < source.end && feature", "number < 4096 && feature"),
    "features beyond the end are read": (KERNEL, "feature < source.head_dim) {", "feature < 4096) {"),
    "features beyond the end are written": (PARTS, "if (feature >= head_dim) continue;", ""),
    "features beyond the end are kept": (TOKEN, "if (feature < sizes.head_dim) {", "if (feature < 4096) {"),
    "features beyond the token's are read": (TOKEN, "feature < head_dim && (row", "(row"),
    "queries beyond the last are read": (TOKEN, "(row >= kHeads || row < part.queries)", "true"),
    "scales beyond the end are read": (KERNEL, "number < source.end ? __ldcs", "number < 4096 ? __ldcs"),
    "no barrier before rotating": (KERNEL, "part, shared, parts);\n  __syncthreads();", "part, shared, parts);"),
    "no barrier after the token": (KERNEL, "own, parts, shared);\n  __syncthreads();", "own, parts, shared);"),
    "no barrier before warps combine": (
        KERNEL,
        "(running, shared, parts);\n  __syncthreads();",
        "(running, shared, parts);",
    ),
    "no barrier before one block's result": (KERNEL, "{\n    __syncthreads();\n", "{\n"),
    "no barrier of the cluster": (KERNEL, "  arrive_at_cluster();\n  wait_for_cluster();\n", "  __syncthreads();\n"),
    "blocks that exit early": (KERNEL, EXIT, ""),
    "one block for all": (PARTS, "in_block(own, block)", "own"),
    "parts of blocks by the first one": (PARTS, "part.block * kThreads<kHeads> + static", "static"),
    "blocks not rescaled": (PARTS, "power_of_2<C>(__fsub_rn(largest_of[b], largest))", "1.0f"),
    "sums of blocks not rescaled": (PARTS, "__fmaf_rn(factor, sum_of[b], sum)", "__fmaf_rn(1.0f, sum_of[b], sum)"),
    "warps not rescaled": (PARTS, "power_of_2<C>(__fsub_rn(shared.largest[warp][h], largest))", "1.0f"),
    "one warp less": (
        PARTS,
        "(int warp = 0; warp < kWarps<kHeads>; ++warp) {",
        "(int warp = 1; warp < kWarps<kHeads>; ++warp) {",
    ),
    "groups not rescaled": (PARTS, "  running.multiply(power_of_2<C>(__fsub_rn(running.largest, largest)));\n", ""),
    "no maximum of groups": (PARTS, "lanes_max<kWarp / 2, kLanes>(running.largest)", "running.largest"),
    "no sum over groups": (PARTS, "lanes_sum<kWarp / 2, kLanes>(running.attended[h][i])", "running.attended[h][i]"),
    "sums of one lane": (PARTS, "lanes_sum<kHeadLanes / 2, kCopies>(", "("),
    "copies that count": (PARTS, "lanes_sum<kHeadLanes / 2, kCopies>", "lanes_sum<kHeadLanes / 2, 1>"),
    "the weight of the new token counts often": (SOFTMAX, "lane % kHeadLanes < copies ? 1.0f : 0.0f", "1.0f"),
    "the new token for every group": (SOFTMAX, "if (static_cast<int>(threadIdx.x) % kWarp >= kLanes) return;", ""),
    "the new token for every block": (KERNEL, "warp == 0 && part.block == 0", "warp == 0"),
    "the new token for every warp": (KERNEL, "warp == 0 && part.block == 0", "part.block == 0"),
    "the new token's slot is read": (CALL, "prompt + (step - first_step)", "prompt + (step - first_step) + 1"),
    "not rescaled": (KERNEL, "  running.multiply(power_of_2<C>(__fsub_rn(running.largest, raised)));\n", ""),
    "no maximum of lanes": (KERNEL, "raised = lanes_max<Lanes::kHeadLanes / 2>(raised);", ""),
    "a factor of another head": (SOFTMAX, "factor, h * (kLanes / kHeads), kLanes", "factor, 0, kLanes"),
    "a weight of another slot": (KERNEL, "sum / kKept * Lanes::kCopies, kLanes", "sum / kKept, kLanes"),
    "a weight of another head": (KERNEL, "const int sum = h * kSlots + j;", "const int sum = j;"),
    "sums of the wrong lanes": (SOFTMAX, "share_sums(sums, half, kLanes / 2);", "share_sums(sums, half, 1);"),
    "the same batch for all warps": (KERNEL, "first_of(part.block) + warp * Lanes::kBatch", "first_of(part.block)"),
    "a batch too few": (KERNEL, "for (; first < end; first +=", "for (; first + Lanes::kBatch < end; first +="),
    "no next keys": (KERNEL, "load<kLanes, kHeads>(of_keys, seen, next, keys);", ""),
    "no next values": (KERNEL, "load<kLanes, kHeads>(of_values, seen, next, values);", ""),
    "no scales of keys": (KERNEL, "kept[i] = __fmul_rn(kept[i], keys.scales[i])", ""),
    "no scales of values": (KERNEL, "weights[i] = __fmul_rn(weights[i], values.scales[i])", ""),
    "no scale of the new key": (SOFTMAX, "__fmul_rn(own[0], key_scale)", "own[0]"),
    "no scale of the new value": (SOFTMAX, "__fmul_rn(value[i], value_scale)", "value[i]"),
    "the new token not as it is kept": (TOKEN, "    unpack(row.kept, x);\n", ""),
    "the amax of a lane": (TOKEN, "__reduce_max_sync(0xFFFFFFFFu, ", "(0, "),
    "nobody writes the new token": (CALL, "first_query == 0 && block == 0}", "first_query == 77}"),
    "no scale is written": (TOKEN, "if (lane == 0) scales[slot] = row.scale;", ""),
    "a rotated value": (TOKEN, "is_key ? call.pairs : 0", "call.pairs"),
    "rotation not rounded": (
        TOKEN,
        "  switch (type) {\n    case SourceType::kFloat32: return x;",
        "  return x;\n  switch (type) {",
    ),
    "angles of another row": (TOKEN, "first = int64_t{part.row} * call.pairs", "first = 0"),
    "the first queries for all": (TOKEN, "call.sizes.queries + part.first_query + row", "call.sizes.queries + row"),
    "results of the first queries": (PARTS, "call.sizes.queries + part.first_query;", "call.sizes.queries;"),
    "a window too small": (CALL, "length + step - (sizes.window - 1)", "length + step - (sizes.window - 2)"),
    "a window too large": (CALL, "length + step - (sizes.window - 1)", "length + step - sizes.window"),
    "new slots from the prompt's end": (CALL, "sizes.prompt_slots + first_step - length", "first_step"),
    "lengths of the first row": (KERNEL, "call.lengths + part.row", "call.lengths"),
    "no cap": (CALL, "outer == 0.0f ? x", "true ? x"),
}


@pytest.fixture(scope="module")
def problems():
    """Together they have tiles of queries, clusters, blocks alone, copies of sums, windows, caps, angles and scales."""
    shape = {"head_dim": 80, "slots": 200, "prompt_slots": 150, "step": 30}
    return [
        make(group=6, batch=1, lengths=[140], pairs=10, window=100, logit_cap=2.0, scale=0.5, **shape),
        make(group=1, cache=E4M3, batch=1, lengths=[149], pairs=40, scale=0.5, **shape),
        make(group=3, cache=E4M3, batch=3, kv_heads=3, lengths=[149, 20, 3], pairs=6, window=170, scale=1.0, **shape),
    ]


def check_all(problems, changes=()):
    for problem in problems:
        check(problem, run(problem, (*changes, *FEW_SLOTS, *FEW_KERNELS)))


def test_these_problems_are_solved(problems):
    check_all(problems)


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake, problems):
    with pytest.raises((EmulationError, AssertionError)):
        check_all(problems, (MISTAKES[mistake],))
