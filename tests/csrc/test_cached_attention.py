"""Mistakes in csrc/cached_attention.cu and its headers must be noticed. Numbers: device/test_cached_attention.py."""

import numpy as np
import pytest
from emulation import ONLY_BFLOAT16, EmulationError, planted
from new_tokens import check, make
from token_attention import E4M3, FEW_KERNELS, FEW_SLOTS, FLOAT_KERNELS, MANY_SLOTS, ONLY_64, outweighed, run, steep

KERNEL, CALL = "device/cached_attention.cuh", "device/cached_attention_call.cuh"
TOKEN, PARTS = "device/cached_attention_token.cuh", "device/cached_attention_parts.cuh"
PRODUCTS, FLOATS = "device/cached_attention_products.cuh", "device/cached_attention_floats.cuh"
SLOTS = "device/cached_attention_slots.cuh"
MISTAKES = {
    "slots beyond the end": (PRODUCTS, "slot_of(i) >= count", "false"),
    "slots beyond the end are read": (SLOTS, "min(slot, tile.count - 1)", "slot"),
    "features beyond the end are read": (SLOTS, "|| 32 * c + 8 * lane_column() < source.head_dim", "|| true"),
    "values of other features": (SLOTS, "64 * c : min(64 * c, last)", "64 * c : min(64 * c, 0)"),
    "features beyond the end are written": (PARTS, "if (feature >= head_dim) return;", ""),
    "features beyond the end are kept": (TOKEN, "!= nullptr && feature < head_dim", "!= nullptr"),
    "features beyond the token's are read": (TOKEN, "exists = pair.second < head_dim", "exists = true"),
    "a query too many": (TOKEN, "return row < queries;", "return row <= queries;"),
    "no barrier after the token": (KERNEL, "  __syncthreads();\n  if (part.sees", "  if (part.sees"),
    "no barrier before warps combine": (KERNEL, "  __syncthreads();\n  results.write", "  results.write"),
    "no barrier of the cluster": (PARTS, "    wait_for_cluster();", ""),
    "blocks that do not wait": (PARTS, "    wait(shared_.arrived, 0);\n", ""),
    "one block for all": (PARTS, "shared_.arrived, block);\n", "shared_.arrived, 0);\n"),
    "pairs of the first block": (PARTS, "block_of(item) + part_.block;", "block_of(item);"),
    "parts on one another": (PARTS, "(pair - block) + part_.block, shared_", "(pair - block), shared_"),
    "softmaxes of another query": (PARTS, "[(h << call_.log2_blocks) + block_of(item)]", "[block_of(item)]"),
    "softmaxes not rescaled": (PARTS, "power_of_2<C>(__fsub_rn(other_largest, largest))", "1.0f"),
    "sums not rescaled": (PARTS, "__fmaf_rn(factor, other_sum, sum)", "__fadd_rn(other_sum, sum)"),
    "no maximum of blocks": (PARTS, "all.largest = fmaxf(all.largest, __shfl", "(void)(__shfl"),
    "one warp less": (
        PARTS,
        "warp = 0; warp < kWarps; ++warp) {",
        "warp = 1; warp < kWarps; ++warp) {",
    ),
    "no maximum of lanes": (PRODUCTS, "raised = query_max(raised);", ""),
    "sums of one lane": (PRODUCTS, "__fadd_rn(softmax.sum, __shfl_xor_sync(kAllLanes, softmax.sum, 2))", "softmax.sum"),
    "no new token": (PARTS, "    if (part_.sees_token()) {\n", "    if (false) {\n"),
    "the new token for every block": (PARTS, "    if (part_.sees_token()) {\n", "    if (true) {\n"),
    "the new token counts twice": (PARTS, "shared_.own_logits[h], 1.0f,", "shared_.own_logits[h], 2.0f,"),
    "the new token's slot is read": (CALL, "prompt + (step - first_step)", "prompt + (step - first_step) + 1"),
    "new tokens in the place of the prompt's": (CALL, "place + (is_new ? gap : 0)", "place"),
    "new tokens one slot too early": (
        CALL,
        "seen.from_first(first_new) - first - place",
        "seen.from_first(first_new) - first - place - 1",
    ),
    "a tile of both": (CALL, "(prompt + kTile - 1) / kTile * kTile", "prompt"),
    "a prompt too long": (CALL, "is_new ? end : prompt", "true ? end : prompt"),
    "the prompt of all blocks": (CALL, "max(min(last, seen.prompt) - first, 0)", "seen.prompt"),
    "not rescaled": (PRODUCTS, "if (!__any_sync(kAllLanes, factor != 1.0f)) return;", "return;"),
    "a sum of weights not rescaled": (PRODUCTS, "__fmul_rn(softmax.sum, power_of_2<C>(difference))", "softmax.sum"),
    "a factor of another query": (PRODUCTS, "second = of_sums<1>(factor)", "second = of_sums<0>(factor)"),
    "weights of 8 bits": (
        PRODUCTS,
        "        multiply_add(softmax.attended[4 * c + i], pairs, {lower[j], lower[j + 1]}, Type{});\n",
        "",
    ),
    "a value of another slot": (PRODUCTS, "(words[2][i], words[3][i], 0x7632)", "(words[3][i], words[2][i], 0x7632)"),
    "a key of another slot": (SLOTS, "(tile, 8 * j + lane_row())", "(tile, lane_row())"),
    "a result of another query": (PRODUCTS, "query = 2 * lane_column() + i;", "query = lane_column() + 4 * i;"),
    "the same tile for all warps": (PRODUCTS, "/ kWarp * kTile)", "* 0)"),
    "a tile too few": (PRODUCTS, "while (place_ < tiles_.end) {", "while (place_ + kTile < tiles_.end) {"),
    "no next keys": (PRODUCTS, "if (kEarly == kSteps && !is_last) load(of_keys_, next, keys_);", ""),
    "no next values": (PRODUCTS, "if (!is_last) load<0, kEarly>(of_values_, next, values_);", ""),
    "no scales of keys": (PRODUCTS, "__fmul_rn(keys.scales[i], factor)", "factor"),
    "no scales of values": (PRODUCTS, "__fmul_rn(weights[i], unit), scales[i])", "weights[i], unit)"),
    "no unit of values": (PRODUCTS, "x = __fmul_rn(x, units[i])", "(void)x"),
    "a unit of another query": (
        PRODUCTS,
        "units[0] = of_sums<0>(unit), units[1] = of_sums<1>(unit);",
        "units[0] = units[1] = unit;",
    ),
    "a unit that does not rise": (
        PRODUCTS,
        "power_of_two(max(earlier - softmax.exponent, kLowestExponent - 1))",
        "1.0f",
    ),
    "a unit of scales without weights": (
        PRODUCTS,
        "__float_as_uint(weights[i]) + __float",
        "__float_as_uint(1.0f) + __float",
    ),
    "a unit that does not fall": (
        PRODUCTS,
        "softmax.exponent + static_cast<int>(fmaxf(difference, -512.0f))",
        "softmax.exponent",
    ),
    "a unit of slots without weight": (PRODUCTS, "weights[i] > 0.0f ? bits : 0", "bits"),
    "logits not whole": (PRODUCTS, "raised = ceilf(raised);", ";"),
    "no unit of queries": (PRODUCTS, "kIsFp8<C> ? shared.units[query] : 1.0f", "1.0f"),
    "no unit of the new token's query": (TOKEN, "kIsFp8<C> ? shared.units[h] : 1.0f", "1.0f"),
    "no scale of the new row": (TOKEN, "x = __fmul_rn(x, scale);", ""),
    "the new token not as it is kept": (TOKEN, "x, none);\n      x = __fmul_rn(x, scale);", "none, none);"),
    "the amax of a lane": (TOKEN, "__reduce_max_sync(0xFFFFFFFFu, ", "(0, "),
    "nobody writes the new token": (CALL, "first_query == 0 && block == 0}", "first_query == 77}"),
    "no scale is written": (TOKEN, "*row.cache_scale = scale;", "(void)scale;"),
    "a rotated value": (TOKEN, "rows.is_value(row) ? 0 : call.pairs", "call.pairs"),
    "rotation not rounded": (TOKEN, "return to_float(from_float<T>(x));", "return x;"),
    "angles of another row": (TOKEN, "angles = int64_t{part.row} * call.pairs", "angles = 0"),
    "the first queries for all": (TOKEN, "call.sizes.queries + part.first_query + row", "call.sizes.queries + row"),
    "results of the first queries": (PARTS, "call_.sizes.queries + part_.first_query + h", "call_.sizes.queries + h"),
    "a window too small": (CALL, "length + step - (sizes.window - 1)", "length + step - (sizes.window - 2)"),
    "a window too large": (CALL, "length + step - (sizes.window - 1)", "length + step - sizes.window"),
    "new slots from the prompt's end": (CALL, "sizes.prompt_slots + first_step - length", "first_step"),
    "lengths of the first row": (KERNEL, "call.lengths + part.row", "call.lengths"),
    "no cap": (PRODUCTS, "cap != 0.0f", "false"),
    "no cap of the new token": (CALL, "outer == 0.0f ? x", "true ? x"),
}
FLOAT_MISTAKES = {
    "slots beyond the end": (FLOATS, "Lanes::slot() < count ? logits.of", "true ? logits.of"),
    "slots beyond the end are read": (FLOATS, "slot < tile.count && Lanes", "slot < 4096 && Lanes"),
    "features beyond the end are read": (FLOATS, "Lanes::feature() < source.head_dim) {", "Lanes::feature() < 4096) {"),
    "groups not rescaled": (FLOATS, "__fsub_rn(running.largest, largest)", "0.0f"),
    "no maximum of groups": (FLOATS, "lanes_max<kWarp / 2, kLanes>(running.largest)", "running.largest"),
    "no sum over groups": (FLOATS, "lanes_sum<kWarp / 2, kLanes>(running.attended[h][i])", "running.attended[h][i]"),
    "sums of one lane": (FLOATS, "lanes_sum<Lanes::kHeadLanes / 2, Lanes::kCopies>(", "("),
    "copies that count": (FLOATS, "<Lanes::kHeadLanes / 2, Lanes::kCopies>", "<Lanes::kHeadLanes / 2, 1>"),
    "not rescaled": (FLOATS, "  running.multiply(power_of_2<float>(__fsub_rn(running.largest, raised)));\n", ""),
    "no maximum of lanes": (FLOATS, "lanes_max<Lanes::kHeadLanes / 2>(fmaxf", "(fmaxf"),
    "a factor of another head": (FLOATS, "factor, h * (kLanes / kHeads), kLanes", "factor, 0, kLanes"),
    "a weight of another slot": (FLOATS, "sum * Layout<kLanes, kHeads>::kCopies, kLanes", "sum, kLanes"),
    "a weight of another head": (FLOATS, "const int sum = h * kSlots + j;", "const int sum = j;"),
    "sums of the wrong lanes": (FLOATS, "share_sums(sums, half, kLanes / 2);", "share_sums(sums, half, 1);"),
    "the same batch for all warps": (FLOATS, "/ kWarp * Lanes::kBatch)", "* 0)"),
    "a batch too few": (FLOATS, "while (place_ < tiles_.end) {", "while (place_ + Lanes::kBatch < tiles_.end) {"),
    "no next keys": (FLOATS, "load_batch<kLanes, kHeads>(of_keys_, next, keys_);", ""),
    "no next values": (FLOATS, "load_batch<kLanes, kHeads>(of_values_, next, values_);", ""),
}


