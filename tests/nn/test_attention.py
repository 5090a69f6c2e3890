"""SelfAttention against attention written out in float32, and its errors."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8


def attention(params, x, heads, kv_heads, causal, norms=None, epsilon=0.0):
    """softmax(q kᵀ / sqrt(d)) v in float64, one query head at a time; `norms` are scales of queries and of keys."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    dim = params["query"]["kernel"].shape[-1] // heads
    queries, keys, values = (
        (x @ params[name]["kernel"] + params[name]["bias"]).reshape(*x.shape[:2], -1, dim)
        for name in ("query", "key", "value")
    )
    if norms is not None:
        queries, keys = (
            part / np.sqrt((part**2).mean(-1, keepdims=True) + epsilon) * scale
            for part, scale in zip((queries, keys), norms, strict=True)
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
    return out.reshape(*x.shape[:2], -1) @ params["out"]["kernel"] + params["out"].get("bias", 0)


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


def test_causality():
    x = jax.random.normal(jax.random.key(0), (1, 16, 64), jnp.bfloat16)
    changed = x.at[:, 10:].set(0)
    for causal in (True, False):
        module = fp8.SelfAttention(4, causal=causal, recipe=None)
        params = module.init(jax.random.key(1), x)
        same = np.asarray(module.apply(params, x)[:, :10] == module.apply(params, changed)[:, :10]).all()
        assert same == causal


@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["bf16", "current"])
def test_heads_of_their_own_width_with_norms_and_biases_of_projections_alone(recipe):
    """As Qwen's: each head of queries and keys is normalized, and `out` has no bias."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
    fields = {"head_dim": 32, "use_bias": False, "use_qkv_bias": True, "epsilon": 1e-2, "recipe": recipe}
    module = fp8.SelfAttention(4, 2, qk_norm=True, bias_init=nn.initializers.normal(1.0), **fields)
    params = dict(module.init(jax.random.key(1), x)["params"])
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["query"] == {"kernel": (64, 128), "bias": (128,)} and shapes["value"]["kernel"] == (64, 64)
    assert shapes["out"] == {"kernel": (128, 64)}
    assert shapes["query_norm"] == shapes["key_norm"] == {"scale": (32,)}
    for name, key in (("query_norm", 2), ("key_norm", 3)):
        params[name] = {"scale": jax.random.normal(jax.random.key(key), (32,))}
    norms = [np.asarray(params[name]["scale"], np.float64) for name in ("query_norm", "key_norm")]
    expected = attention(params, np.asarray(x, np.float64), 4, 2, True, norms, 1e-2)
    found, kind = module.apply({"params": params}, x), "block" if recipe else "bfloat16"
    reference.assert_close(found, expected, kind)
    for other, epsilon in (([norms[0], 1.0], 1e-2), (norms, 10.0), (None, 0.0)):  # negative controls
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(
                found, attention(params, np.asarray(x, np.float64), 4, 2, True, other, epsilon), kind
            )


def test_norms_of_heads_on_an_explicit_mesh():
    module = fp8.SelfAttention(4, 2, qk_norm=True, rotary=True, recipe=None, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(0), (4, 16, 64))
    variables = module.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda variables, x: jnp.sum(jnp.sin(module.apply(variables, x)))))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])

    def place(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    for spec in (P(), P("data")):  # params on all devices; or split where the batch is
        on_mesh = gradient(jax.tree.map(lambda leaf, spec=spec: place(leaf, spec), variables), place(x, P("data")))
        jax.tree.map(
            lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4),
            on_mesh,
            gradient(variables, x),
        )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rotary": True, "rotary_base": 0.0}, "SelfAttention: rotary_base must be a finite number above 1, got 0.0"),
        (
            {"rotary_scaling": 8.0},
            "SelfAttention: rotary_scaling must be a RotaryScaling, another scaling or None, got 8.0",
        ),
        ({"sliding_window": 0}, "SelfAttention: sliding_window must be an integer of at least 1, got 0"),
        ({"sliding_window": 8, "causal": False}, "must be causal, got sliding_window=8 and causal=False"),
    ],
)
def test_fields_that_are_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        fp8.SelfAttention(4, **fields).init(jax.random.key(0), jnp.ones((1, 16, 64)))


def test_a_sliding_window():
    """What is further away changes nothing, and the last that is seen does."""
    layer, x = fp8.SelfAttention(4, sliding_window=3, recipe=None), jax.random.normal(jax.random.key(0), (1, 16, 64))
    variables = layer.init(jax.random.key(1), x)
    moved = np.asarray(layer.apply(variables, x.at[0, 5].add(1)) - layer.apply(variables, x), np.float32)
    assert np.flatnonzero(np.abs(moved).max((0, 2))).tolist() == [5, 6, 7]
