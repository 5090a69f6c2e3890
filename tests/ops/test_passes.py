"""What the composite ops are made of: kernels side by side, how a gradient is to look, when an input is made again.

That the three GEMMs are right is tested through `linear`, `norm_linear` and `norm_mlp`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, KERNEL
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose
from jax_fp8.ops.passes import GemmResidual, Like, LinearParameters, cast_weight, plain_linear, split_columns

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


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_plain_product_of_kernels_side_by_side(in_parts):
    x = jax.random.normal(jax.random.key(9), (8, 32))
    y = plain_linear(x, LinearParameters(KERNELS, BIASES), jnp.float32, in_parts)
    expected = x @ WHOLE + jnp.concatenate(BIASES)
    np.testing.assert_array_equal(jnp.concatenate(y, axis=1) if in_parts else y, expected)
    assert not in_parts or [part.shape[1] for part in y] == [48, 16, 16]


def test_columns_are_split_by_the_widths():
    pieces = split_columns(WHOLE, (48, 16, 16))
    jax.tree.map(np.testing.assert_array_equal, pieces, KERNELS)
    assert split_columns(WHOLE, (80,))[0] is WHOLE


@pytest.mark.parametrize(
    ("recipe", "scales"), [(CurrentScaling(), None), (DelayedScaling(), jnp.float32([1, 0.03, 1]))]
)
def test_kernels_side_by_side_are_cast_as_one(recipe, scales):
    cast_of = partial(recipe.cast, KERNEL, scales)
    beside, whole = (cast_weight(kernel, cast_of) for kernel in (KERNELS, WHOLE))
    jax.tree.map(assert_same_bits, beside, whole)
    assert beside.rowwise.shape == (32, 80) and beside.columnwise.shape == (80, 32)
    other = cast_weight(KERNELS[::-1], cast_of)
    with pytest.raises(AssertionError):
        assert_same_bits(other.rowwise.values, whole.rowwise.values)


def test_how_a_gradient_is_to_look_is_static():
    like = Like.of({"w": jnp.zeros((2, 3), jnp.bfloat16)})
    assert jax.tree.leaves(like) == [] and like["w"].dtype == jnp.bfloat16
    assert jax.jit(lambda like: like)(like) == like
    gradient = jnp.ones((2, 3))
    assert like["w"].place(gradient) is gradient


def test_on_an_explicit_mesh_a_gradient_is_placed_like_its_primal():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        primal = jax.device_put(jnp.zeros((4, 6)), NamedSharding(mesh, P(None, "x")))
        placed = jax.jit(lambda primal, g: Like.of(primal).place(g))(primal, jnp.ones((4, 6)))
    assert placed.sharding.spec == P(None, "x")


def test_an_input_is_made_again_where_it_was_not_kept():
    x = jax.random.normal(jax.random.key(3), (16, 32))
    cast = Cast.with_scale(E4M3, jnp.float32(0.02))
    kept, alone = quantize_transpose(x, cast), quantize_rowwise(x, cast)
    again = cast.again(alone.rowwise.scale)
    residual = GemmResidual(alone.columnwise, again, kept.rowwise, jnp.zeros(2)).with_input(quantize_transpose, x, x)
    assert_same_bits(residual.x_transposed.values, kept.columnwise.values)
    whole = GemmResidual(kept.columnwise, again, kept.rowwise, jnp.zeros(2))
    assert whole.with_input(None, x, x) is whole