# In tiles of 32 slots.
MANY_SLOTS_MISTAKES = {
    "values of the first slots": (PRODUCTS, "values.rows[2 * j + i][c]", "values.rows[i][c]"),
    "weights of the first slots": (PRODUCTS, "{upper[j], upper[j + 1]}", "{upper[0], upper[1]}"),
    "what is left of other weights": (PRODUCTS, "{lower[j], lower[j + 1]}", "{lower[0], lower[1]}"),
    "sums of few warps": (PARTS, "(warp * part_.queries + h)", "(warp % 6 * part_.queries + h)"),
}


SHAPE = {"head_dim": 80, "slots": 200, "prompt_slots": 150, "step": 30}


@pytest.fixture(scope="module")
def problems():
    """Together they have tiles of queries, clusters, blocks alone, windows, caps, angles, scales, a large new token."""
    shape = {"batch": 3, "kv_heads": 3, "lengths": [149, 20, 3], **SHAPE}
    large = make(group=3, cache=E4M3, pairs=6, window=170, scale=1.0, **shape)
    large.scales[1][:, :, :90] *= 2.0**-6  # rising from tile to tile of a warp
    return [
        large,
        make(group=11, batch=1, lengths=[140], pairs=10, window=100, logit_cap=2.0, scale=0.5, **SHAPE),
        make(group=1, cache=E4M3, batch=1, lengths=[149], pairs=40, scale=0.5, **SHAPE),
        make(group=2, cache=E4M3, batch=1, lengths=[149], window=2, **SHAPE),
        steep(100, 100),
        outweighed(),
    ]


