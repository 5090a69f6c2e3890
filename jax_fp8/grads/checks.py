"""The check of a loss function's result, made as soon as it has returned."""

import jax.numpy as jnp

from jax_fp8.core.checks import describe
from jax_fp8.core.types import PyTree

ALONE, ALONE_OR_PAIR = "return the loss alone", "return the loss alone, or pass has_aux=True"


def check_loss(loss: PyTree, has_aux: bool, remedy: str = ALONE_OR_PAIR) -> None:
    """Raise unless a loss function returned a scalar, or with `has_aux` a pair; `remedy` is for an unexpected pair."""
    if has_aux and not (isinstance(loss, tuple) and len(loss) == 2):
        raise ValueError(f"loss_fn must return (loss, aux) with has_aux=True, got {describe(loss)}; return a pair")
    value = loss[0] if has_aux else loss
    if isinstance(value, tuple):
        raise ValueError(f"loss_fn must return a scalar, got a tuple; {remedy}")
    dtype = getattr(value, "dtype", jnp.float32 if isinstance(value, float) else None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
    if not is_float or jnp.shape(value) != ():
        raise ValueError(
            f"loss_fn must return a floating point scalar, got {describe(value)}; return its mean, as float32"
        )
