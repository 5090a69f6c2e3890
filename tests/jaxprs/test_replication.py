"""What differs between devices of an axis, found in jaxprs; and that what is found to be the same is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import in_a_branch, with_a_jvp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_fp8.jaxprs.replication import which_differ

pytestmark = pytest.mark.versions

MESH = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
OWN, ALIKE = jnp.arange(8, dtype=jnp.float32) + 1, jnp.arange(4, dtype=jnp.float32) + 1
AXIS = "tensor"


@jax.custom_vjp
def summed_in_a_rule(x):
    return lax.psum(x, AXIS)


summed_in_a_rule.defvjp(lambda x: (summed_in_a_rule(x), None), lambda _, dy: (dy,))


def turns(own, alike):
    """Of a loop of three turns: what was mixed in in the first one reaches the last carry in the third."""

    def turn(_, carry):
        first, second, third, apart = carry
        return first + own, second + first, third + second, apart + 1

    return lax.fori_loop(0, 3, turn, (alike, alike, alike, alike))[2:]


def scanned(own, alike):
    """What is carried, and what each turn leaves; of arrays with a part for each turn, and of what all share."""
    carry, left = lax.scan(lambda carry, x: (carry + x, (carry, x, own.sum())), 0.0, alike)
    return carry, *left


def by_condition(own, _):
    return lax.while_loop(lambda carry: carry[0] < own[0], lambda carry: (carry[0] + 1, carry[1] * 2), (0.0, 1.0))


def by_platform(own, _):
    return (lax.platform_dependent(own, cuda=jnp.sin, default=lambda x: lax.psum(x, AXIS)),)


def jitted(own, alike):
    return jax.jit(lambda a, b: (b, lax.psum(a, AXIS), a))(own, alike)


def rematerialised(own, alike):
    return jax.checkpoint(lambda a, b: (lax.psum(jnp.sin(a), AXIS), b * a[:4]))(own, alike)


# A function of what differs and of what does not, and which of its results differ.
CASES = {
    "any operation": (lambda own, alike: (own * alike, alike * 2, jnp.sum(own), own[:2], 3.0), "10110"),
    "a sum": (lambda own, alike: (lax.psum(own, AXIS), lax.psum((own, alike), AXIS)[0], own), "001"),
    "a sum over another axis": (lambda own, alike: lax.psum((own, alike), "data"), "10"),
    "a sum over both": (lambda own, alike: (lax.psum(own, ("data", AXIS)),), "0"),
    "a mean": (lambda own, alike: (lax.pmean(own, AXIS),), "0"),
    "the largest and the smallest": (lambda own, alike: (lax.pmax(own, AXIS), lax.pmin(own, AXIS)), "00"),
    "a gather": (lambda own, alike: (lax.all_gather(own, AXIS), lax.all_gather(own, "data")), "01"),
    "parts of a sum": (lambda own, alike: (lax.psum_scatter(alike, AXIS, tiled=True),), "1"),
    "from elsewhere": (lambda own, alike: (lax.ppermute(own, AXIS, [(0, 1), (1, 0)]), lax.axis_index(AXIS)), "11"),
    "the number on another axis": (lambda own, alike: (lax.axis_index("data") + alike,), "0"),
    "groups": (lambda own, alike: (lax.psum(own, AXIS, axis_index_groups=[[0], [1]]),), "1"),
    "a barrier": (lambda own, alike: lax.optimization_barrier((own, alike)), "10"),
    "a jitted function": (jitted, "001"),
    "checkpoint": (rematerialised, "01"),
    "a rule of its own": (lambda own, alike: (summed_in_a_rule(own), jax.nn.relu(own)), "01"),
    "a rule for tangents": (
        lambda own, alike: (with_a_jvp(lambda x: lax.psum(x, AXIS))(own), with_a_jvp(abs)(own)),
        "01",
    ),
    "a loop": (turns, "10"),
    "a scan": (scanned, "0001"),
    "a scan of parts": (lambda own, alike: lax.scan(lambda carry, x: (carry, x), jnp.sum(alike), own), "01"),
    "a scan that carries": (lambda own, alike: lax.scan(lambda carry, x: (carry + x, x), 0.0, own), "11"),
    "a loop of as many turns as differ": (by_condition, "11"),
    "a branch": (lambda own, alike: lax.cond(alike[0] > 0, lambda: (own, alike), lambda: (alike, alike)), "10"),
    "a branch without a sum": (lambda own, alike: (in_a_branch(jnp.sin)(own), in_a_branch(jnp.sin)(alike)), "10"),
    "a branch by what differs": (lambda own, alike: (lax.cond(own[0] > 2, lambda: alike, lambda: -alike),), "1"),
    "a platform": (by_platform, "1"),
    "a linear solve": (lambda own, alike: tuple(jnp.linalg.inv(jnp.eye(2) * x[0]) for x in (alike, own)), "01"),
}


def test_rows_sent_in_ragged_parts_are_each_devices_own():
    """They cannot be run on CPUs."""
    sizes = jnp.arange(2)

    def function(own, alike):
        rows = lax.ragged_all_to_all(alike, alike, sizes, sizes, sizes, sizes, axis_name=AXIS)
        return rows, lax.psum(rows, AXIS)

    traced = jax.make_jaxpr(on_devices(function))(OWN, ALIKE).jaxpr
    assert which_differ(traced, AXIS, [True, False]) == [True, False]


def test_a_reduction_by_a_function_of_ones_own_is_of_all_its_operands():
    """Whatever the function does with two numbers, an array is reduced."""

    def function(own, alike):
        last = lax.reduce(own, alike[0], lambda a, b: b, (0,))
        return last, lax.reduce(alike, alike[0], lambda a, b: b, (0,))

    traced = jax.make_jaxpr(on_devices(function))(OWN, ALIKE).jaxpr
    assert which_differ(traced, AXIS, [True, False]) == [True, False]
    swapped = jax.make_jaxpr(on_devices(lambda own, alike: (lax.reduce(own, alike[0], lambda a, b: a, (0,)),)))
    assert which_differ(swapped(OWN, ALIKE).jaxpr, AXIS, [True, False]) == [True]


def on_devices(function):
    specs = {"in_specs": (P(AXIS), P()), "out_specs": P(("data", AXIS)), "check_vma": False}
    return jax.shard_map(lambda *args: jax.tree.map(lambda x: jnp.ravel(x), function(*args)), mesh=MESH, **specs)


@pytest.mark.parametrize("case", CASES)
def test_what_differs(case):
    """And when it is computed: what is the same is so, and what differs does, but on a platform with another branch."""
    function, expected = CASES[case]
    mapped = on_devices(lambda own, alike: tuple(function(own, alike)))
    found = which_differ(jax.make_jaxpr(mapped)(OWN, ALIKE).jaxpr, AXIS, [True, False])
    assert "".join(str(int(differs)) for differs in found) == expected
    if case == "a platform":
        return
    for result, differs in zip(jax.jit(mapped)(OWN, ALIKE), found, strict=True):
        parts = np.reshape(result, (2, 2, -1))  # (data, tensor, elements)
        assert np.array_equal(parts[:, 0], parts[:, 1]) != differs
