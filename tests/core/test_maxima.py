"""The dtype in which jax adds up by maximum: over uses of a value, in a scan, and back to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_fp8 as fp8
from jax_fp8.core.maxima import as_float32, is_by_maximum, like

pytestmark = pytest.mark.versions


@jax.custom_vjp
def _use(value, number):
    return number


_use.defvjp(lambda value, number: (number, (value, number)), lambda kept, _: (like(kept[0], kept[1]), None))


def cotangent(convert):
    """Of a vector with three uses, whose backwards return 1, 5 and 3."""

    def loss(vector):
        value = convert(vector)
        return sum(jnp.sum(_use(value, jnp.full(2, number))) for number in (1.0, 5.0, 3.0))

    return jax.jit(jax.grad(loss))(jnp.zeros(2))


def test_several_uses_leave_the_largest():
    np.testing.assert_array_equal(cotangent(fp8.by_maximum), [5, 5])
    np.testing.assert_array_equal(cotangent(lambda vector: vector), [9, 9])  # a control: float32 adds


def test_a_scan_leaves_the_largest_of_its_iterations():
    numbers = jnp.array([[2.0, 1.0], [7.0, 0.5], [4.0, 3.0]])

    def loss(vector):
        value = fp8.by_maximum(vector)
        return jnp.sum(lax.scan(lambda total, number: (total + _use(value, number), None), jnp.zeros(2), numbers)[0])

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.zeros(2)), [7, 3])


def test_what_is_not_used_is_zero():
    grads = jax.jit(jax.grad(lambda tree: jnp.sum(_use(fp8.by_maximum(tree)["used"], jnp.ones(2)))))
    tree = {"used": jnp.zeros(2), "unused": jnp.zeros(2)}
    np.testing.assert_array_equal(grads(tree)["unused"], [0, 0])


def test_values_and_dtypes_go_both_ways():
    value = fp8.by_maximum(jnp.array([1.5, 0.0]))
    assert is_by_maximum(value) and not is_by_maximum(as_float32(value))
    np.testing.assert_array_equal(as_float32(value), [1.5, 0])
    assert is_by_maximum(like(value, jnp.ones(2))) and like(jnp.ones(2), jnp.ones(2)).dtype == jnp.float32


def test_only_float32_is_taken():
    with pytest.raises(ValueError, match=r"must be float32, got bfloat16 at \['scale'\]"):
        fp8.by_maximum({"scale": jnp.ones(3, jnp.bfloat16)})