@pytest.fixture(scope="module")
def float_problems():
    """Of one query, with copies of sums, and of tiles of queries."""
    return [
        make(np.float32, group=1, batch=1, lengths=[140], scale=0.1, **SHAPE),
        make(np.float32, group=6, batch=3, kv_heads=3, lengths=[149, 20, 3], scale=0.3, **SHAPE),
    ]


@pytest.fixture(scope="module")
def many_slots():
    return make(batch=1, kv_heads=2, lengths=[1195], **MANY_SLOTS)


def check_all(problems, changes=(), kernels=FEW_KERNELS):
    for problem in problems:
        check(problem, run(problem, (*changes, *FEW_SLOTS, *kernels)))


def test_these_problems_are_solved(problems, float_problems):
    check_all(problems)
    check_all(float_problems, kernels=FLOAT_KERNELS)


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake, problems):
    with pytest.raises((EmulationError, AssertionError)):
        check_all(problems, (MISTAKES[mistake],))


@pytest.mark.parametrize("mistake", planted(FLOAT_MISTAKES))
def test_a_mistake_in_float32_is_noticed(mistake, float_problems):
    with pytest.raises((EmulationError, AssertionError)):
        check_all(float_problems, (FLOAT_MISTAKES[mistake],), FLOAT_KERNELS)


@pytest.mark.parametrize("mistake", planted(MANY_SLOTS_MISTAKES))
def test_a_mistake_in_many_slots_is_noticed(mistake, many_slots):
    changes = (*ONLY_BFLOAT16, *ONLY_64)
    check(many_slots, run(many_slots, changes))
    with pytest.raises((EmulationError, AssertionError)):
        check(many_slots, run(many_slots, (MANY_SLOTS_MISTAKES[mistake], *changes)))


@pytest.mark.slow
def test_a_mistake_in_the_last_head_is_noticed():
    """Only of narrow heads do the values that a lane loads reach beyond the last slot."""
    problem = make(step=15, slots=40, prompt_slots=24, lengths=[24, 23])
    with pytest.raises(EmulationError):
        run(problem, ((SLOTS, "64 * c : min(64 * c, last)", "64 * c : 64 * c"), *ONLY_BFLOAT16))
