"""An optimizer that computes with its updates, so that `fused_adam` in it cannot write params in place."""

import jax
import optax
import pytest

WARNS = pytest.mark.filterwarnings("ignore:(a transform computes with what|the transform around) fused_adam")


def by_deltas(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer and state, with its updates multiplied by one."""
    inner = optax.with_extra_args_support(tx)

    def update(gradients, state, params=None, **extra):
        updates, state = inner.update(gradients, state, params, **extra)
        return jax.tree.map(lambda update: 1.0 * update, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
