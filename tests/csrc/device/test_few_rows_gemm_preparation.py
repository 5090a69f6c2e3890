"""What csrc/few_rows_gemm.cu does around a product, on the CPU: norm and cast of its rows, activation of its result."""

import numpy as np
import pytest
from emulation import planted
from few_rows import BF16, F16, F32, NO_CLUSTERS, SOURCES
from prepared_rows import ACTIVATIONS, GATED, PreparedProduct

from jax_fp8.kernels import few_rows

# Rows that the kernel prepares, and results that it activates.
PREPARED = {
    "cast": PreparedProduct(3, 48, 272, d=F32, bias=True, c=True, alpha=0.5),
    "layernorm and cast": PreparedProduct(5, 80, 400, norm="layernorm", bias=True),
    "rmsnorm and cast": PreparedProduct(1, 48, 528, norm="rmsnorm", c=True),
    "norm of bfloat16": PreparedProduct(8, 48, 272, norm="layernorm", casts=False, d=F16),
    "norm of bfloat16 by tile": PreparedProduct(2, 144, 400, norm="rmsnorm", casts=False, pair="bfloat16, 2d"),
    "a norm in a cluster": PreparedProduct(3, 64, 656, norm="layernorm", config=42102),
    "a cast in a cluster": PreparedProduct(4, 32, 1040, config=22102, bias=True),
    "few warps": PreparedProduct(7, 32, 272, norm="layernorm", config=12101),
    "two rows of four warps": PreparedProduct(2, 32, 528, norm="layernorm", config=12108),
    "warps without a row": PreparedProduct(3, 32, 400, norm="rmsnorm", config=12105),
    "gelu": PreparedProduct(3, 80, 272, norm="layernorm", activation="gelu", bias=True),
    "swiglu": PreparedProduct(5, 160, 272, norm="rmsnorm", activation="swiglu", bias=True),
    "gates in a cluster": PreparedProduct(3, 96, 528, activation="geglu", config=42202, d=BF16, bias=True),
    "gates of several warps": PreparedProduct(8, 224, 144, activation="reglu", config=12401),
    "many boxes": PreparedProduct(2, 64, 2064, norm="layernorm", config=12202),
    "many boxes of one chunk": PreparedProduct(3, 32, 1296, norm="rmsnorm", config=210012101),
    "without boxes": PreparedProduct(5, 80, 400, norm="layernorm", bias=True, device="8.9"),
    "gates without boxes": PreparedProduct(8, 224, 272, activation="swiglu", config=12401, device="8.9"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
def test_rows_that_the_kernel_prepares(name):
    PREPARED[name].check()


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
@pytest.mark.parametrize("d", SOURCES, ids=["float32", "bfloat16", "float16"])
def test_activations(activation, d):
    PreparedProduct(2, 64, 144, norm="layernorm", activation=activation, d=d, bias=True).check(orders=["forward"])


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("norm", ["", "layernorm", "rmsnorm"])
def test_every_number_of_prepared_rows(m, norm):
    PreparedProduct(m, 32, 144 + 16 * m, norm=norm).check(orders=["random"])


LITTLE = (("few_rows_gemm.cu", "device.shared_bytes -= kStatic", "device.shared_bytes = 98 * 1024"),)


@pytest.mark.parametrize(
    ("small", "changes"),
    [(True, (*LITTLE, NO_CLUSTERS)), (False, (NO_CLUSTERS,)), (False, ())],
    ids=["99 KB", "227 KB", "boxes"],
)
@pytest.mark.parametrize(("m", "norm"), [(1, "layernorm"), (3, "rmsnorm"), (8, "layernorm"), (8, "")])
def test_whatever_fits_is_launched(m, norm, small, changes):
    """At the limit of `FewRows.fits`, on a device with little shared memory and on a large one."""
    room = (few_rows.SMALL if small else few_rows.LARGE) - few_rows.OTHERS
    k = room // (3 * m + (8 if norm else 0)) // 16 * 16
    product = PreparedProduct(m, 16, k, norm=norm, bias=True)
    product.check(changes, orders=["forward"])


def test_a_nan_stays_in_its_prepared_row():
    product = PreparedProduct(5, 48, 272, norm="layernorm", bias=True)
    clean = product.run(orders=["forward"])
    product.x[3, 130] = np.nan
    d = product.run(orders=["random"])
    assert np.isnan(d[3]).all()
    assert np.array_equal(np.delete(d, 3, axis=0), np.delete(clean, 3, axis=0))


def test_values_that_the_cast_saturates():
    product = PreparedProduct(2, 32, 144)
    product.x[0, :3] = np.inf, -np.inf, 3e38
    product.prepare()
    assert abs(product.a[0, :3].astype(np.float32)).tolist() == [448] * 3
    product.check()


# A product that shows it, and what is wrong then.
KERNEL, WEIGHTS = "device/few_rows_gemm.cuh", "device/few_rows_gemm_weights.cuh"
PREPARATION, RESULTS = "device/few_rows_gemm_preparation.cuh", "device/few_rows_gemm_results.cuh"
PLAN, BOXES = "device/few_rows_gemm_plan.cuh", "device/few_rows_gemm_boxes.cuh"
MISTAKES = {
    "no wait for rows": ("layernorm and cast", KERNEL, "        wait_for_all_but<0>();\n", ""),
    "no wait for rows without boxes": ("without boxes", KERNEL, "        wait_for_all_but<kFirst>();\n", ""),
    "no barrier before rows are prepared": ("layernorm and cast", KERNEL,
        "      wait_for_products(arguments_);\n      preparer_.make(", "      preparer_.make("),
    "no barrier before prepared rows are read": ("layernorm and cast", KERNEL,
        "      wait_for_products(arguments_);\n      add_boxes(", "      add_boxes("),
    "rows of another block's part": ("a cast in a cluster", PREPARATION,
        "first = normalizes ? 0 : first_;", "first = 0;"),
    "the norm of another block's part": ("a norm in a cluster", PREPARATION,
        "raw(row) + (preparation().normalizes ? first_ : 0)", "raw(row)"),
    "parameters of the first block": ("a norm in a cluster", PREPARATION, "norm_scale + first_ + i", "norm_scale + i"),
    "statistics of this block's part": ("a norm in a cluster", PREPARATION,
        "column < arguments_.problem.k; column += course", "column < columns_; column += course"),
    "the bias as a scale": ("layernorm and cast", PREPARATION,
        "norm_scale() + arguments_", "norm_scale() + 0 * arguments_"),
    "no bias": ("layernorm and cast", PREPARATION, "centres() ? bias[j] : norm::kNoBias", "norm::kNoBias"),
    "no epsilon": ("rmsnorm and cast", PREPARATION, "preparation().epsilon", "0.0f"),
    "no rounding before the cast": ("rmsnorm and cast", PREPARATION, "    round_all<BFloat16>(x);\n", ""),
    "no scale of the cast": ("cast", PREPARATION, "multiplier_of(scale_)", "1.0f"),
    "no zeros behind prepared rows": ("cast", PREPARATION,
        "if (column < all) write_wide", "if (column < columns_) write_wide"),
    "no zeros behind them without boxes": ("without boxes", PREPARATION,
        "} else if (column < all) {", "} else if (column < columns_) {"),
    "the first row alone": ("few warps", PREPARATION,
        "first < arguments_.problem.m; first += rows", "first < rows; first += rows"),
    "rows that warps share halfway": ("few warps", PREPARATION,
        "< all; column += course.sharing", "< all; column += 2 * course.sharing"),
    "sums of one warp alone": ("rmsnorm and cast", PREPARATION, "if (course.sharing == 1) return", "return"),
    "no barrier for sums of a row": ("rmsnorm and cast", PREPARATION,
        "partial[warp] = of_warp;\n    wait_for_products(arguments_);", "partial[warp] = of_warp;"),
    "sums of the first row": ("two rows of four warps", PREPARATION,
        "other = warp - remainder_of(warp, course.by_sharing) + own;", "other = own;"),
    "weights are not asked for again": ("without boxes", KERNEL,
        "      if (!kBoxed && !has_early_weights()) fetch_weights_of(kFirst, kStages);\n", ""),
    # Weights in boxes.
    "no wait for boxes": ("layernorm and cast", BOXES, "    wait(barriers_.arrived[slot], parity);\n", ""),
    "no wait for a free slot": ("many boxes", BOXES, "      wait(barriers.used[slot], parity);\n", ""),
    "a slot is never free": ("many boxes", BOXES,
        "if (part_.lane == 0) arrive_in_block(barriers_.used[slot], part_.rank);", ""),
    "a slot is free for one warp": ("many boxes", BOXES, "arguments.plan.row_warps);\n  publish", "1);\n  publish"),
    "fewer bytes announced": ("layernorm and cast", BOXES, "chunks * box_bytes);", "chunks * box_bytes / 2);"),
    "boxes of a step in one place": ("many boxes", BOXES, "box + chunk * box_bytes;", "box;"),
    "the first box of a step again": ("many boxes", BOXES, "chunk * box_bytes_ + tile", "tile"),
    "the first boxes again": ("many boxes of one chunk", BOXES, "part.first_chunk + first + chunk", "chunk"),
    "boxes of the first block": ("layernorm and cast", BOXES, "{depth, part.first_row, 0}", "{depth, 0, 0}"),
    "boxes of the next block's part": ("a norm in a cluster", BOXES, "(part.first_chunk + first", "(first"),
    "the gate's box again": ("swiglu", BOXES, "part.first_row / 2 + arguments.course.d_columns", "part.first_row / 2"),
    "rows of the first warp": ("gates of several warps", BOXES, "row = part.row_warp *", "row = 0 *"),
    "the ring of the first warp": ("many boxes", BOXES, "ring + part.depth_warp *", "ring + 0 *"),
    "places as they were": ("cast", BOXES, "((2 * t) ^ g)", "(2 * t)"),
    "the first half again": ("cast", BOXES, "half == 0 ? first : first + odd_", "first"),
    "the next place of odd rows": ("cast", BOXES, "? kLaneBytes : -kLaneBytes", "? kLaneBytes : kLaneBytes"),
    "the first round again": ("many boxes of one chunk", KERNEL,
        "if (++slot == arguments_.course.stages) slot = 0, parity ^= 1;",
        "if (++slot == arguments_.course.stages) slot = 0;"),
    "slots are free in the first round": ("many boxes of one chunk", BOXES,
        "slot = 0, parity ^= 1;", "slot = 0;"),
    "activations in order": ("cast", PREPARATION, "(eight % 4 * 4 + eight / 4)", "eight"),
    "written over before they are read": ("rmsnorm and cast", PREPARATION,
        "          __syncwarp();  // all lanes have read what is written over\n", ""),
    "no activation": ("gelu", RESULTS, "arguments_.problem.activates", "arguments_.problem.gated"),
    "the gate twice": ("swiglu", RESULTS, "add(totals.sums[1], sums[place_in_sums(column, 1)])",
        "add(totals.sums[1], sums[place_in_sums(column, 0)])"),
    "the bias of the gate twice": ("swiglu", RESULTS, "operands.bias, parts_, 1)", "operands.bias, 1, 1)"),
    "gates of the first warp": ("gates without boxes", WEIGHTS,
        "part.first_row / 2 + part.row_warp * kWarpRows", "part.first_row / 2"),
    "the gate's rows as linear ones": ("gates without boxes", WEIGHTS, "(gated ? tile * columns : 0)", "0"),
    "received gates in one place": ("gates in a cluster", RESULTS,
        "(rank * parts_ + part) * block_fours_", "rank * parts_ * block_fours_"),
    "half of what is received": ("gates in a cluster", PLAN, "* course.parts * 16;", "* 16;"),
    "bias of the first block": ("swiglu", RESULTS, "first = first_column() << log2_bytes", "first = 0"),
    "no place for raw rows": ("cast", PLAN, "partial = raw + m * raw_row;", "partial = raw;"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    PREPARED[name].check_mistake(*change)
