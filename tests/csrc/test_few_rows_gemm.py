"""csrc/few_rows_gemm.cu on the CPU: tensor cores and copies as tests/emulation has them, against float64."""

from functools import partial

import numpy as np
import pytest
from emulation import EmulationError, planted
from few_rows import E4M3, F16, F32, NO_CLUSTERS, PAIRS, SOURCES
from few_rows import Product as OfAnyDevice

Product = partial(OfAnyDevice, device="10.0")  # without warpgroups

# As small as what they show allows. The device of the stand-in has four multiprocessors.
PRODUCTS = {
    "one chunk": Product(1, 16, 128, integers=True),
    "a short chunk": Product(3, 16, 16, d=F32, integers=True),
    "tails": Product(5, 48, 272, bias=True, c=True, alpha=0.5, integers=True),
    "tails by tile": Product(9, 144, 272, "1d2d", d=F32, bias=True, c=True, alpha=0.5, integers=True),
    "tails of bfloat16": Product(5, 144, 272, "bfloat16", d=F32, bias=True, integers=True),
    "tails of bfloat16 by tile": Product(17, 144, 400, "bfloat16, 2d", d=F32, c=True, alpha=-2.0, integers=True),
    "float16": Product(2, 48, 144, "bfloat16", d=F16, bias=True, c=True, integers=True),
    # Many steps: the ring of weights goes round, with one phase and with several.
    "many steps": Product(2, 16, 2064, config=11101, d=F32, integers=True),
    "many steps of two tiles": Product(2, 32, 1296, config=12101, d=F32, integers=True),
    "phases": Product(3, 32, 1296, "1d2d", config=212101, d=F32, integers=True),
    "phases of one step": Product(3, 32, 1296, "1d2d", config=112102, d=F32, integers=True),
    "phases of bfloat16": Product(9, 16, 2064, "bfloat16, 2d", config=311102, d=F32, integers=True),
    "phases of many rows": Product(35, 64, 1040, "1d2d", config=112202, d=F32, integers=True),
    # Warps and blocks that share k, some without a chunk.
    "warps along k": Product(9, 48, 400, config=11105, d=F32, integers=True),
    "warps along n": Product(4, 96, 144, "1d2d", config=12401, bias=True, integers=True),
    "a cluster of 2": Product(9, 80, 528, "1d2d", config=22101, d=F32, bias=True, c=True, alpha=0.5, integers=True),
    "a cluster of 4": Product(1, 16, 1040, config=41102, d=F32, bias=True, integers=True),
    "a cluster of 8": Product(3, 16, 272, "bfloat16", config=81101, d=F32, c=True, integers=True),
    "more fours than threads": Product(9, 32, 144, config=12101, d=F32, bias=True, c=True, integers=True),
    "blocks without results": Product(1, 48, 144, config=81102, integers=True),
    "sums longer than weights": Product(64, 128, 128, config=12401, d=F32, integers=True),
    "phases in a cluster": Product(33, 32, 2064, config=122102, d=F32, integers=True),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_integers_are_exact(name):
    PRODUCTS[name].check_exact()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("d", SOURCES, ids=["float32", "bfloat16", "float16"])
def test_products_of_numbers(pair, d):
    Product(7, 160, 400, pair, d=d, bias=True, c=True, alpha=0.3).check(orders=["forward"])


@pytest.mark.parametrize("m", range(1, 65))
def test_every_number_of_rows(m):
    pair = list(PAIRS)[m % 4]
    Product(m, 32, 144, pair, d=SOURCES[m % 3], bias=m % 2 == 0, c=m % 5 < 2).check(orders=["random"])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("n", [16, 48, 144, 272])
@pytest.mark.parametrize("k", [16, 48, 144, 2064])
@pytest.mark.slow
def test_tails(pair, n, k):
    for m in (1, 8, 20, 64):
        Product(m, n, k, pair, d=F32, bias=True).check(orders=["random"])


@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_of_every_kind(pair):
    """Every E4M3 number by one, and zeros: widening is exact, and a product has no other term."""
    product = Product(8, 256, 128, pair, d=F32)
    product.a[:], product.b[:] = 0, 0
    every = np.arange(256, dtype=np.uint8).view(E4M3)
    product.b[np.arange(256), np.arange(256) % 128] = every
    product.a[:] = 1
    product.a_scale[...], product.b_scale[...] = 1, 1
    d = product.run(orders=["forward"])
    wanted = np.broadcast_to(every.astype(np.float32), d.shape)
    assert np.array_equal(np.isnan(d), np.isnan(wanted))
    assert np.array_equal(np.nan_to_num(d), np.nan_to_num(wanted))
    product.b[:] = 1
    product.a[:] = every[:128].astype(product.a.dtype)
    product.a[:, 127] = 0
    product.check(orders=["forward"])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("config", [0, 22101])
def test_a_nan_stays_in_its_row_and_column(pair, config):
    product = Product(11, 48, 272, pair, d=F32, bias=True, config=config)
    product.a[3, 130], product.b[20, 271], product.b[40, 0] = np.nan, np.nan, np.nan
    d = product.run(orders=["random"])
    wanted = np.zeros(d.shape, bool)
    wanted[3], wanted[:, 20], wanted[:, 40] = True, True, True
    assert np.array_equal(np.isnan(d), wanted)
    product.a[3, 130], product.b[20, 271], product.b[40, 0] = 0, 0, 0
    assert product.fits(d)[~wanted].all()


def test_some_columns_are_those_of_the_whole():
    """The handler passes later rows of b, elements of the bias and rows of squares."""
    whole = Product(3, 272, 144, "1d2d", d=F32, bias=True, integers=True)
    part = Product(3, 144, 144, "1d2d", d=F32, integers=True)
    part.a, part.a_scale, part.b, part.b_scale = whole.a, whole.a_scale, whole.b[128:], whole.b_scale[1:]
    part.bias = whole.bias[128:]
    assert np.array_equal(part.run(), whole.run()[:, 128:])


def test_two_plans_differ_only_in_the_order_of_sums():
    plans = [0, 11101, 12108, 12401, 42102]
    results = [Product(2, 64, 2064, "1d2d", d=F32, config=config, integers=True).run() for config in plans]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "name", ["tails", "tails by tile", "a cluster of 2", "a cluster of 8", "more fours than threads"]
)
def test_a_sum_may_be_written_over_its_addend(name):
    product = PRODUCTS[name]
    assert np.array_equal(product.run(in_place=True), product.run())


