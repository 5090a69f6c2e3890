"""Kernels side by side, and how their gradients are to look."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8.ops.parameters import LinearParameters, ParamInfo, gradients_like, joined, split_columns

pytestmark = pytest.mark.versions

KERNELS = tuple(jax.random.normal(jax.random.key(seed), (32, width)) for seed, width in enumerate((48, 16, 16)))
BIASES = tuple(jnp.full((kernel.shape[1],), seed + 1.0) for seed, kernel in enumerate(KERNELS))
WHOLE = jnp.concatenate(KERNELS, axis=1)


def test_parameters_of_several_layers():
    layers = [LinearParameters(*leaves) for leaves in zip(KERNELS, BIASES, strict=True)]
    beside = LinearParameters.beside(*layers)
    assert beside.widths == (48, 16, 16) and beside.in_parts and not layers[0].in_parts
    assert layers[0].widths == (48,)
    without = LinearParameters.beside(*(LinearParameters(kernel, None) for kernel in KERNELS))
    assert without.bias is None


def test_columns_are_split_by_the_widths():
    pieces = split_columns(WHOLE, (48, 16, 16))
    jax.tree.map(np.testing.assert_array_equal, pieces, KERNELS)
    assert split_columns(WHOLE, (80,))[0] is WHOLE


def test_how_a_gradient_is_to_look_is_static():
    like = ParamInfo.from_arrays({"w": jnp.zeros((2, 3), jnp.bfloat16)})
    assert jax.tree.leaves(like) == [] and like["w"].dtype == jnp.bfloat16
    assert jax.jit(lambda like: like)(like) == like
    gradient = jnp.ones((2, 3))
    assert like["w"].place(gradient) is gradient


def test_on_an_explicit_mesh_a_gradient_is_placed_like_its_primal():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        primal = jax.device_put(jnp.zeros((4, 6)), NamedSharding(mesh, P(None, "x")))
        placed = jax.jit(lambda primal, g: ParamInfo.from_arrays(primal).place(g))(primal, jnp.ones((4, 6)))
    assert placed.sharding.spec == P(None, "x")


def test_joined_and_cut_again():
    whole = joined(KERNELS, jnp.bfloat16)
    np.testing.assert_array_equal(whole, WHOLE.astype(jnp.bfloat16))
    assert joined(None, jnp.float32) is None and joined(KERNELS[0], jnp.float32).shape == KERNELS[0].shape
    likes = ParamInfo.from_arrays(KERNELS)
    again = gradients_like(split_columns(whole, (48, 16, 16)), likes)
    assert isinstance(again, tuple) and [part.dtype for part in again] == [jnp.float32] * 3
    assert gradients_like((KERNELS[0],), likes[0]).shape == KERNELS[0].shape  # of one that stands alone, no tuple
