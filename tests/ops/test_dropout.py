"""Dropout is Flax's, with its gradient, and the mask is drawn again instead of being kept."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from jax_fp8.core.shards import TensorParallel
from jax_fp8.ops.dropout import dropout

KEY, RATE = jax.random.key(3), 0.25
X, RESIDUAL = jax.random.normal(jax.random.key(0), (2, 8, 16, 32))


class Ours(nn.Module):
    def __call__(self, x):
        return dropout(x, self.make_rng("dropout"), RATE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_it_is_flaxs(dtype):
    x, rngs = X.astype(dtype), {"dropout": KEY}
    expected = nn.Dropout(RATE, deterministic=False).apply({}, x, rngs=rngs)
    np.testing.assert_array_equal(Ours().apply({}, x, rngs=rngs), expected)
    assert (Ours().apply({}, x, rngs={"dropout": jax.random.key(4)}) != expected).any()


def test_how_much_is_dropped():
    """A mean of 4,096 elements, within five of its standard deviations; what is left has the mean that it had."""
    for rate in (0.1, 0.5, 0.9):
        y = dropout(jnp.ones(4096), KEY, rate)
        deviation = np.sqrt(rate * (1 - rate) / y.size)
        assert abs(float((y == 0).mean()) - rate) < 5 * deviation
        assert abs(float(y.mean()) - 1) < 5 * deviation / (1 - rate)
        np.testing.assert_array_equal(np.unique(y), np.float32([0, 1 / np.float32(1 - rate)]))
    np.testing.assert_array_equal(dropout(X, KEY, 0.0, RESIDUAL), X + RESIDUAL)


def test_rounded_once():
    x, residual = X.astype(jnp.bfloat16), RESIDUAL.astype(jnp.bfloat16)
    exact = dropout(x.astype(jnp.float32), KEY, RATE, residual.astype(jnp.float32))
    np.testing.assert_array_equal(dropout(x, KEY, RATE, residual), exact.astype(jnp.bfloat16))
    twice = dropout(x, KEY, RATE) + residual
    assert (twice != exact.astype(jnp.bfloat16)).any()  # negative control


def test_gradients():
    is_kept = jax.random.bernoulli(KEY, 1 - RATE, X.shape)

    def plain(x, residual):
        return jnp.sum(jnp.sin(jnp.where(is_kept, x / (1 - RATE), 0) + residual))

    def ours(x, residual):
        return jnp.sum(jnp.sin(dropout(x, KEY, RATE, residual)))

    found, expected = (jax.grad(of, (0, 1))(X, RESIDUAL) for of in (ours, plain))
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, "float32")
    assert ((found[0] == 0) == ~is_kept).all()
    remat = jax.grad(jax.checkpoint(ours), (0, 1))(X, RESIDUAL)
    jax.tree.map(np.testing.assert_array_equal, remat, found)


def test_no_mask_is_kept():
    x = X.astype(jnp.bfloat16)
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: dropout(x, KEY, RATE, x), x)[1], x)
    assert sum(leaf.size for leaf in jax.tree.leaves(kept)) < 16
    of_flax = nn.Dropout(RATE, deterministic=False)
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: of_flax.apply({}, x, rngs={"dropout": KEY}), x)[1], x)
    assert sum(leaf.size for leaf in jax.tree.leaves(kept)) >= x.size  # negative control


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_on_shards_it_is_what_it_is_alone(kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2)
    place = NamedSharding(mesh, P("data", None, "tensor"))

    def of(x, residual):
        return jnp.sum(jnp.sin(dropout(x, KEY, RATE, residual)))

    expected = jax.jit(jax.value_and_grad(of, (0, 1)))(X, RESIDUAL)
    placed = jax.jit(jax.value_and_grad(of, (0, 1)))(*(jax.device_put(x, place) for x in (X, RESIDUAL)))
    jax.tree.map(lambda got, wanted: assert_close(got, wanted, "float32"), placed, expected)


@pytest.mark.parametrize("sequence", [True, False])
def test_other_rows_have_other_masks(sequence):
    """With sequence parallelism; otherwise all devices of `tensor` have the same rows, and one mask."""
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    tensor = TensorParallel("tensor", 2, sequence)
    local = jax.shard_map(
        lambda x: dropout(x, KEY, RATE, tensor=tensor),
        mesh=mesh,
        in_specs=P("tensor"),
        out_specs=P("tensor"),
        check_vma=False,
    )
    first, second = np.split(np.asarray(local(jnp.ones((8, 32)))), 2)
    assert (first != second).any() == sequence