@pytest.mark.slow
def test_a_device_without_clusters():
    Product(3, 16, 2064, integers=True).check_exact((NO_CLUSTERS,))
    with pytest.raises(EmulationError, match="the launch must succeed"):
        PRODUCTS["a cluster of 2"].run((NO_CLUSTERS,))


@pytest.mark.slow
def test_a_device_with_little_shared_memory():
    """As compute capability 8.9 has: fewer warps, and phases."""
    little = (("few_rows_gemm.cu", "device.shared_bytes -= kStatic", "device.shared_bytes = 98 * 1024"),)
    for m, pair in ((1, ""), (16, "1d2d"), (64, "bfloat16"), (64, "bfloat16, 2d")):
        Product(m, 80, 1296, pair, d=F32, integers=True).check_exact(little, orders=["random"])


@pytest.mark.parametrize("config", [1, 13101, 10101, 31101, 12801, 12117, 12300, -12101, 2**31 - 1])
def test_plans_that_do_not_exist_are_refused(config):
    with pytest.raises(EmulationError, match="the launch must succeed"):
        Product(3, 32, 144, config=config).run(orders=["forward"])


# A product that shows it, what is wrong then, and what the harness says where not only numbers are wrong.
KERNEL, WEIGHTS = "device/few_rows_gemm.cuh", "device/few_rows_gemm_weights.cuh"
ACTIVATIONS, RESULTS = "device/few_rows_gemm_activations.cuh", "device/few_rows_gemm_results.cuh"
PLAN, LAUNCH, MMA = "device/few_rows_gemm_plan.cuh", "few_rows_gemm.cu", "device/mma.cuh"
PLANS = "few_rows_gemm_plans.h"
MISTAKES = {
    # Copies: who waits for what.
    "no wait for weights": ("many steps", WEIGHTS, "    wait_for_all_but<kStages - 1>();\n", ""),
    "a wait for too few weights": ("many steps", WEIGHTS,
        "wait_for_all_but<kStages - 1>();", "wait_for_all_but<kStages>();"),
    "no barrier for a phase": ("phases of one step", KERNEL,
        "    wait_for_products(arguments_);\n    const int next", "    const int next"),
    "no end of a batch": ("phases", WEIGHTS, "    end_batch();\n", ""),
    "phases too late": ("phases of one step", PLANS,
        "  plan.ahead = static_cast<int>(divide_up(plan.stages, plan.phase_steps));\n  if", "  plan.ahead = 1;\n  if"),
    "the slot of the next phase": ("phases", KERNEL,
        "fetch_phase(turn.phase + ahead_, next)", "fetch_phase(turn.phase + ahead_, turn.slot)"),
    "a phase twice": ("phases", KERNEL, "fetch_phase(turn.phase + ahead_, next)", "fetch_phase(turn.phase, next)"),
    "the first phase only": ("phases", KERNEL,
        "{turn.slot + 1 == arguments_.course.phase_slots ? 0 : turn.slot + 1, 0,", "{0, 0,"),
    "a slot too few": ("phases", PLAN, "phases : plan.ahead + 1)", "phases : plan.ahead)"),
    "sums over what is still read": ("warps along k", RESULTS,
        "    wait_for_products(arguments_);  // all have used weights", "    // all have used weights"),
    "no barrier before sums are read": ("warps along k", RESULTS,
        "put(sums);\n    wait_for_products(arguments_);", "put(sums);"),
    # Tails.
    "weights behind the end of k": ("a short chunk", WEIGHTS, "min(depth, k - kLaneBytes)", "depth", "argument"),
    "weights of the next row": ("tails", WEIGHTS, "min(depth, k - kLaneBytes)", "depth"),
    "activations behind the end of k": ("tails", ACTIVATIONS, "if (depth < k) {", "if (depth < k + 16) {"),
    "no zeros behind the end of k": ("tails", ACTIVATIONS, "*at(target, place) = make_uint4(0, 0, 0, 0);", ""),
    "no zeros behind the end of a phase": ("phases", ACTIVATIONS,
        "*at(target, place) = make_uint4(0, 0, 0, 0);", "if (phase == 0) *at(target, place) = make_uint4(0, 0, 0, 0);"),
    "rows behind the last of b": ("tails", WEIGHTS, "min(first, columns - kWarpRows)", "first", "argument"),
    "columns behind the last of d": ("tails", RESULTS,
        "    if (column_in_d(column_.in_block) >= columns_of_d()) return;\n", ""),
    "rows behind the last of a": ("blocks without results", RESULTS,
        "max(0, min(block_fours_, fours_ - rank * block_fours_))", "block_fours_"),
    "the first row of a again": ("tails", KERNEL, "arguments_.problem.m - 1);", "0);"),
    "a chunk of the next block": ("a cluster of 2", WEIGHTS,
        "min(arguments.course.chunks, ", "max(arguments.course.chunks, "),
    "a warp without a chunk": ("warps along k", KERNEL,
        "if (chunk_of(arguments_, part_, step) < part_.chunks) add(0", "add(0"),
    # What is multiplied.
    "the second half again": ("one chunk", WEIGHTS, "half * 64 + part_", "part_"),
    "the upper rows again": ("one chunk", WEIGHTS, "rows_[tile] + below + within", "rows_[tile] + within"),
    "the first tile again": ("phases", WEIGHTS, "row_warp * row_tiles + tile)", "row_warp * row_tiles)"),
    "rows of the first warp": ("warps along n", WEIGHTS, "(part.row_warp * row_tiles + tile)", "tile"),
    "chunks of the first warp": ("warps along k", WEIGHTS,
        "plan.depth_warps + part.depth_warp)", "plan.depth_warps)"),
    "activations of the first warp": ("warps along k", ACTIVATIONS, "depth_warps + part_.depth_warp;", "depth_warps;"),
    "activations in another order": ("one chunk", KERNEL,
        "widen(words[i], a[i][0], a[i][1]", "widen(words[i], a[i][1], a[i][0]"),
    "bfloat16 in another order": ("float16", KERNEL,
        "a[1][0] = first.z, a[1][1] = first.w", "a[1][0] = first.w, a[1][1] = first.z"),
    "weights in another order": ("one chunk", KERNEL, "b[tile][i][1], b[tile][i][3]", "b[tile][i][3], b[tile][i][1]"),
    "sums begin anew": ("one chunk", MMA, '"f"(sums[0]), "f"(sums[1])', '"f"(0.0f), "f"(sums[1])'),
    # Scales.
    "scales of the next row": ("tails by tile", KERNEL, "lines[4 * group].x, square_", "lines[4 * group].y, square_"),
    "scales of the first group": ("tails by tile", KERNEL, "lines[4 * group].x, square_", "lines[0].x, square_"),
    "scales of the first chunk": ("tails by tile", ACTIVATIONS, "+ chunk_of(turn) * kRowGroups * 4", ""),
    "scales a row too short": ("tails by tile", ACTIVATIONS,
        "(arguments_.problem.m + 3) / 4", "arguments_.problem.m / 4"),
    "scales behind the last chunk": ("phases", ACTIVATIONS,
        "      if (first_chunk(phase) + chunk >= arguments_.course.all_chunks) break;\n", ""),
    "scales of later phases are not fetched": ("phases", ACTIVATIONS,
        "if constexpr (kScaling == Scaling::kLines) fetch_scales(phase, to_slot);",
        "if constexpr (kScaling == Scaling::kLines) if (phase == 0) fetch_scales(phase, to_slot);"),
    "squares of the first rows": ("tails by tile", WEIGHTS, "part.first_row / kSquareRows * row", "0"),
    "a row of squares too short": ("tails by tile", WEIGHTS,
        "(arguments.course.all_chunks + 3) / 4 * 4", "arguments.course.all_chunks"),
    "squares a step late": ("phases", KERNEL,
        "next_square = square_scale(chunk_of(arguments_, part_, step + 1))",
        "next_square = square_scale(chunk_of(arguments_, part_, step))"),
    "squares of the first block": ("a cluster of 2", WEIGHTS, "part.first_chunk + chunk);", "chunk);"),
    "no scale of a": ("float16", RESULTS, "alpha * (a_scale * b_scale)", "alpha * b_scale"),
    "no alpha": ("tails", RESULTS, "alpha * (a_scale * b_scale)", "a_scale * b_scale"),
    # What becomes of the sums.
    "sums of all warps but one": ("warps along k", RESULTS,
        "warp = 0; warp < arguments_.plan.depth_warps", "warp = 1; warp < arguments_.plan.depth_warps"),
    "sums of all blocks but one": ("a cluster of 4", RESULTS,
        "int block = 0; block < arguments_.plan.cluster; ++block) {\n      totals",
        "int block = 1; block < arguments_.plan.cluster; ++block) {\n      totals"),
    "no wait for other blocks": ("a cluster of 4", RESULTS, "    wait(received_, 0);\n", ""),
    "no wait for the barriers of others": ("a cluster of 8", RESULTS,
        "    wait_for_cluster();  // all have begun their barriers\n", ""),
    "fewer bytes announced": ("a cluster of 2", RESULTS,
        "fours_of(part.rank) * 16 * parts_)", "fours_of(part.rank) * 8 * parts_)"),
    "every block sends to the same place": ("a cluster of 2", RESULTS,
        "received_from(part_.rank, 0) + i, received_", "received_from(0, 0) + i, received_"),
    "what is received lies over weights": ("phases in a cluster", PLAN,
        "received = products > sums ? products : sums;", "received = 0;"),
    "bias of the next column": ("tails", RESULTS,
        "part * columns() * 2, column_.in_block, bias", "part * columns() * 2, column_.in_block ^ 1, bias"),
    "bias of the next column of many rows": ("tails by tile", RESULTS,
        "column_in_d(column_.in_block) + part", "column_in_d(column_.in_block ^ 1) + part"),
    "c of the first row": ("tails", RESULTS, "addends(row), column_", "addends(0), column_"),
    "c of the first row of many": ("tails by tile", RESULTS,
        "load_four(arguments_.operands.c, place, type)", "load_four(arguments_.operands.c, column_.place, type)"),
    "c where the bias is": ("tails", RESULTS, "row < 0 ? 0 : kBiasBytes + row", "row < 0 ? 0 : 0 * kBiasBytes + row"),
    "addends behind the last column": ("tails", RESULTS, "      if (byte >= row_bytes) continue;\n", "", "argument"),
    "c once": ("tails", RESULTS, "d = add(d, read_c(row, place));", ";"),
    "results of the first block": ("tails by tile", RESULTS,
        "return part_.first_row / (4 * parts_) + in_block;", "return in_block;"),
    # The launch.
    "a block too few": ("tails by tile", LAUNCH,
        "divide_up(arguments.problem.n, plan.block_rows())",
        "std::max<int64_t>(1, arguments.problem.n / plan.block_rows())"),
    "half of the shared memory": ("one chunk", PLAN, "0) + addends +\n", "0) + addends / 2 +\n"),
    "sums beyond the shared memory": ("sums longer than weights", PLAN,
        "products > sums ? products : sums", "products"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    PRODUCTS[name].check_mistake(*change)
