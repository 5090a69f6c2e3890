"""SelfAttention against attention written out in float32, its rotations and its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jax_fp8 as fp8
from jax_fp8.nn.attention import rotate


def attention(params, x, heads, kv_heads, causal):
    """softmax(q kᵀ / sqrt(d)) v in float64, one query head at a time."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    dim = x.shape[-1] // heads
    queries, keys, values = (
        (x @ params[name]["kernel"] + params[name]["bias"]).reshape(*x.shape[:2], -1, dim)
        for name in ("query", "key", "value")
    )
    out = np.zeros((*x.shape[:2], heads, dim))
    for head in range(heads):
        shared = head // (heads // kv_heads)
        query, key, value = queries[:, :, head], keys[:, :, shared], values[:, :, shared]
        logits = query @ key.swapaxes(1, 2) / np.sqrt(dim)
        if causal:
            logits = np.where(np.tril(np.ones(logits.shape[1:])), logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[:, :, head] = weights / weights.sum(axis=-1, keepdims=True) @ value
    return out.reshape(x.shape) @ params["out"]["kernel"] + params["out"]["bias"]


@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["bf16", "current"])
@pytest.mark.parametrize(("heads", "kv_heads", "causal"), [(4, 4, True), (4, 2, True), (4, 1, False)])
def test_against_float64(recipe, heads, kv_heads, causal):
    x = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
    module = fp8.SelfAttention(heads, kv_heads, causal=causal, recipe=recipe)
    params = module.init(jax.random.key(1), x)["params"]
    assert [params[name]["kernel"].shape for name in ("query", "key", "value")] == [
        (64, 64),
        *[(64, kv_heads * 16)] * 2,
    ]
    expected = attention(params, np.asarray(x, np.float64), heads, kv_heads, causal)
    reference.assert_close(module.apply({"params": params}, x), expected, "block" if recipe else "bfloat16")


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
@pytest.mark.parametrize("norm", [None, "layernorm"])
def test_queries_keys_and_values_are_made_apart_and_their_gradients_cast_together(norm, with_kernels):
    """No array of all their columns is cut, and none is put together."""
    module = fp8.SelfAttention(4, 2, norm=norm)
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    gradient = jax.jit(jax.grad(lambda variables, x: module.apply(variables, x).astype(jnp.float32).sum(), argnums=1))
    text = gradient.trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    # Beside the queries: 0, as every other. The gradient is that of x: kernels have none here.
    assert sorted(re.findall(r"first_column = (\d+)", text))[-3:] == ["0", "64", "96"]
    (cast,) = re.findall(r"custom_call @jax_fp8_quantize_transpose_sums.*tensor<32x128xf8E5M2>", text)
    assert [cast.count(f"tensor<32x{width}xbf16>") for width in (64, 32, 128)] == [1, 2, 0]
    assert "tensor<32x128xbf16>" not in text and "tensor<2x16x128xbf16>" not in text


@pytest.mark.parametrize("norm", [None, "rmsnorm"])
@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["bf16", "current"])
def test_the_residual_is_the_input_as_it_came(recipe, norm):
    x = 8 * jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
    without, module = (fp8.SelfAttention(4, norm=norm, recipe=recipe, residual=residual) for residual in (False, True))
    params = module.init(jax.random.key(1), x)
    y, expected = module.apply(params, x), without.apply(params, x).astype(jnp.float32) + x.astype(jnp.float32)
    reference.assert_close(y, expected, "bfloat16")
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(y, without.apply(params, x), "bfloat16")


def test_causality():
    x = jax.random.normal(jax.random.key(0), (1, 16, 64), jnp.bfloat16)
    changed = x.at[:, 10:].set(0)
    for causal in (True, False):
        module = fp8.SelfAttention(4, causal=causal, recipe=None)
        params = module.init(jax.random.key(1), x)
        same = np.asarray(module.apply(params, x)[:, :10] == module.apply(params, changed)[:, :10]).all()
        assert same == causal


def test_rotation_makes_scores_relative():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 32))
    repeated = [jnp.broadcast_to(a, (1, 12, 1, 32)) for a in (query, key)]
    rotated = [rotate(a)[0, :, 0] for a in repeated]
    scores = np.asarray(rotated[0] @ rotated[1].T)
    for distance in (0, 3, 7):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert np.ptp(scores[:, 0]) > 0.1  # and they do depend on the distance


def test_rotation_to_given_positions():
    x = jax.random.normal(jax.random.key(0), (2, 6, 1, 8))
    picked = jnp.int32([[0, 3], [5, 2]])
    found = rotate(jnp.take_along_axis(x, picked[..., None, None], axis=1), picked)
    np.testing.assert_array_equal(found, jnp.take_along_axis(rotate(x), picked[..., None, None], axis=1))


def test_errors():
    x = jnp.ones((1, 16, 64))
    with pytest.raises(ValueError, match="num_heads must divide the width, got num_heads=3 and width 64"):
        fp8.SelfAttention(3).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="num_kv_heads must divide num_heads"):
        fp8.SelfAttention(4, 3).init(jax.random.key(0), x)
