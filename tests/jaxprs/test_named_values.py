"""What a program says of a value with a name: which argument it is, and how often the program comes by the name."""

import math

import jax
import jax.numpy as jnp
import pytest
from holders import COUNTS, HOLDERS, on_shards, with_a_jvp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fp8.jaxprs.named_values import Origin, call_counts, origins

pytestmark = pytest.mark.versions

A, B = jnp.ones((16, 32)), jnp.ones((3, 16, 32))


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
    "in a rule for tangents": lambda a, b: with_a_jvp(lambda a: a + named(a))(a),
    "on shards": lambda a, b: on_shards(lambda a: a + named(a))(a),
}


@pytest.mark.parametrize("name", SAME)
def test_a_param_as_it_is(name):
    function, origin = SAME[name]
    assert origins_of(function, A, B) == {origin}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_no_param(name):
    assert origins_of(CHANGED[name], A, B) == {None}


def test_one_name_may_have_several_origins():
    assert origins_of(lambda a, b: named(a) + named(b) + named(a + 1), A, B) == {Origin(0), Origin(1), None}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_holds_a_named_value_says_how_often_it_is_called(name):
    jaxpr = jax.make_jaxpr(HOLDERS[name](lambda x: checkpoint_name(2 * x, "it")))(A).jaxpr
    assert call_counts(jaxpr) == {"it": COUNTS[name]}
    assert not call_counts(jax.make_jaxpr(HOLDERS[name](jnp.sin))(A).jaxpr)  # negative control


def test_loops_multiply_calls():
    def function(a, b):
        twice = scanned(lambda element, _: named(element) + named(element), b)
        return twice + named(a) + lax.fori_loop(0, 2, lambda _, total: total + named(a, "unknown"), 0.0)

    dynamic = jax.make_jaxpr(lambda a, n: lax.while_loop(lambda t: t < n, lambda t: t + named(a), 0.0))(A, 3.0).jaxpr
    counts = call_counts(jax.make_jaxpr(function)(A, B).jaxpr)
    assert counts["it"] == 7 and counts["unknown"] in (2, math.inf) and counts["nobody"] == 0
    assert call_counts(dynamic)["it"] == math.inf
