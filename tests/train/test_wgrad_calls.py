"""What a walk over a program finds: which param a named value is, and how often the program comes by a name."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fp8.core.deferral import FoundOperands, call_mark, kernel_mark
from jax_fp8.train.wgrad_calls import Origin, WeightProduct, calls, origins, weight_products

pytestmark = pytest.mark.versions

A, B = jnp.ones((16, 32)), jnp.ones((3, 16, 32))
X, SCALE = jnp.ones((16, 8), jnp.float8_e4m3fn), jnp.float32(1)


def named(x, name="it"):
    return jnp.sum(checkpoint_name(x, name))


def origins_of(function, *params):
    jaxpr = jax.make_jaxpr(function)(*params).jaxpr
    return origins(jaxpr, [Origin(i) for i in range(len(params))])["it"]


def scanned(body, stack, shared=0.0):
    """A turn for each element of the stack."""
    return lax.scan(lambda carry, element: (carry + body(element, shared), None), 0.0, stack)[0]


@jax.custom_vjp
def with_a_rule(x):
    return named(x)


with_a_rule.defvjp(lambda x: (named(x), x), lambda x, dy: (2 * dy * x,))


SAME = {
    "as it is": (lambda a, b: named(b), Origin(1)),
    "in calls": (lambda a, b: jax.jit(jax.checkpoint(lambda b, a: named(a)))(b, a), Origin(0)),
    "through a call": (lambda a, b: named(jax.jit(lambda b, a: (a, b))(b, a)[0]), Origin(0)),
    "named before": (lambda a, b: named(checkpoint_name(b, "other")), Origin(1)),
    "in a branch": (lambda a, b: lax.cond(a[0, 0] > 0, lambda a, b: named(b), lambda a, b: 0.0, a, b), Origin(1)),
    "shared by turns": (lambda a, b: scanned(lambda _, shared: named(shared), b, a), Origin(0)),
    "an element": (lambda a, b: scanned(lambda element, _: named(element), b, a), Origin(1, 1)),
    "an element of one": (
        lambda a, b: scanned(lambda element, _: scanned(lambda row, _: named(row), element), b, a),
        Origin(1, 2),
    ),
}
CHANGED = {
    "scaled": lambda a, b: named(2 * a),
    "frozen": lambda a, b: named(lax.stop_gradient(a)),
    "cast": lambda a, b: named(a.astype(jnp.bfloat16)),
    "a row": lambda a, b: named(b[0]),
    "handed on": lambda a, b: lax.scan(lambda carry, _: (2 * carry, named(carry)), a, b)[1].sum(),
    "in a loop": lambda a, b: lax.while_loop(lambda total: total < 3, lambda total: total + named(a), 0.0),
    "in a rule of its own": lambda a, b: with_a_rule(a),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_param_as_it_is(name):
    function, origin = SAME[name]
    assert origins_of(function, A, B) == {origin}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_no_param(name):
    assert origins_of(CHANGED[name], A, B) == {None}


def test_one_name_may_have_several_origins():
    assert origins_of(lambda a, b: named(a) + named(b) + named(a + 1), A, B) == {Origin(0), Origin(1), None}


def test_loops_multiply_calls():
    def function(a, b):
        twice = scanned(lambda element, _: named(element) + named(element), b)
        return twice + named(a) + lax.fori_loop(0, 2, lambda _, total: total + named(a, "unknown"), 0.0)

    dynamic = jax.make_jaxpr(lambda a, n: lax.while_loop(lambda t: t < n, lambda t: t + named(a), 0.0))(A, 3.0).jaxpr
    counts = calls(jax.make_jaxpr(function)(A, B).jaxpr)
    assert counts["it"] == 7 and counts["unknown"] in (2, math.inf) and counts["nobody"] == 0
    assert calls(dynamic)["it"] == math.inf


def operands(**changes) -> FoundOperands:
    types = tuple(map(jax.typeof, (X, SCALE, jnp.ones((32, 8), jnp.float8_e5m2), SCALE)))
    return replace(FoundOperands(0, "layer", "split", types, False), **changes)  # type: ignore[arg-type]


def products(param, found, times=1, slots=None, layers=None):
    """Of a GEMM whose kernel is this param, or each of its elements, called so often."""

    def loss(kernel):
        name = kernel_mark(0, 0)
        return scanned(lambda element, _: named(element, name), kernel) if layers else named(kernel, name)

    def gradient(kernel):
        return sum(named(kernel, call_mark(0)) for _ in range(times))

    programs = (jax.make_jaxpr(function)(param).jaxpr for function in (loss, gradient))
    return weight_products([found], *programs, [param], [slots])


def test_the_product_of_a_kernel():
    assert products(A, operands()) == [WeightProduct(operands(), (0,), (32,), (), None, 1)]
    (twice,) = products(A, operands(), times=2)
    assert (twice.calls, twice.leading) == (2, (2,))
    (dead,) = products(A, operands(), times=0)
    assert (dead.calls, dead.leading) == (0, ())


def test_the_product_of_stacked_kernels():
    stacked = operands(has_slot=True)
    (product,) = products(B, stacked, times=6, slots=3, layers=3)
    assert (product.stacked, product.calls, product.leading) == ((3,), 2, (3, 2))
    assert not products(B, stacked, times=4, slots=3, layers=3)  # some layers would have one call more
    assert not products(B, stacked, times=6, slots=3)  # the kernel of each would be all of them
    assert not products(B, stacked, times=6, slots=6, layers=3)
    assert not products(B, operands(), times=3, layers=3)  # which is whose, nobody would know


def test_operands_of_another_shape_are_not_of_this_kernel():
    assert not products(A.T, operands())
    assert not products(jnp.ones((16, 16)), operands())
