"""The same layers in NNX and in Linen, with the same parameters, and losses of both."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx

RECIPE = fp8.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": RECIPE, "current": fp8.CurrentScaling()}
FEATURES, HIDDEN = 32, 64
X = jax.random.normal(jax.random.key(0), (64, FEATURES), jnp.bfloat16)
WEIGHTS = jax.random.normal(jax.random.key(1), (64, FEATURES)).astype(jnp.bfloat16).astype(jnp.float32)


def with_params_of(model, variables):
    """The NNX model with the parameters and the FP8 state of a Linen module."""
    nnx.update(model, variables["params"])
    for path, gemm in fp8.nnx.state.gemms_of(model).items():
        if gemm.recipe.has_state:
            state = fp8.nnx.state.at_path(variables["fp8"], path)
            gemm.scale[...], gemm.amax_history[...] = state["scale"], state["amax_history"]
    return model


def mean_square(y, x):
    return jnp.mean((y - x).astype(jnp.float32) ** 2)


def loss(model, x):
    return mean_square(model(x), x)


class MLP(nnx.Module):
    """Two linear layers, of jax_fp8 or of Flax."""

    def __init__(self, rngs, linear=fp8.nnx.Linear, **options):
        self.first = linear(FEATURES, HIDDEN, rngs=rngs, **options)
        self.second = linear(HIDDEN, FEATURES, rngs=rngs, **options)

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(x)))


def make(seed=0, **options):
    return MLP(nnx.Rngs(seed), recipe=RECIPE, **options)


def values(model):
    """All parameters and state, on the host."""
    return jax.device_get((nnx.to_pure_dict(nnx.state(model, nnx.Param)), fp8.nnx.fp8_state(model)))


def pure(grads):
    return nnx.to_pure_dict(nnx.state(grads))


def staged(model):
    """The amaxes in slot 0 of every history, by the paths of GEMMs."""
    gemms = fp8.nnx.state.gemms_of(model)
    return {"/".join(path): np.asarray(gemm.amax_history[..., 0]) for path, gemm in gemms.items()}


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
