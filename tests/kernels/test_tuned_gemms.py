"""Ranks of tuned GEMMs as a value, in the context and in the program: the right GEMM has the right one, others 0."""

import re

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels import extension
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem, Ranks, ranks_in_use, using_ranks

REASON = h200.missing_reason() or extension.missing_reason()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def problem(m=32, n=48, k=64, b="float8_e4m3fn", **others) -> GemmProblem:
    settings = {"dtype": "bfloat16", "has_bias": False, "has_c": False, "accumulation": "fast"} | others
    return GemmProblem(m, n, k, "float8_e4m3fn", b, **settings)


def test_every_field_of_a_problem_matters():
    found = Ranks({problem(): 3})
    others = [problem(m=16), problem(n=16), problem(k=16), problem(b="float8_e5m2"), problem(dtype="float32")]
    others += [problem(has_bias=True), problem(has_c=True), problem(accumulation="split")]
    assert found[problem()] == 3 and not any(other in found for other in others)


def test_ranks_are_a_value():
    assert hash(Ranks({problem(): 3})) == hash(Ranks({problem(): 3})) != hash(Ranks({problem(): 4}))
    one_way, other_way = ({problem(m): m for m in order} for order in ((16, 32), (32, 16)))
    assert Ranks(one_way) == Ranks(other_way) and hash(Ranks(one_way)) == hash(Ranks(other_way))
    assert (
        Ranks({problem(16): 0, problem(32): 1}) == Ranks({problem(32): 1}) == {problem(32): 1}
    )  # 0 is what others take


# ---- in the program --------------------------------------------------------------------------------------------------


def lowered_candidates(function, *args) -> list[int]:
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return candidates_of(text)


def candidates_of(text: str) -> list[int]:
    calls = [line for line in text.splitlines() if "jax_fp8_gemm" in line]
    return [int(re.search(r"candidate = (-?\d+) : i32", line)[1]) for line in calls]


def product(m, n, k, b_dtype=E4M3, **settings):
    a, b = jnp.zeros((m, k), E4M3), jnp.zeros((n, k), b_dtype)
    return fp8.matmul(fp8.Fp8Array(a, jnp.float32(1)), fp8.Fp8Array(b, jnp.float32(1)), **settings)


def test_the_rank_reaches_its_gemm_only(with_kernels):
    def products():
        addend = jnp.zeros((32, 48), jnp.float32)
        gradient = product(32, 48, 64, E5M2, dtype=jnp.float32, c=addend, accumulation="split")
        return gradient, product(32, 48, 64), product(48, 48, 64), product(32, 48, 64, bias=jnp.zeros(48))

    gradient = problem(b="float8_e5m2", dtype="float32", has_c=True, accumulation="split")
    assert lowered_candidates(products) == [0, 0, 0, 0]
    with using_ranks(Ranks({problem(): 3, gradient: 15, problem(has_bias=True): 0})):
        assert lowered_candidates(products) == [15, 3, 0, 0]
        with using_ranks(Ranks()):
            assert lowered_candidates(products) == [0, 0, 0, 0]
    assert lowered_candidates(products) == [0, 0, 0, 0] and ranks_in_use() == {}


def test_a_jitted_function_is_traced_once_for_equal_ranks():
    traced = []

    @jax.jit
    def function(x):
        traced.append(ranks_in_use())
        return x + 1

    first, second = Ranks({problem(): 3}), Ranks({problem(): 4})
    for used in (Ranks(), first, second, Ranks({problem(): 3}), Ranks({problem(): 0})):
        with using_ranks(used):
            function(1.0)
    assert traced == [Ranks(), first, second]


def test_a_backward_pass_takes_the_ranks_too(with_kernels):
    layer = fp8.Dense(48, recipe=fp8.CurrentScaling())
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def gradient(variables, x):
        return jax.value_and_grad(lambda v, x: layer.apply(v, x).astype(jnp.float32).sum(), (0, 1))(variables, x)

    wgrad = problem(64, 48, 32, b="float8_e5m2", dtype="float32", accumulation="split")
    with using_ranks(Ranks({wgrad: 7, problem(has_bias=True): 2})):
        assert sorted(lowered_candidates(gradient, variables, x)) == [0, 2, 7]
    assert lowered_candidates(gradient, variables, x) == [0, 0, 0]


@compiled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_gemm_is_looked_up_by_the_shapes_of_one_device(axis_type):
    mesh = h200.mesh(axis_type, data=2)
    a = jax.ShapeDtypeStruct((64, 64), E4M3, sharding=h200.on_mesh(mesh, "data"))
    b = jax.ShapeDtypeStruct((48, 64), E4M3, sharding=h200.on_mesh(mesh))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=h200.on_mesh(mesh))

    @jax.jit
    def function(a, b, scale):
        return fp8.matmul(fp8.Fp8Array(a, scale), fp8.Fp8Array(b, scale))

    with using_ranks(Ranks({problem(32): 7, problem(64): 5})):
        lowered = function.lower(a, b, scale)
    # Auto axes are partitioned now, when the context is over.
    assert candidates_of(lowered.compile().as_text()) == [7]
    assert candidates_of(function.lower(a, b, scale).compile().as_text()) == [0]


@compiled
def test_a_rank_that_no_list_has_does_not_compile():
    function = jax.jit(lambda: product(32, 48, 64), out_shardings=h200.on_one_device())
    for rank in (MAX_CANDIDATES, -1):
        with using_ranks(Ranks({problem(): rank})):
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=f"^OUT_OF_RANGE: .*candidate must be from 0 to 15, got {rank}"
            ):
                function.lower().compile()
    with using_ranks(Ranks({problem(): MAX_CANDIDATES - 1})):
        assert candidates_of(function.lower().compile().as_text()) == [15]
