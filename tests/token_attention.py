"""Calls of csrc/cached_attention.cu on the CPU, and problems in FP8 whose scales and weights run against each other."""

from dataclasses import replace

import ml_dtypes
import numpy as np
from emulation import ONLY_BFLOAT16, InPlace, Late, Result, compile_for_cpu
from new_tokens import make

ENTRY = """
using namespace jax_fp8;

extern "C" int cached_attention(const void* query, const void* key, const void* value, int64_t type, int64_t is_fp8,
                                void* keys, void* values, float* key_scales, float* value_scales,
                                const int32_t* lengths, const int32_t* step, const float* cos, const float* sin,
                                void* attended, int64_t batch, int64_t kv_heads, int64_t queries, int64_t head_dim,
                                int64_t slots, int64_t prompt_slots, int64_t pairs, int64_t window, double scale,
                                double logit_cap, const float* attended_scale, int64_t follows, int64_t row_bytes,
                                uint8_t* times_asked) {
  const Following following(follows != 0);
  const int status = launch_cached_attention(
      {query, key, value, static_cast<SourceType>(type), is_fp8 != 0, keys, values, key_scales, value_scales, lengths,
       step, cos, sin, attended, attended_scale, {batch, kv_heads, queries, head_dim, slots, prompt_slots, pairs},
       static_cast<int32_t>(window), static_cast<float>(scale), static_cast<float>(logit_cap)},
      nullptr);
  // How often each key, and then each value, was asked for.
  const auto* const first_key = static_cast<const uint8_t*>(keys);
  const auto* const first_value = static_cast<const uint8_t*>(values);
  const int64_t rows = batch * kv_heads * slots;
  for (const auto& piece : emulation::prefetched()) {
    const bool is_key = piece.first >= first_key && piece.first < first_key + rows * row_bytes;
    const int64_t row = is_key ? (piece.first - first_key) / row_bytes : rows + (piece.first - first_value) / row_bytes;
    for (size_t i = 0; i < piece.bytes / row_bytes; ++i) ++times_asked[row + i];
  }
  return status;
}
"""
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
LAUNCH = "cached_attention.cu"
# The emulation has 4 multiprocessors. With 2 blocks on each, one head has clusters of 8 blocks.
ONE_SLOT = (LAUNCH, "constexpr int kFewestSlots = 64;", "constexpr int kFewestSlots = 1;")
FEW_SLOTS = (ONE_SLOT, (LAUNCH, "int kBlocksOnMultiprocessor = 1", "int kBlocksOnMultiprocessor = 2"))
SIXTEEN = (ONE_SLOT, (LAUNCH, "int kBlocksOnMultiprocessor = 1", "int kBlocksOnMultiprocessor = 4"))
NO_CLUSTERS = (*FEW_SLOTS, ("kernel_launch.h", "compiled.ptxVersion >= 90", "false"))
# Kernels for bfloat16 and at most 128 features, so that a planted mistake compiles sooner.
ONLY_FLOAT = tuple(("device/by_dtype.cuh", f"launch({other}{{}});", ";") for other in ("BFloat16", "Float16"))
ONLY_128 = (
    (LAUNCH, "if (sizes.head_dim <= 64) return launch<C, T, 64>(call, heads, stream);", ""),
    (LAUNCH, "return launch<C, T, 256>(call, heads, stream);", "return cudaErrorInvalidValue;"),
)
ONLY_64 = ((LAUNCH, "if (sizes.head_dim <= 128) return launch<C, T, 128>(call, heads, stream);", ""), ONLY_128[1])
FEW_KERNELS, FLOAT_KERNELS = (*ONLY_BFLOAT16, *ONLY_128), (*ONLY_FLOAT, *ONLY_128)

# Up to two key heads have two or more blocks each, with a multiprocessor for each block. It has more slots than all its
# warps take at once, and the last block those of the prompt and of new tokens.
MANY_SLOTS = {"cache": E4M3, "head_dim": 64, "group": 3, "slots": 1260, "prompt_slots": 1200, "step": 50}


