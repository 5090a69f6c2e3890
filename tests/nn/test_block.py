"""TransformerBlock: its residual structure, and FP8 against the same parameters in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

X = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "rmsnorm", "activation": "swiglu", "rotary": True, "num_kv_heads": 2, "use_bias": False}],
    ids=["gpt", "llama"],
)
def test_fp8_block_is_the_bfloat16_block_within_fp8(options):
    plain, quantized = (
        fp8.TransformerBlock(4, 128, recipe=recipe, **options) for recipe in (None, fp8.CurrentScaling())
    )
    params = plain.init(jax.random.key(1), X)["params"]
    dy = jax.random.normal(jax.random.key(2), X.shape, jnp.float32)

    def run(module):
        def loss(params, x):
            return jnp.sum(module.apply({"params": params}, x).astype(jnp.float32) * dy)

        return module.apply({"params": params}, X), jax.jit(jax.grad(loss, argnums=(0, 1)))(params, X)

    (y, grads), (expected, expected_grads) = run(quantized), run(plain)
    reference.assert_close(y - X, expected - X, "block")
    for (path, actual), wanted in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True):
        if "key" in jax.tree_util.keystr(path) and "bias" in jax.tree_util.keystr(path):
            continue  # the gradient of a key bias is zero in exact arithmetic: softmax does not see it
        reference.assert_close(actual, wanted, "block_gradient")


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling()])
def test_recomputing_changes_no_bit(recipe):
    """Neither of the result and the gradients nor of the state; what it saves is checked where memory can be counted."""
    kept, recomputed = (fp8.TransformerBlock(4, 128, recipe=recipe, recompute=flag) for flag in (False, True))
    variables = kept.init(jax.random.key(1), X)

    def run(module):
        return fp8.value_and_grad(lambda v: jnp.sum(jnp.sin(module.apply(v, X).astype(jnp.float32))))(variables)

    actual, expected = run(recomputed), run(kept)
    jax.tree.map(reference.assert_same_bits, actual, expected)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(expected[1]))


def test_residual_stream_passes_through_when_both_branches_write_zero():
    zeros = jax.nn.initializers.zeros
    y, _ = fp8.TransformerBlock(4, 128, residual_init=zeros).init_with_output(jax.random.key(0), X)
    np.testing.assert_array_equal(y, X)
    y, _ = fp8.TransformerBlock(4, 128).init_with_output(jax.random.key(0), X)
    assert np.any(np.asarray(y != X))
