"""Dropout of what a layer adds to the residual stream, in Flax's words: `dropout_rate`, `deterministic`, the random
stream "dropout".
"""

import flax.linen as nn
import jax

from jax_fp8.core.checks import check_bool, check_number
from jax_fp8.core.shards import current_tensor
from jax_fp8.nn.checks import layer_name
from jax_fp8.ops.dropout import dropout


def is_rate(rate: float) -> bool:
    return 0 <= rate < 1


def drops(module, deterministic: bool | None, rate: str = "dropout_rate") -> bool:
    """Whether a layer drops anything, or raise unless its caller or its field says whether it is to.

    Args:
      module: with the fields `deterministic` and `rate`.
      deterministic: what its caller says.
    """
    layer, value = layer_name(module), getattr(module, rate)
    check_number(f"{layer}: {rate}", value, "of at least 0 and below 1", is_rate)
    if value == 0:
        return False
    said = [flag for flag in (module.deterministic, deterministic) if flag is not None]
    if len(said) != 1:
        raise ValueError(
            f"{layer}: a layer with {rate}={value} must know whether to drop, by its field deterministic or by the "
            f"argument of its call, got {'neither' if not said else 'both'}; pass deterministic=False in training, and "
            "True elsewhere"
        )
    check_bool(f"{layer}: deterministic", said[0])
    return not said[0]


def drop(module: nn.Module, branch: jax.Array, rate: float, residual: jax.Array | None = None) -> jax.Array:
    """What is left of a branch, and the residual."""
    return dropout(branch, module.make_rng("dropout"), rate, residual, current_tensor())