def run(problem, changes=(), *, follows=False, asked=None, attended_scale=None):
    """The result, keys, values and, of FP8, their scales. With `follows` the kernel before may still use all arrays but
    lengths and step, and those of earlier tokens. `attended_scale` casts the result to E4M3. `asked` [2, batch,
    kv_heads, slots] counts how often the kernel has asked for each key and value.
    """
    late = Late if follows else (lambda array: array)
    batch, kv_heads, group, head_dim = problem.query.shape
    scales = [None, None] if problem.scales is None else [InPlace(array) for array in problem.scales]
    pairs = 0 if problem.rotary is None else problem.rotary[0].shape[1]
    attended = late(Result(problem.query.shape, problem.query.dtype if attended_scale is None else E4M3))
    times_asked = np.zeros((2, *problem.keys.shape[:3]), np.uint8)
    new_token = map(late, (problem.query, problem.key, problem.value))
    keys, values, *found = compile_for_cpu("cached_attention.cu", ENTRY, tuple(changes)).call(
        "cached_attention",
        *(*new_token, SOURCES.index(problem.query.dtype), int(bool(problem.scales))),
        *(InPlace(problem.keys), InPlace(problem.values), *scales),
        *(problem.lengths, np.int32(problem.step)[None]),
        *(problem.rotary or (None, None)),
        *(attended, batch, kv_heads, group, head_dim, problem.keys.shape[2], problem.prompt_slots, pairs),
        *(problem.window, float(problem.scale), float(problem.logit_cap)),
        None if attended_scale is None else np.float32(attended_scale)[None],
        *(follows, head_dim * problem.keys.dtype.itemsize, InPlace(times_asked)),
    )
    if asked is not None:
        asked[:] = found[-1]
    return found[-2], keys, values, *found[:-2]


def with_scales(logits, exponents, own=0, **how):
    """A call in FP8 with these logits of the slots, in powers of two, and these exponents of the scales of values.

    Queries are positive, and keys are positive or negative as a whole. `own` is the exponent of the new value.
    """
    problem = make(cache=E4M3, head_dim=80, slots=200, prompt_slots=150, step=30, **how)
    query = np.abs(problem.query)
    unit = problem.scale * np.log2(np.e) * query[:, :, 0].astype(np.float64).sum(-1, keepdims=True)
    is_seen = ~np.isnan(problem.scales[0])
    problem.keys[is_seen] = np.broadcast_to(np.where(logits < 0, -1, 1), is_seen.shape)[is_seen, None]
    problem.scales[0][is_seen] = (np.maximum(np.abs(logits), 2**-20) / unit)[is_seen]
    problem.scales[1][is_seen] *= np.broadcast_to(np.exp2(exponents), is_seen.shape)[is_seen]
    value = (problem.value.astype(np.float32) * np.float32(2.0**own)).astype(BFLOAT16)
    return replace(problem, query=query, value=value)


def steep(rise, fall):
    """Logits that rise from slot to slot, but fall for the second query, and scales of values that fall."""
    ramp = np.arange(200) / 200
    problem = with_scales(rise * ramp, -fall * ramp, group=3, batch=3, kv_heads=3, lengths=[149, 149, 3])
    problem.query[:, :, 1] *= -1
    return problem


def outweighed():
    """Slots with much larger scales than others, and with weights of 2**-60 and none."""
    logits, exponents = np.zeros(200), np.full(200, -60)
    logits[[20, 140, 40]], exponents[[20, 140, 40]] = [-60, -60, -200], [-5, 2, 110]
    return with_scales(logits, exponents, own=-60, group=2, batch=1, kv_heads=3, lengths=[149])


SCALES = {
    "logits rise": lambda: steep(100, 0),
    "scales rise": lambda: steep(0, -100),
    "scales fall": lambda: steep(0, 100),
    "logits rise and scales fall": lambda: steep(100, 100),
    "logits fall and scales rise": lambda: steep(-60, -60),
    "weights are small where scales are large": outweighed,
    "at random": lambda: with_scales(
        np.random.default_rng(1).uniform(-20, 20, 200), np.random.default_rng(2).uniform(-20, 20, 200), group=4
    ),
    "all are small": lambda: with_scales(np.zeros(200), np.full(200, -110), own=-110, group=8),
    "all are large": lambda: with_scales(np.zeros(200), np.full(200, 110), own=110, group=2),
}
