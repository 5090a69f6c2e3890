"""Optimizers on a mesh: three steps over shards of params, gradients and moments are those over whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import assert_close, first_state, gpt, significant, tokens, train
from reference import assert_same_bits

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MIXED = {"fsdp": 2, "tensor": 2}

OPTIMIZERS = {
    "adamw": (optax.adamw(1e-2, eps=1e-2), {}),
    "clipped": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-2)), {}),
    "fused, clipped": (fp8.fused_adamw(1e-2, eps=1e-2, max_grad_norm=0.1), {}),
    "fused, moments in 8 and 16 bits": (fp8.fused_adamw(1e-2, eps=1e-2, mu_dtype=jnp.bfloat16, nu_dtype=fp8.E4M3), {}),
    "bfloat16 with remainders": (
        fp8.fused_adamw(1e-2, eps=1e-2, master_dtype="remainder"), {"param_dtype": jnp.bfloat16},
    ),
}  # fmt: skip


# "clipped" is "adamw" behind a norm.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "adamw" else ()) for name in OPTIMIZERS]
)
def test_optimizers(name):
    """Fed with the same gradients, since without FP8 and in float32: so a norm is that of all shards, or is noticed."""
    tx, fields = OPTIMIZERS[name]
    config = fp8.GPTConfig(vocab_size=64, num_layers=1, num_heads=4, hidden_size=64, max_seq_len=16)
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32, **fields)
    batch = tokens(8, 16) % 64
    state = first_state(model.init, batch[:, :-1], tx)
    of_one = train(fp8.next_token_loss(model), state, batch, None, tx=tx, steps=3)
    ours = train(fp8.next_token_loss(model), state, batch, None, tx=tx, steps=3, axes=MIXED, sequence_parallel=True)
    of_losses, of_params = (1e-4, 1e-2) if "bits" in name or "remainders" in name else (1e-5, 1e-4)
    np.testing.assert_allclose(ours[1], of_one[1], of_losses)
    assert_close(significant(ours[0][-1].params), significant(of_one[0][-1].params), of_params)


@pytest.mark.parametrize("axes", [pytest.param({"data": 2}, marks=pytest.mark.slow), {"data": 4}], ids=str)
def test_a_state_that_carries_its_weights_in_fp8(axes):
    model, tx = gpt(RECIPE, num_layers=1), fp8.fused_adamw(1e-3, eps=1e-2)
    variables = jax.jit(model.init)(jax.random.key(0), tokens()[:, :-1])
    variables |= {"fp8_cache": fp8.cast_weights(variables, RECIPE)}
    state = fp8.TrainState.create(variables=variables, tx=tx)
    (of_one, losses), (ours, own_losses) = (
        train(fp8.next_token_loss(model), state, tokens(), RECIPE, tx=tx, axes=where, steps=2) for where in (None, axes)
    )
    np.testing.assert_allclose(own_losses, losses, 1e-5)
    jax.tree.map(assert_same_bits, ours[0].fp8, of_one[0].fp8)
    for pair, wanted in zip(jax.tree.leaves(ours[-1].cache), jax.tree.leaves(of_one[-1].cache), strict=True):
        assert np.mean(pair != wanted) < 0.01 if pair.ndim else True
