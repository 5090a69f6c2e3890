"""Casts that move to the kernel before. That the numbers stay the same is in test_chain.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.core.formats import E4M3
from jax_fp8.jaxprs.equations import array_of
from jax_fp8.jaxprs.flat import flat_program
from jax_fp8.kernels import chain_casts
from jax_fp8.kernels.chain_casts import ATTENTION, GEMM, with_casts_before

PLAIN = {"has_bias": False, "has_c": False, "norm": "", "casts": False, "a_row": np.int32(0), "casts_d": False}
PLAIN |= {"d_row": np.int32(0)}
SCALES = np.float32([3.0, 0.5, 7.0])


def product(x, scales=SCALES, **attributes):
    """A GEMM of few rows by a square weight, which casts its rows."""
    how = PLAIN | {"casts": True, "a_row": np.int32(1)} | attributes
    weight, one = jnp.zeros((x.shape[1], x.shape[1]), E4M3), jnp.float32(1)
    results = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)]
    results += [jax.ShapeDtypeStruct(x.shape, E4M3)] if how["casts"] else []
    return jax.ffi.ffi_call(GEMM, results)(x, weight, scales, one, **how)[0]


def attention(x):
    absent = jnp.zeros((0, 0), jnp.float32)
    results = [jax.ShapeDtypeStruct((*x.shape[:1], 2, x.shape[1] // 2), x.dtype)]
    return jax.ffi.ffi_call(ATTENTION, results)(*[x] * 11, absent, attended_row=np.int32(0))[0]


X = jnp.zeros((8, 32), jnp.bfloat16)


def calls(function, *arrays):
    """The kernels that a function calls, when casts have moved: attributes, operands and results."""
    program = with_casts_before(flat_program(jax.make_jaxpr(function)(*(arrays or (X,))), "cuda"))
    return [
        (dict(equation.params["attributes"]), [*map(array_of, equation.invars)], [*map(array_of, equation.outvars)])
        for equation in program.jaxpr.eqns
        if equation.primitive.name == "ffi_call"
    ]


def test_a_gemm_casts_for_the_next_one():
    (first, operands, results), (second, of_second, second_results) = calls(lambda x: product(product(x)))
    assert first["casts"] and first["casts_d"] and first["d_row"] == 1
    assert operands[-1].shape == (3,) and results[0].dtype == E4M3 and results[1].dtype == E4M3
    assert not second["casts"] and second["a_row"] == 1 and not second["casts_d"]
    assert of_second[0].dtype == E4M3 and [result.dtype for result in second_results] == [jnp.bfloat16]


def test_attention_casts_for_a_gemm():
    (first, operands, results), (second, of_second, _) = calls(lambda x: product(attention(x).reshape(8, 1, 32)[:, 0]))
    assert first["attended_row"] == 1 and operands[11].shape == (3,) and results[0].dtype == E4M3
    assert results[0].shape == (8, 2, 16) and of_second[0].dtype == E4M3 and of_second[0].shape == (8, 32)
    assert not second["casts"]


def test_every_cast_of_a_chain_moves_that_can():
    found = calls(lambda x: product(product(product(x))))
    assert [(how["casts"], how["casts_d"]) for how, _, _ in found] == [(True, True), (False, True), (False, False)]


def both(y):
    return product(y), y


@pytest.mark.parametrize(
    "function",
    [
        lambda x: both(product(x)),
        lambda x: (product(y := product(x)), product(y)),
        lambda x: product(product(x)[:4]),
        lambda x: product(product(x) + 1),
        lambda x: product(product(x).T.reshape(8, 32)),
        lambda x: product(product(x), norm="rmsnorm"),
        lambda x: product(product(x), scales=product(x)[0, :3].astype(jnp.float32)),
        lambda x: product(product(x, casts=False).astype(jnp.float16).astype(jnp.bfloat16)),
        lambda x: product(x),
    ],
    ids=["returned", "two readers", "a part", "a sum", "transposed", "a norm", "a later scale", "other", "no kernel"],
)
def test_what_stays_where_it_is(function):
    assert not any(how["casts_d"] for how, _, _ in calls(function))


def test_many_rows_stay_where_they_are():
    assert not any(how["casts_d"] for how, _, _ in calls(lambda x: product(product(x)), jnp.zeros((65, 32), X.dtype)))


def test_other_gpus_have_no_kernel_for_what_is_cast_before(monkeypatch):
    monkeypatch.setattr(chain_casts, "has_warpgroups", lambda: False)
    assert not any(how["casts_d"] for how, _, _ in calls(lambda x: product(product(x))))
