"""Norms after a branch, norms with scales stored minus one, and multipliers: values and gradients against NumPy's
formulas in float32, in FP8 near them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

X = jax.random.normal(jax.random.key(0), (2, 16, 64))
PLAIN = {"recipe": None, "dtype": jnp.float32, "epsilon": 1e-6}
RMS = {"norm": "rmsnorm", "use_bias": False}


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def random_params(module, x=X):
    """Random params; scales are not one."""
    params = module.init(jax.random.key(1), x)["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noise = [0.2 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, [leaf + more for leaf, more in zip(leaves, noise, strict=True)])


def mlp_by_hand(params, x, placement, multiplier, offset):
    y = rms_norm(x, params["norm"]["scale"] + offset) if "norm" in params else x
    y = jax.nn.silu(y @ params["gate"]["kernel"]) * (y @ params["up"]["kernel"]) @ params["down"]["kernel"]
    y = rms_norm(y, params["post_norm"]["scale"] + offset) if "post_norm" in params else y
    assert ("norm" in params, "post_norm" in params) == (placement != "after", placement != "before")
    return x + multiplier * y


def assert_near(got, wanted, tolerance):
    for path, array in jax.tree_util.tree_leaves_with_path(wanted):
        found = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        assert np.linalg.norm(array) > 0, path
        assert np.linalg.norm(found - array) < tolerance * np.linalg.norm(array), path


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("placement", ["before", "after", "both"])
def test_an_mlp_by_hand(placement, offset):
    fields = {"norm_placement": placement, "residual_multiplier": 0.3, "zero_centered_scale": bool(offset)}
    fields |= RMS | {"activation": "swiglu", "residual": True}
    exact, fast = fp8.LayerNormMLP(96, **fields, **PLAIN), fp8.LayerNormMLP(96, **fields, recipe=fp8.CurrentScaling())
    params = random_params(exact)

    def loss(apply):
        return lambda params, x: jnp.sum(jnp.sin(apply(params, x)))

    def by_hand(params, x):
        return mlp_by_hand(params, x, placement, 0.3, offset)

    np.testing.assert_allclose(exact.apply({"params": params}, X), by_hand(params, X), rtol=1e-4, atol=1e-5)
    wanted = jax.grad(loss(by_hand), argnums=(0, 1))(params, X)
    for module, tolerance in ((exact, 1e-4), (fast, 0.25)):
        run = lambda params, x, module=module: module.apply({"params": params}, x).astype(jnp.float32)  # noqa: E731
        assert_near(jax.jit(jax.grad(loss(run), argnums=(0, 1)))(params, X), wanted, tolerance)


def test_attention_ends_like_an_mlp():
    """With the same params: what attention adds without a norm after it, normalized, and multiplied."""
    fields = RMS | PLAIN | {"num_heads": 2}
    plain = fp8.SelfAttention(**fields, residual=False)
    layer = fp8.SelfAttention(**fields, residual=True, norm_placement="both", residual_multiplier=0.5)
    params = random_params(layer)
    inner = plain.apply({"params": {name: tree for name, tree in params.items() if name != "post_norm"}}, X)
    expected = X + 0.5 * rms_norm(inner, params["post_norm"]["scale"])
    np.testing.assert_allclose(layer.apply({"params": params}, X), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(inner).max() > 0.1


def test_scales_of_all_heads_together():
    fields = {**RMS, **PLAIN, "num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "qk_norm_over": "all"}
    layer = fp8.SelfAttention(**fields)
    params = random_params(layer)
    assert params["query_norm"]["scale"].shape == (64,) and params["key_norm"]["scale"].shape == (32,)
    # A layer without norms of queries and keys does the same with the normalized products: as kernels of the identity.
    normalized = rms_norm(X, params["norm"]["scale"])
    query, key = (normalized @ params[name]["kernel"] for name in ("query", "key"))
    query, key = rms_norm(query, params["query_norm"]["scale"]), rms_norm(key, params["key_norm"]["scale"])
    value = normalized @ params["value"]["kernel"]
    heads = [part.reshape(2, 16, -1, 16) for part in (query, key, value)]
    attended = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(2, 16, 64)
    expected = attended @ params["out"]["kernel"]
    np.testing.assert_allclose(layer.apply({"params": params}, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "cap"), [(0.5, None), (None, 2.0), (0.5, 2.0)])
def test_a_scale_and_a_cap_of_attention(scale, cap):
    fields = {**RMS, **PLAIN, "num_heads": 2, "sliding_window": 5}
    layer = fp8.SelfAttention(**fields, attention_scale=scale, attention_logit_cap=cap)
    params = random_params(layer)

    def by_hand(params, x):
        y = rms_norm(x, params["norm"]["scale"])
        query, key, value = ((y @ params[name]["kernel"]).reshape(2, 16, 2, 32) for name in ("query", "key", "value"))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (scale or 32**-0.5)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        distance = np.arange(16)[:, None] - np.arange(16)
        logits = jnp.where((distance >= 0) & (distance < 5), logits, -jnp.inf)
        attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value).reshape(2, 16, 64)
        return attended @ params["out"]["kernel"]

    def gradients(run):
        return jax.grad(lambda params, x: jnp.sum(jnp.sin(3 * run(params, x))), argnums=(0, 1))(params, X)

    np.testing.assert_allclose(layer.apply({"params": params}, X), by_hand(params, X), rtol=1e-4, atol=1e-5)
    assert_near(gradients(lambda params, x: layer.apply({"params": params}, x)), gradients(by_hand), 1e-3)
    plain = fp8.SelfAttention(**fields)
    assert np.abs(plain.apply({"params": params}, X) - by_hand(params, X)).max() > 1e-2  # a negative control


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (
            fp8.LayerNormMLP(64, norm_placement="behind"),
            "LayerNormMLP: norm_placement must be one of before, after, both",
        ),
        (fp8.LayerNormMLP(64, residual_multiplier="x"), "residual_multiplier must be a finite number, got 'x'"),
        (fp8.SelfAttention(num_heads=2, norm_placement="after"), "norm_placement='after' needs a norm, got norm=None"),
        (fp8.SelfAttention(num_heads=2, qk_norm_over="none"), 'qk_norm_over must be "head" or "all", got \'none\''),
        (
            fp8.SelfAttention(num_heads=2, attention_scale=0.0),
            "attention_scale must be a finite number above 0, got 0.0",
        ),
        (
            fp8.SelfAttention(num_heads=2, attention_logit_cap=5.0, implementation="cudnn"),
            "SelfAttention: cuDNN's attention cannot cap logits, so attention_logit_cap needs implementation=",
        ),
        (
            fp8.SelfAttention(num_heads=1, head_dim=128, attention_logit_cap=5.0, fp8_attention=True),
            "in FP8 has no windows, .*, got attention_logit_cap; leave that out, or use fp8_attention=False",
        ),
        (
            fp8.TransformerBlock(2, 64, num_experts=2, norm_placement="both"),
            'experts need norm_placement="before" and residual_multiplier=1, got .both. and 1.0',
        ),
    ],
)
def test_fields_that_are_refused(layer, sentence):
    with pytest.raises(ValueError, match=sentence):
        layer.init(jax.random.key(0), jnp.ones((2, 128, 64)))
