"""Rows that are gathered and sums that are scattered, on four devices beside what NumPy makes of whole arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.core.shards import TensorParallel
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.kernels.quantize import quantize_transpose as quantize_transpose_eagerly
from jax_fp8.ops import collectives

SIZE, ROWS, COLUMNS = 4, 16, 8
WHOLE, SEQUENCE = TensorParallel("tensor", SIZE), TensorParallel("tensor", SIZE, sequence=True)
# A matrix for each device.
X = np.random.default_rng(0).normal(size=(SIZE, ROWS, COLUMNS)).astype(np.float32)

quantize_transpose = jax.jit(quantize_transpose_eagerly)


over_tensor = partial(on_devices, tensor=SIZE, in_specs=P("tensor"), out_specs=P("tensor"))


def each(function):
    """A function of one device's matrix, of arrays with a leading dim of devices."""
    return lambda *given: jax.tree.map(lambda x: x[None], function(*(x[0] for x in given)))


def test_without_an_axis_nothing_happens():
    x = X[0]
    pair = quantize_transpose(x, Cast.with_scale(E4M3, jnp.float32(0.1)))
    for function in (collectives.gather_rows, collectives.reduce_rows, collectives.enter, collectives.leave):
        assert function(x, None) is x or jnp.array_equal(function(x, None), x)
    assert collectives.gather_pair(pair, None) is pair and jnp.array_equal(collectives.gathered_columns(x, None), x)


@pytest.mark.parametrize("tensor", [WHOLE, SEQUENCE], ids=["tensor", "sequence"])
def test_enter_and_leave_are_mirror_images(tensor):
    """`enter` hands on x, or gathers it; `leave` sums. The gradient of each is the other."""
    total = np.sum(X, axis=0)
    left = over_tensor(each(partial(collectives.leave, tensor=tensor)), X)
    entered = over_tensor(each(partial(collectives.enter, tensor=tensor)), X)
    if tensor.sequence:
        np.testing.assert_allclose(left.reshape(total.shape), total, 1e-5, 1e-6)
        assert all(jnp.array_equal(of_one, X.reshape(-1, COLUMNS)) for of_one in entered)
    else:
        assert all(np.allclose(of_one, total, 1e-5, 1e-6) for of_one in left)
        assert jnp.array_equal(entered, X)

    def pulled_back(function, like, gradient):
        return jax.vjp(lambda x: function(x, tensor), jnp.zeros_like(like))[1](gradient)[0]

    through_leave = over_tensor(each(partial(pulled_back, collectives.leave)), X, left)
    assert jnp.array_equal(through_leave, over_tensor(each(partial(collectives.enter, tensor=tensor)), left))
    through_enter = over_tensor(each(partial(pulled_back, collectives.enter)), X, entered)
    assert jnp.array_equal(through_enter, over_tensor(each(partial(collectives.leave, tensor=tensor)), entered))


def test_one_orientation_is_gathered_and_the_other_made_of_it():
    whole = X.reshape(-1, COLUMNS)
    cast = Cast.with_scale(E4M3, jnp.float32(0.02))
    expected = quantize_transpose(whole, cast)

    def gather(x, keep):
        pair = collectives.gather_pair(quantize_rowwise(x, cast), SEQUENCE, keep)
        return pair.rowwise.values, pair.columnwise.values if keep else pair.columnwise

    rowwise, columnwise = over_tensor(each(partial(gather, keep=True)), X)
    for device in range(SIZE):
        assert_same_bits(rowwise[device], expected.rowwise.values)
        assert_same_bits(columnwise[device], expected.columnwise.values)
    assert over_tensor(each(partial(gather, keep=False)), X)[1] is None


def pair_by_tile(tile, columnwise_tile) -> Fp8Pair:
    return quantize_transpose(X[0], Cast.by_tile(E4M3, tile, ScaleFormula(), columnwise_tile))


@pytest.mark.parametrize("tiles", [((1, 4), (1, 4)), ((1, 4), (4, 4)), ((4, 4), (1, 4)), ((5, 5), (5, 5))], ids=str)
def test_scales_by_tile_whose_transpose_is_not_known_are_not_gathered(tiles):
    part = pair_by_tile(*tiles)
    with pytest.raises(ValueError, match=r"must have one scale for the whole tensor, or whole squares .*, got other"):
        collectives.whole_pair(part.rowwise, part)


def test_squares_have_one_scale_in_both_orientations():
    expected = pair_by_tile((4, 4), (4, 4))
    found = collectives.whole_pair(expected.rowwise, expected)
    jax.tree.map(assert_same_bits, found, expected)
    assert collectives.whole_pair(expected.rowwise, expected, keep=False).columnwise is None


def test_columns_are_gathered_and_their_gradient_is_cut():
    gathered = over_tensor(each(partial(collectives.gathered_columns, tensor=WHOLE)), X)
    beside = jnp.concatenate(list(X), axis=1)
    assert all(jnp.array_equal(of_one, beside) for of_one in gathered)

    def pulled_back(x, dy):
        return jax.vjp(lambda x: collectives.gathered_columns(x, WHOLE), x)[1](dy)[0]

    dy = jnp.stack([beside * 2] * SIZE)  # what follows is computed alike on all devices
    assert jnp.array_equal(over_tensor(each(pulled_back), X, dy), X * 2)
