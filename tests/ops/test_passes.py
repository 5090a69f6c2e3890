"""What the composite ops are made of: kernels side by side, when an input is made again.

That the three GEMMs are right is tested through `linear`, `norm_linear` and `norm_mlp`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, KERNEL
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose
from jax_fp8.ops.gemm_residual import GemmResidual
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.ops.passes import cast_weight, plain_linear

pytestmark = pytest.mark.versions

KERNELS = tuple(jax.random.normal(jax.random.key(seed), (32, width)) for seed, width in enumerate((48, 16, 16)))
BIASES = tuple(jnp.full((kernel.shape[1],), seed + 1.0) for seed, kernel in enumerate(KERNELS))
WHOLE = jnp.concatenate(KERNELS, axis=1)


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_plain_product_of_kernels_side_by_side(in_parts):
    x = jax.random.normal(jax.random.key(9), (8, 32))
    y = plain_linear(x, LinearParameters(KERNELS, BIASES), jnp.float32, in_parts)
    expected = x @ WHOLE + jnp.concatenate(BIASES)
    np.testing.assert_array_equal(jnp.concatenate(y, axis=1) if in_parts else y, expected)
    assert not in_parts or [part.shape[1] for part in y] == [48, 16, 16]


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


def test_an_input_is_made_again_where_it_was_not_kept():
    x = jax.random.normal(jax.random.key(3), (16, 32))
    cast = Cast.with_scale(E4M3, jnp.float32(0.02))
    kept, alone = quantize_transpose(x, cast), quantize_rowwise(x, cast)
    again = cast.again(alone.rowwise.scale)
    residual = GemmResidual(alone.columnwise, again, kept.rowwise, jnp.zeros(2)).with_input(quantize_transpose, x, x)
    assert_same_bits(residual.x_transposed.values, kept.columnwise.values)
    whole = GemmResidual(kept.columnwise, again, kept.rowwise, jnp.zeros(2))
    assert whole.with_input(None, x, x) is whole
