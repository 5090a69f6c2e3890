"""Products of few rows by warpgroups (csrc/device/few_rows_gemm_warpgroups.cuh) on the CPU, with the kernel that
prepares their rows, and results that are cast.
"""

from functools import partial

import numpy as np
import pytest
from emulation import EmulationError, planted
from few_rows import BF16, E4M3, F16, F32, NO_WARPGROUPS, SOURCES, Product
from prepared_rows import ACTIVATIONS, GATED, PreparedProduct
from reference import quantize

Prepared = partial(PreparedProduct, device="9.0")

# The device of the stand-in has four multiprocessors.
PRODUCTS = {
    "one chunk": Product(9, 64, 128, integers=True),
    "a short chunk": Product(3, 16, 16, d=F32, integers=True),
    "tails": Product(20, 144, 400, bias=True, c=True, alpha=0.5, integers=True),
    "tails by tile": Product(41, 144, 272, "1d2d", d=F32, bias=True, c=True, alpha=0.5, integers=True),
    "float16": Product(12, 80, 144, d=F16, bias=True, c=True, integers=True),
    # Steps of several chunks, in one box each and in several, of which the last one is short; rings that go round.
    "boxes of two chunks": Product(17, 64, 1152, d=F32, config=220011402, integers=True),
    "boxes of four chunks": Product(8, 64, 1792, d=F32, config=140011404, integers=True),
    "chunks in boxes of their own": Product(33, 64, 1168, "1d2d", d=F32, config=220011402, integers=True),
    "a ring of one slot": Product(5, 64, 1168, d=F32, config=110011401, integers=True),
    "more slots than steps": Product(9, 64, 272, d=F32, config=420011402, integers=True),
    "two warpgroups along n": Product(35, 256, 528, "1d2d", d=F32, config=210011801, bias=True, integers=True),
    "four warpgroups": Product(16, 144, 528, config=210011802, bias=True, c=True, integers=True),
    "blocks of 256 rows": Product(33, 272, 272, config=210011901, d=F32, bias=True, c=True, integers=True),
    "a cluster of 2": Product(64, 80, 528, "1d2d", d=F32, config=220021402, bias=True, c=True, integers=True),
    "a cluster of 4": Product(1, 64, 1040, d=F32, config=110041401, bias=True, integers=True),
    "blocks without a chunk": Product(10, 48, 272, d=F32, config=110081401, c=True, integers=True),
    # What is prepared and cast.
    "cast": Prepared(3, 48, 272, bias=True, c=True, alpha=0.5),
    "layernorm and cast": Prepared(9, 80, 400, norm="layernorm", bias=True),
    "rmsnorm of two pieces": Prepared(2, 32, 2064, norm="rmsnorm", c=True),
    "layernorm of many pieces": Prepared(10, 16, 4112, norm="layernorm"),
    "a cast of two pieces": Prepared(5, 16, 2064, d=BF16),
    "gelu": Prepared(11, 80, 272, norm="layernorm", activation="gelu", bias=True),
    "swiglu": Prepared(18, 160, 272, norm="rmsnorm", activation="swiglu", bias=True),
    "gates in a cluster": Prepared(3, 192, 528, activation="geglu", config=220021402, d=BF16, bias=True),
    "gates in blocks of 256 rows": Prepared(35, 288, 272, activation="swiglu", config=110011901, d=BF16, bias=True),
    "gates in boxes of two chunks": Prepared(18, 96, 512, activation="reglu", config=220011802),
    "a result that is cast": Product(7, 80, 272, c=True, alpha=0.3, integers=True, d_scale=0.7),
    "a result of many rows that is cast": Product(33, 80, 528, integers=True, d_scale=3.0, config=220021402),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    PRODUCTS[name].check_exact()


@pytest.mark.parametrize("m", range(1, 65))
def test_every_number_of_rows(m):
    how = {"d": SOURCES[m % 3], "bias": m % 2 == 0, "c": m % 5 < 2}
    Product(m, 32, 144, ("", "1d2d")[m % 2], **how).check(orders=["random"])
    Prepared(m, 32, 144, norm=("", "layernorm", "rmsnorm")[m % 3], **how).check(orders=["random"])


@pytest.mark.parametrize("pair", ["", "1d2d"])
@pytest.mark.parametrize("n", [16, 48, 144, 272])
@pytest.mark.parametrize("k", [16, 48, 144, 2064])
@pytest.mark.slow
def test_tails(pair, n, k):
    for m in (9, 20, 64):
        Product(m, n, k, pair, d=F32, bias=True).check(orders=["random"])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("d", SOURCES, ids=["float32", "bfloat16", "float16"])
def test_activations(activation, d):
    Prepared(10, 64, 144, norm="layernorm", activation=activation, d=d, bias=True).check(orders=["forward"])


@pytest.mark.parametrize("device", ["9.0", "10.0"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_cast_result_is_the_result_cast(activation, device):
    how = {"norm": "rmsnorm", "activation": activation, "d": BF16, "bias": True, "device": device}
    expected = quantize(PreparedProduct(6, 96, 272, **how).run(), E4M3, 0.3)[0]
    found = PreparedProduct(6, 96, 272, **how, d_scale=0.3).run()
    assert np.array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("pair", ["", "1d2d"])
@pytest.mark.parametrize("config", [0, 210021402])
def test_a_nan_stays_in_its_row_and_column(pair, config):
    product = Product(11, 48, 272, pair, d=F32, bias=True, config=config)
    product.a[3, 130], product.b[20, 271], product.b[40, 0] = np.nan, np.nan, np.nan
    d = product.run(orders=["random"])
    wanted = np.zeros(d.shape, bool)
    wanted[3], wanted[:, 20], wanted[:, 40] = True, True, True
    assert np.array_equal(np.isnan(d), wanted)


def test_a_nan_stays_in_its_prepared_row():
    product = Prepared(12, 48, 272, norm="layernorm", bias=True)
    clean = product.run(orders=["forward"])
    product.x[3, 130] = np.nan
    d = product.run(orders=["random"])
    assert np.isnan(d[3]).all()
    assert np.array_equal(np.delete(d, 3, axis=0), np.delete(clean, 3, axis=0))


@pytest.mark.parametrize("name", ["tails", "tails by tile", "a cluster of 2"])
def test_a_sum_may_be_written_over_its_addend(name):
    product = PRODUCTS[name]
    assert np.array_equal(product.run(in_place=True), product.run())


@pytest.mark.parametrize(
    "product",
    [Prepared(9, 32, 144), Prepared(9, 32, 144, casts=False, norm="rmsnorm"), Prepared(9, 32, 144, activation="relu"),
     Product(9, 32, 144, d_scale=1.0)],
    ids=["cast", "norm of bfloat16", "activation", "cast result"],
)  # fmt: skip
def test_more_rows_need_warpgroups(product):
    with pytest.raises(EmulationError, match="the launch must succeed"):
        product.run((NO_WARPGROUPS,), orders=["forward"])


@pytest.mark.parametrize(
    ("config", "pair"),
    [(11804, ""), (990011401, ""), (31401, ""), (11902, ""), (11802, "1d2d"), (11404, "1d2d"), (11901, "1d2d")],
)
def test_plans_that_do_not_exist_are_refused(config, pair):
    with pytest.raises(EmulationError, match="the launch must succeed"):
        Product(64, 32, 1040, pair, config=config).run(orders=["forward"])


# A product that shows it, what is wrong then, and what the harness says where not only numbers are wrong.
WARPGROUPS, ROWS = "device/few_rows_gemm_warpgroups.cuh", "device/few_rows_gemm_rows.cuh"
KERNEL, RESULTS = "device/few_rows_gemm.cuh", "device/few_rows_gemm_results.cuh"
WEIGHTS, PLAN = "device/few_rows_gemm_weights.cuh", "device/few_rows_gemm_plan.cuh"
LAUNCH, MAPS = "few_rows_gemm.cu", "tensor_map.h"
MISTAKES = {
    # Boxes: who waits for what.
    "no wait for boxes": ("tails", WARPGROUPS, "      wait(barriers_.arrived[slot], parity);\n", ""),
    "no wait for a free slot": ("a ring of one slot", WARPGROUPS, "      wait(ring.used[slot], parity);\n", ""),
    "a slot is never free": ("a ring of one slot", WARPGROUPS,
        "      if (part_.lane == 0) arrive_in_block(barriers_.used[slot], part_.rank);\n", ""),
    "fewer bytes announced": ("tails", WARPGROUPS, "step_chunks * (b_bytes_ + a_bytes_));\n      load",
        "step_chunks * b_bytes_);\n      load"),
    "no rows after the first slots": ("a ring of one slot", WARPGROUPS, "      fetch_rows(step, slot);\n", ""),
    "rows of the first step again": ("boxes of two chunks", WARPGROUPS,
        "load(arguments_.rows, chunk, 0,", "load(arguments_.rows, part_.first_chunk, 0,"),
    "weights of the first rows": ("tails", WARPGROUPS,
        "row = part_.first_row / arguments_.course.parts;", "row = 0;"),
    "weights of another part": ("swiglu", LAUNCH, "{problem.k, course.d_columns, course.parts}",
        "{problem.k, problem.n, 1}"),
    "chunks of the first warpgroup": ("boxes of two chunks", WARPGROUPS,
        "      const int chunk = chunk_of(arguments_, part, step);\n      if",
        "      const int chunk = chunk_of(arguments_, part_, step);\n      if"),
    "chunks of the first block": ("a cluster of 4", WARPGROUPS,
        "function(part.first_chunk + chunk,", "function(chunk,"),
    "boxes of a step in one place": ("chunks in boxes of their own", WARPGROUPS,
        "box + i * bytes, arrived", "box, arrived"),
    "the first chunk of a step again": ("chunks in boxes of their own", WARPGROUPS,
        "ChunkCorner{(chunk + i) * kChunk", "ChunkCorner{chunk * kChunk"),
    "chunks that go on in the next row": ("chunks in boxes of their own", PLAN,
        "plan.step_chunks > 1 && k % kChunk == 0", "plan.step_chunks > 1"),
    "chunks a row apart": ("boxes of two chunks", MAPS,
        "cuuint64_t(extent.columns * extent.rows), cuuint64_t(kBoxBytes)}",
        "cuuint64_t(extent.columns * extent.rows), cuuint64_t(extent.columns)}"),
    "rings of the first warpgroup": ("boxes of two chunks", WARPGROUPS,
        "part.depth_warp * step_chunks * (b_bytes", "0 * step_chunks * (b_bytes"),
    "slots on one another": ("boxes of two chunks", WARPGROUPS, "stage = slot * (", "stage = 0 * ("),
    # Products.
    "rows of the first warpgroup": ("two warpgroups along n", WARPGROUPS,
        "part.row_warp / kWarps * kRowsOfWarpgroup", "0 * kRowsOfWarpgroup"),
    "the first chunk of the weights": ("boxes of two chunks", WARPGROUPS,
        "b_ + stage + chunk * (arguments_", "b_ + stage + 0 * (arguments_"),
    "the first chunk of the rows": ("boxes of two chunks", WARPGROUPS,
        "a_ + stage + chunk * (kBoxRows", "a_ + stage + 0 * (kBoxRows"),
    "the first depth again": ("one chunk", WARPGROUPS, "b + i * (kDepthOfProduct / 16)", "b"),
    "products add to what was there": ("one chunk", WARPGROUPS, "a + i * (kDepthOfProduct / 16), i > 0)",
        "a + i * (kDepthOfProduct / 16), true)"),
    "no fence": ("one chunk", WARPGROUPS, "    begin_products();\n", "", "wgmma without a fence"),
    "no wait for products": ("one chunk", WARPGROUPS, "    jax_fp8::wait_for_products<0>();\n", ""),
    "a chunk too many": ("a cluster of 2", WARPGROUPS,
        "chunk < step_chunks && first + chunk < part_.chunks", "chunk < step_chunks"),
    "a warpgroup beside the first one": ("four warpgroups", WEIGHTS, "row_group * together + number % together",
        "row_group * together + number / together"),
    # Scales.
    "scales of the next row": ("tails by tile", WARPGROUPS, "? scales[group].x : scales[group].y",
        "? scales[group].y : scales[group].x"),
    "scales of the first rows": ("tails by tile", WARPGROUPS, "row = group * 8 + part_", "row = part_"),
    "scales of the first chunk": ("tails by tile", WARPGROUPS, "int64_t{part_.first_chunk + chunk} * rows", "0 * rows"),
    "scales of another block's part": ("a cluster of 2", WARPGROUPS,
        "int64_t{part_.first_chunk + chunk} * rows", "int64_t{chunk} * rows"),
    "no squares": ("tails by tile", WARPGROUPS, "__fmul_rn(two.x, square)", "two.x"),
    # Results.
    "bias and c that have not come": ("tails", WARPGROUPS, "    wait_for_all_but<0>();\n", "", "what it fetches"),
    "gates as of a warp's tiles": ("swiglu", RESULTS, "if constexpr (kWay == Way::kWarpgroups) return",
        "if constexpr (false) return"),
    "no activation": ("gelu", RESULTS, "kRowGroups == 1 || kWay == Way::kWarpgroups;", "kRowGroups == 1;"),
    "sums of the first four": ("a cluster of 2", RESULTS, "sums_of_warps(block * block_fours_ + i)",
        "sums_of_warps(block * block_fours_)"),
    "no scale of a cast result": ("a result that is cast", RESULTS,
        "(four_floats, d_multiplier)", "(four_floats, 1.0f)"),
    "no rounding before the cast": ("a result that is cast", RESULTS,
        "const float4 x = floats_of(rounded, type);", "const float4 x = d;"),
    # The kernel that prepares.
    "rows as they were": ("layernorm and cast", LAUNCH, "    operands.a = operands.rows;\n", ""),
    "the first piece alone": ("rmsnorm of two pieces", ROWS,
        "return (first + piece) * kPieceColumns +", "return first * kPieceColumns +"),
    "pieces of the first row": ("a cast of two pieces", ROWS, "row = static_cast<int>(blockIdx.x) / raw.blocks_of_row;",
        "row = 0;"),
    "the bias as a scale": ("layernorm and cast", ROWS, "load_vector(raw.norm_bias", "load_vector(raw.norm_scale"),
    "no mean": ("layernorm and cast", ROWS, "mean = norm::mean_of(", "(void)norm::mean_of("),
    "no epsilon": ("rmsnorm of two pieces", ROWS, "raw.k, raw.epsilon)", "raw.k, 0.0f)"),
    "no rounding before the rows are cast": ("rmsnorm of two pieces", ROWS,
        "      round_all<BFloat16>(x[piece]);\n", ""),
    "no scale of the cast": ("cast", ROWS, "multiplier_of(__ldcg(raw.scale))", "1.0f"),
    "four of eight": ("cast", ROWS, "(x[piece] + 4, multiplier)", "(x[piece], multiplier)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    PRODUCTS[name].check_mistake(*change)
