"""An Fp8Array is its two leaves, and means their product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array

pytestmark = pytest.mark.versions


def every_value(dtype, scale=1.0) -> Fp8Array:
    return Fp8Array(jnp.asarray(np.arange(256, dtype=np.uint8).view(np.dtype(dtype))), jnp.float32(scale))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-100, 7e20])
@pytest.mark.parametrize("result", [jnp.float32, jnp.bfloat16])
def test_dequantize_is_the_product_rounded_to_float32_and_then_once(dtype, scale, result):
    array = every_value(dtype, scale)
    exact = reference.dequantize(array.values, array.scale)  # 4 times 24 bits fit in float64
    expected = exact.astype(np.float32).astype(result)
    number = ~np.isnan(exact)
    for dequantized in (array.dequantize(result), jax.jit(lambda array: array.dequantize(result))(array)):
        assert_same_bits(np.asarray(dequantized)[number], expected[number])
        assert np.isnan(np.asarray(dequantized)[~number]).all()
    assert number.sum() >= 250


def test_dequantize_uses_the_scale():
    array = every_value(E4M3, 0.3)
    with pytest.raises(AssertionError):
        assert_same_bits(np.asarray(array.dequantize())[:127], np.asarray(every_value(E4M3).dequantize())[:127])


def test_shape_and_dtype_are_those_of_the_values():
    array = Fp8Array(jnp.zeros((2, 3), E5M2), jnp.float32(1))
    assert array.shape == (2, 3)
    assert array.dtype == E5M2
    assert array.dequantize().dtype == jnp.float32


def test_the_leaves_of_the_pytree_are_values_and_scale():
    array = every_value(E4M3, 0.5)
    leaves, treedef = jax.tree.flatten(array)
    assert [leaf.dtype for leaf in leaves] == [E4M3, jnp.float32]
    restored = jax.tree.unflatten(treedef, leaves)
    through_jit = jax.jit(lambda array: array)(array)
    for copy in (restored, through_jit):
        assert isinstance(copy, Fp8Array)
        assert_same_bits(copy.values, array.values)
        assert_same_bits(copy.scale, array.scale)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        every_value(E4M3).scale = jnp.float32(2)
