"""What csrc/few_rows_gemm.cu asks for in advance, on the CPU: the weights of later products, each part once."""

import numpy as np
import pytest
from emulation import EmulationError, planted
from few_rows import F32, Product
from prepared_rows import PreparedProduct

# More rows than threads, and fewer; blocks of a cluster; and a block without a chunk of its own.
PRODUCTS = {
    "one block": lambda: Product(1, 16, 128, config=11101, d=F32, integers=True),
    "many steps": lambda: Product(2, 16, 2064, config=11101, d=F32, integers=True),
    "a cluster": lambda: Product(3, 16, 272, "bfloat16", config=81101, d=F32, integers=True),
    "many rows": lambda: Product(33, 64, 1040, "1d2d", config=112202, d=F32, integers=True),
    "prepared rows": lambda: PreparedProduct(5, 80, 400, norm="layernorm"),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("upcoming", [(300, 160, 160), (300, 160, 128), (7, 48, 16)])
def test_each_part_is_asked_for_once(name, upcoming):
    check(PRODUCTS[name](), upcoming)


def check(product, upcoming, changes=()):
    alone = product.run(orders=["forward"])
    product.upcoming = upcoming
    assert np.array_equal(product.run(changes, orders=["forward"]), alone)
    first, second = product.times_asked
    asked = upcoming[2] // 16
    assert (first[:, :asked] == 1).all() and (first[:, asked:] == 0).all()
    assert (second[:, 0] == 1).all() and (second[:, 1:] == 0).all()


UPCOMING = "device/few_rows_gemm_upcoming.cuh"
MISTAKES = {
    "never": ("device/few_rows_gemm.cuh", "if (step == last_fetch) ask_for", "if (step == -1) ask_for"),
    "at each step": ("device/few_rows_gemm.cuh", "if (step == last_fetch) ask_for", "ask_for"),
    "whole rows": (UPCOMING, "matrix.row_bytes, matrix.asked", "matrix.row_bytes, matrix.row_bytes"),
    "one row for each thread": (UPCOMING, "row < matrix.rows; row += threads", "row < matrix.rows; row = matrix.rows"),
    "each block asks for all": (UPCOMING, "own = int64_t{blockIdx.x} * blockDim.x + threadIdx.x", "own = threadIdx.x"),
    "a row too many": (UPCOMING, "row < matrix.rows; row", "row <= matrix.rows; row"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    product = Product(1, 48, 1296, config=11101, d=F32, integers=True)
    changes = (MISTAKES[mistake], *product._only_own_kernels())
    with pytest.raises((AssertionError, EmulationError)):
        check(product, (300, 160, 128), changes)
