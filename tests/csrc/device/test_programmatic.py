"""Kernels that begin before the kernel before them has ended: they wait before they touch what that one may, and ask
for their weights before.
"""

import numpy as np
import pytest
from emulation import EmulationError, planted
from few_rows import F32, Product
from new_tokens import check, is_seen, make
from prepared_rows import PreparedProduct
from token_attention import E4M3, FEW_KERNELS, FEW_SLOTS, run

PRODUCTS = {
    "cast": lambda: PreparedProduct(3, 48, 272, d=F32, bias=True, c=True, alpha=0.5),
    "layernorm and cast": lambda: PreparedProduct(5, 80, 400, norm="layernorm", bias=True),
    "norm of bfloat16": lambda: PreparedProduct(8, 48, 272, norm="rmsnorm", casts=False),
    "a ring that goes round": lambda: PreparedProduct(2, 32, 2064, norm="layernorm", config=12101),
    "a ring without boxes": lambda: PreparedProduct(2, 32, 2064, norm="layernorm", config=12101, device="8.9"),
    "a norm in a cluster": lambda: PreparedProduct(3, 64, 656, norm="layernorm", config=42102),
    "gates": lambda: PreparedProduct(5, 160, 272, norm="rmsnorm", activation="swiglu", bias=True),
    "rows as they are": lambda: Product(3, 48, 400, d=F32, bias=True, c=True, integers=True, device="10.0"),
    "phases": lambda: Product(9, 16, 2064, "bfloat16, 2d", config=311102, d=F32, integers=True),
    "many rows by tile": lambda: Product(35, 64, 1040, "1d2d", config=112202, d=F32, c=True, integers=True),
    "warpgroups": lambda: Product(12, 64, 1168, d=F32, bias=True, c=True, integers=True, config=210011401),
    "warpgroups and prepared rows": lambda: PreparedProduct(9, 80, 400, norm="layernorm", device="9.0", d_scale=2.0),
    "warpgroups and a cast": lambda: PreparedProduct(3, 48, 272, d=F32, bias=True, c=True, device="9.0"),
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
    "a window": {"window": 12, "step": 4, "lengths": [24, 9], "kv_heads": 2},
    "short rows": {"cache": E4M3, "head_dim": 24, "kv_heads": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("changes", [(), FEW_SLOTS], ids=["one block", "a cluster"])
def test_attention_waits_and_asks_for_earlier_tokens(case, changes):
    problem = make(**CASES[case])
    asked = np.zeros((2, *problem.keys.shape[:3]), np.uint8)
    check(problem, run(problem, changes, follows=True, asked=asked))
    seen = is_seen(problem)
    seen[:, problem.own] = False
    asks = problem.keys[0, 0, 0].nbytes % 16 == 0
    assert np.array_equal(asked, np.broadcast_to(seen[None, :, None] & asks, asked.shape))


def test_attention_that_follows_nothing_asks_for_nothing():
    problem = make(**CASES["FP8"])
    asked = np.ones((2, *problem.keys.shape[:3]), np.uint8)
    run(problem, asked=asked)
    assert not asked.any()


EARLY = "device/cached_attention_early.cuh"
OF_ATTENTION = {
    "no wait": ("device/cached_attention.cuh", "  wait_for_kernels_before();\n", ""),
    "slots of unseen tokens": (EARLY, "seen.from_first(from)", "from"),
    "keys alone": (EARLY, "thread >= 4", "thread >= 2"),
    "the prompt alone": (EARLY, "is_new ? end : min(end, seen.prompt)", "min(end, seen.prompt)"),
    "a slot too many": (EARLY, "min(to - from,", "min(to - from + 1,"),
    "slots of the first head": (EARLY, "int64_t{part.head} *", "int64_t{0} *"),
}


@pytest.mark.parametrize("mistake", planted(OF_ATTENTION))
def test_a_mistake_of_attention_is_noticed(mistake):
    problem = make(**CASES["bfloat16"])
    asked = np.zeros((2, *problem.keys.shape[:3]), np.uint8)
    with pytest.raises((AssertionError, EmulationError)):
        check(problem, run(problem, (OF_ATTENTION[mistake], *FEW_KERNELS), follows=True, asked=asked))
        assert np.array_equal(asked.astype(bool)[0, :, 0], is_seen(problem) & (np.arange(200) != problem.own))
        assert np.array_equal(asked[0], asked[1])


KERNEL = "device/few_rows_gemm.cuh"
WAIT = "  wait_for_kernels_before();\n"
MISTAKES = {
    "no wait": ("cast", KERNEL, WAIT, ""),
    "no wait of rows as they are": ("rows as they are", KERNEL, WAIT, ""),
    "a wait of the first warp alone": ("layernorm and cast", KERNEL, WAIT,
        "  if (threadIdx.x < 32) wait_for_kernels_before();\n"),
    "the scale before the wait": ("cast", KERNEL, WAIT, "  factors.load_late(arguments);\n" + WAIT),
    "rows before the wait": ("layernorm and cast", KERNEL, "preparer_.fetch_parameters();\n",
        "preparer_.fetch_parameters(), preparer_.fetch_rows();\n"),
    "the addend before the wait": ("cast", KERNEL, WAIT, "  results.fetch_c();\n" + WAIT),
    "no wait of the warp that asks for boxes": ("cast", KERNEL, "      return wait_for_kernels_before();\n",
        "      return;\n"),
    "weights asked for twice": ("a ring without boxes", KERNEL,
        "if (!kBoxed && !has_early_weights()) fetch_weights_of(kFirst, kStages);",
        "fetch_weights_of(kFirst + kStages, 2 * kStages);"),
    "no wait for rows as they are": ("rows as they are", KERNEL,
        "    } else if (!kBoxed && has_early_weights()) {\n      wait_for_all_but<0>();\n", ""),
    "phases in no batch": ("phases", KERNEL, "      if (has_early_weights()) end_batch();\n", ""),
    "no wait of the warp that asks for rows": ("warpgroups", "device/few_rows_gemm_warpgroups.cuh",
        "    wait_for_kernels_before();\n", ""),
    "no wait of the kernel that prepares": ("warpgroups and prepared rows", "device/few_rows_gemm_rows.cuh",
        "  wait_for_kernels_before();\n", ""),
    "no wait for rows behind the weights": ("a ring that goes round", KERNEL, "wait_for_all_but<0>();",
        "wait_for_all_but<kFirst>();"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", planted({name: mistake[1:] for name, mistake in MISTAKES.items()}))
def test_a_mistake_is_noticed(mistake):
    name, *change = MISTAKES[mistake]
    with pytest.raises((AssertionError, EmulationError)):
        following(name).check((tuple(change), *following(name)._only_own_kernels()))
