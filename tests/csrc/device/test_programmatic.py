"""Kernels that begin before the kernel before them has ended: they wait before they touch what that one may, and ask
for their weights before.
"""

import numpy as np
import pytest
from emulation import EmulationError, planted
from few_rows import F32, Product
from new_tokens import check, make
from prepared_rows import PreparedProduct
from token_attention import E4M3, FEW_KERNELS, run

PRODUCTS = {
    "cast": lambda: PreparedProduct(3, 48, 272, d=F32, bias=True, c=True, alpha=0.5),
    "layernorm and cast": lambda: PreparedProduct(5, 80, 400, norm="layernorm", bias=True),
    "norm of bfloat16": lambda: PreparedProduct(8, 48, 272, norm="rmsnorm", casts=False),
    "a ring that goes round": lambda: PreparedProduct(2, 32, 2064, norm="layernorm", config=12101),
    "a norm in a cluster": lambda: PreparedProduct(3, 64, 656, norm="layernorm", config=42102),
    "gates": lambda: PreparedProduct(5, 160, 272, norm="rmsnorm", activation="swiglu", bias=True),
    "rows as they are": lambda: Product(3, 48, 400, d=F32, bias=True, c=True, integers=True),
    "many rows by tile": lambda: Product(35, 64, 1040, "1d2d", config=112202, d=F32, c=True, integers=True),
}


def following(name):
    product = PRODUCTS[name]()
    product.follows = True
    return product


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_begins_early_is_the_same(name):
    assert np.array_equal(following(name).run(), PRODUCTS[name]().run())


def test_it_may_be_written_over_its_addend():
    product = following("cast")
    assert np.array_equal(product.run(in_place=True), PRODUCTS["cast"]().run())


CASES = {
    "bfloat16": {"group": 4, "head_dim": 128, "slots": 200, "prompt_slots": 150, "step": 30, "pairs": 8},
    "FP8": {"cache": E4M3, "group": 1, "head_dim": 64, "slots": 200, "prompt_slots": 150, "step": 45},
}


@pytest.mark.parametrize("case", CASES)
def test_attention_waits(case):
    problem = make(**CASES[case])
    check(problem, run(problem, follows=True))


def test_attention_that_does_not_wait_is_noticed():
    change = ("device/cached_attention.cuh", "  wait_for_kernels_before();\n", "")
    with pytest.raises(EmulationError, match="memory that it must not"):
        run(make(**CASES["bfloat16"]), (change, *FEW_KERNELS), follows=True)


KERNEL = "device/few_rows_gemm.cuh"
WAIT = "  wait_for_kernels_before();\n"
MISTAKES = {
    "no wait": ("cast", KERNEL, WAIT, ""),
    "no wait of rows as they are": ("rows as they are", KERNEL, WAIT, ""),
    "a wait of the first warp alone": ("layernorm and cast", KERNEL, WAIT,
        "  if (threadIdx.x < 32) wait_for_kernels_before();\n"),
    "the scale before the wait": ("cast", KERNEL, WAIT, "  const Factors<kScaling> early(arguments);\n" + WAIT),
    "rows before the wait": ("layernorm and cast", KERNEL, "if (has_early_weights()) fetch_weights_of(0, kStages);\n",
        "if (has_early_weights()) fetch_weights_of(0, kStages), preparer_.fetch_rows();\n"),
    "weights asked for twice": ("a ring that goes round", KERNEL,
        "if (!has_early_weights()) fetch_weights_of(kFirst, kStages);",
        "fetch_weights_of(kFirst + kStages, 2 * kStages);"),
    "no wait for rows behind the weights": ("a ring that goes round", KERNEL, "wait_for_all_but<0>();",
        "wait_for_all_but<kFirst>();"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    with pytest.raises((AssertionError, EmulationError)):
        following(name).check((tuple(change), *following(name)._only_own_kernels()))
