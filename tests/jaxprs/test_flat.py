"""A flat program has no calls, computes the same, and is that of one platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from reference import assert_same_bits

from jax_fp8.jaxprs.flat import flat_program
from jax_fp8.kernels.dispatch import dispatch

pytestmark = pytest.mark.versions


def names(program):
    return [equation.primitive.name for equation in program.jaxpr.eqns]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def calls(x, y):
    unused = jnp.cos(y)
    inner = jax.jit(lambda a, b: (jnp.sin(a) * b, a))
    return doubled(inner(x, y)[0]) + jax.checkpoint(jnp.tanh)(x), inner(unused, y)[1] * 0 + 3


def test_calls_are_replaced_by_what_they_call():
    x, y = jnp.arange(3.0), jnp.float32(0.5)
    program = jax.make_jaxpr(lambda x, y: calls(x, y)[0])(x, y)
    flat = flat_program(program, "cpu")
    assert names(flat) == ["sin", "mul", "mul", "tanh", "add"]
    assert_same_bits(jaxpr_as_fun(flat)(x, y)[0], calls(x, y)[0])


def test_one_platform():
    def by_platform(x):
        return lax.platform_dependent(x, cuda=jnp.sin, default=jnp.cos)

    program = jax.make_jaxpr(by_platform)(jnp.ones(3))
    assert names(flat_program(program, "cuda")) == ["sin"]
    assert names(flat_program(program, "cpu")) == ["cos"]


def test_a_kernel_comes_out_of_its_rules():
    def kernel(x, *, split):
        return (jax.ffi.ffi_call("some_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, number=np.int32(3)),)

    run = jax.jit(lambda x: dispatch("m n -> m n", kernel, lambda x, split: (x + 1,), x)[0] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax_fp8.kernels.dispatch.kernels_run", lambda: True)
        program = jax.make_jaxpr(run)(jnp.ones((2, 3)))
    assert names(flat_program(program, "cuda")) == ["ffi_call", "mul"]
    assert "ffi_call" not in names(flat_program(program, "cpu"))


def test_names_of_scopes_are_kept():
    def scoped(x):
        with jax.named_scope("outer"):
            return jax.jit(jax.named_scope("inner")(jnp.sin))(x)

    (equation,) = flat_program(jax.make_jaxpr(scoped)(jnp.ones(3)), "cpu").jaxpr.eqns
    assert str(equation.source_info.name_stack) == "outer/inner"


def test_loops_and_literals_stay():
    def loop(x):
        return lax.fori_loop(0, 3, lambda _, carry: jax.jit(jnp.sin)(carry), x) + 1, np.float32(2)

    program = jax.make_jaxpr(loop)(jnp.ones(3))
    flat = flat_program(program, "cpu")
    assert names(flat)[-2:] in (["scan", "add"], ["while", "add"])
    for found, expected in zip(jaxpr_as_fun(flat)(jnp.ones(3)), loop(jnp.ones(3)), strict=True):
        assert_same_bits(found, expected)
