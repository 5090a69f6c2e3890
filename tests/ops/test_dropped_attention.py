"""Attention that drops weights is Flax's with the same key; what nobody sees stays zero; each device has its masks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import dot_product_attention, make_causal_mask
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from jax_fp8.ops.attention import attention

BATCH, SEQ, HEADS, HEAD_DIM, RATE = 4, 16, 4, 16, 0.4
KEY = jax.random.key(7)
SEGMENTS = np.int32([[1] * 6 + [2] * 10] * BATCH)
LENGTHS = np.int32([3, SEQ, 1, 9])


def operands(kv_heads=HEADS):
    query, key, value = np.random.default_rng(0).normal(size=(3, BATCH, SEQ, HEADS, HEAD_DIM)).astype(np.float32)
    return query, key[:, :, :kv_heads], value[:, :, :kv_heads]


@partial(jax.jit, static_argnames=("rate", "causal", "window", "implementation"))
def dropped(*arrays, rate=RATE, key=KEY, causal=True, **options):
    options = {"implementation": "xla", **options}
    return attention(*arrays, causal=causal, dropout_rate=rate, dropout_key=key, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_flaxs(causal):
    query, key, value = operands(2)

    @jax.jit
    def flaxs(query, key, value, rng=KEY):
        mask = make_causal_mask(jnp.ones((BATCH, SEQ))) if causal else None
        repeated = (jnp.repeat(part, 2, axis=2) for part in (key, value))
        options = {"mask": mask, "broadcast_dropout": False, "dropout_rng": rng, "dropout_rate": RATE}
        return dot_product_attention(query, *repeated, **options)

    def gradients(of):
        differentiate = jax.value_and_grad(lambda *arrays: jnp.sum(jnp.sin(of(*arrays))), (0, 1, 2))
        return jax.jit(differentiate)(query, key, value)

    got = gradients(lambda *arrays: dropped(*arrays, causal=causal))
    jax.tree.map(lambda one, other: assert_close(one, other, "float32"), got, gradients(flaxs))
    other = flaxs(query, key, value, rng=jax.random.key(8))  # negative control
    assert np.abs(dropped(query, key, value, causal=causal) - other).max() > 0.1


@pytest.mark.parametrize("told", [{}, {"segment_ids": SEGMENTS}, {"lengths": LENGTHS}, {"window": 3}], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_rate_of_almost_nothing_is_attention(told, dtype):
    """The weights that are dropped are some of those that attention has, and no others."""
    arrays = [x.astype(dtype) for x in operands(2)]

    def gradients(of):
        of_loss = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(of(*x).astype(jnp.float32))), (0, 1, 2))
        return jax.jit(of_loss)(*arrays)

    got, expected = gradients(lambda *x: dropped(*x, rate=1e-9, **told)), gradients(lambda *x: plain(*x, **told))
    jax.tree.map(lambda one, other: assert_close(one, other, jnp.dtype(dtype).name), got, expected)
    if "lengths" in told:
        found = np.asarray(dropped(*arrays, **told))
        assert not found[0, 3:].any() and found[0, :3].any()


def plain(*arrays, **told):
    return attention(*arrays, causal=True, implementation="xla", **told)


@pytest.mark.parametrize("told", [{}, {"segment_ids": SEGMENTS}, {"lengths": LENGTHS}, {"window": 3}], ids=str)
def test_strict_attention_is_attention(told):
    """Its products are in float32 then, as those of attention that drops nothing."""
    arrays = [x.astype(jnp.bfloat16) for x in operands(2)]
    expected = dropped(*arrays, **told)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = dropped(*arrays, **told)
    assert found.dtype == jnp.bfloat16
    assert_close(found, expected, "bfloat16")


def test_how_much_is_dropped():
    """Values of one, and scores of zero: each result is the part of its weights that is left, over 1 - rate."""
    shape = (8, 64, 4, HEAD_DIM)
    nothing, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    for rate in (0.1, 0.5):
        found = np.asarray(dropped(nothing, nothing, ones, rate=rate, causal=False))[..., 0]
        deviation = np.sqrt(rate / (1 - rate) / 64 / found.size)
        assert abs(found.mean() - 1) < 5 * deviation
        kept = found * (1 - rate) * 64
        np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)
        assert abs(kept.mean() / 64 - (1 - rate)) < 5 * deviation


def test_the_gradient_has_the_mask_of_the_forward():
    """Attention is linear in its values, so its slope along them is its value there."""
    query, key, value = operands()
    cotangent, direction = np.random.default_rng(1).normal(size=(2, *query.shape)).astype(np.float32)
    pull = jax.jit(lambda value: jax.vjp(lambda value: dropped(query, key, value), value)[1](cotangent))
    slope = float(np.vdot(pull(value)[0], direction))
    assert slope == pytest.approx(float(np.vdot(cotangent, dropped(query, key, direction))), rel=1e-4)
    other = dropped(query, key, direction, key=jax.random.key(8))  # negative control
    assert slope != pytest.approx(float(np.vdot(cotangent, other)), rel=1e-2)


def test_one_sequence():
    query, key, value = (x[:1] for x in operands(2))
    alone = dropped(query[0], key[0], value[0], segment_ids=SEGMENTS[0])
    np.testing.assert_array_equal(alone, np.asarray(dropped(query, key, value, segment_ids=SEGMENTS[:1]))[0])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_on_shards(kind):
    """On Auto axes the masks are those of one device. On Explicit axes no two devices have the same ones."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[:4])
    query, key, value = operands()
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor"))) for x in (query, key, value)]
    found = np.asarray(jax.jit(lambda *x: dropped(*x, causal=False))(*placed))
    expected = dropped(query, key, value, causal=False)
    if kind == AxisType.Auto:
        assert_close(found, expected, "float32")
        return
    nothing = jax.device_put(np.zeros_like(query), NamedSharding(mesh, P("data", None, "tensor")))
    eye = np.tile(np.eye(SEQ, dtype=np.float32)[None, :, None], (BATCH, 1, HEADS, 1))
    eye = jax.device_put(eye, nothing.sharding)
    masks = np.asarray(jax.jit(lambda *x: dropped(*x, causal=False))(nothing, nothing, eye)) != 0
    parts = [masks[b : b + 2, :, h : h + 2] for b in (0, 2) for h in (0, 2)]
    assert 0.5 < masks.mean() < 0.7
    assert all((one != other).any() for i, one in enumerate(parts) for other in parts[:i])


def test_cudnn_is_not_asked_to():
    with pytest.raises(ValueError, match=r'attention_dropout_rate needs implementation="xla" .*got cuDNN; pass that'):
        dropped(*operands(), implementation="cudnn")
