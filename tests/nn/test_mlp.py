"""LayerNormMLP against the same layers of Flax, for every activation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import reference

import jax_fp8 as fp8
from jax_fp8.kernels.activation_functions import GATED, PLAIN, activate, is_gated


def flax_mlp(params, x, activation):
    normalized = nn.LayerNorm().apply({"params": params["norm"]}, x)
    names = ("gate", "up") if is_gated(activation) else ("up",)
    parts = [nn.Dense(128).apply({"params": params[name]}, normalized) for name in names]
    hidden = jnp.concatenate(parts, axis=-1)
    return nn.Dense(x.shape[-1]).apply({"params": params["down"]}, activate(hidden, activation))


@pytest.mark.parametrize("activation", [*PLAIN, *GATED])
def test_forward_and_gradients(activation):
    x = jax.random.normal(jax.random.key(0), (16, 64), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(1), (16, 64), jnp.float32)
    module = fp8.LayerNormMLP(128, activation, recipe=fp8.CurrentScaling())
    params = module.init(jax.random.key(2), x)["params"]
    assert params["up"]["kernel"].shape == (64, 128) and ("gate" in params) == is_gated(activation)

    def ours(params):
        return jnp.sum(module.apply({"params": params}, x).astype(jnp.float32) * dy)

    def theirs(params):
        return jnp.sum(flax_mlp(params, x.astype(jnp.float32), activation) * dy)

    reference.assert_close(
        module.apply({"params": params}, x), flax_mlp(params, x.astype(jnp.float32), activation), "block"
    )
    for actual, expected in zip(*(jax.tree.leaves(jax.jit(jax.grad(f))(params)) for f in (ours, theirs)), strict=True):
        reference.assert_close(actual, expected, "block_gradient")


def test_state_of_both_gemms_is_staged():
    x = jax.random.normal(jax.random.key(0), (16, 64), jnp.bfloat16)
    module = fp8.LayerNormMLP(128, recipe=fp8.DelayedScaling(amax_history_len=2))
    variables = module.init(jax.random.key(2), x)
    _, _, state = jax.jit(fp8.value_and_grad(lambda v: jnp.sum(jnp.square(module.apply(v, x).astype(jnp.float32)))))(
        variables
    )
    for name in ("up", "down"):
        assert (state[name]["amax_history"][:, 0] > 0).all()


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation must be one of"):
        fp8.LayerNormMLP(128, "tanhshrink").init(jax.random.key(0), jnp.ones((16, 64)))
