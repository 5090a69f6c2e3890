"""Dropout on the branch that a layer adds to the residual stream. The names are Flax's: `dropout_rate`,
`deterministic`, and the random stream "dropout".
"""

import flax.linen as nn
import jax

from jax_fp8.core.checks import check_bool, check_number
from jax_fp8.core.shards import current_tensor
from jax_fp8.nn.checks import layer_name
from jax_fp8.ops.dropout import dropout


def is_rate(rate: float) -> bool:
    return 0 <= rate < 1


def drops(module: nn.Module, deterministic: bool | None, rate: str = "dropout_rate") -> bool:
    """Whether dropout is active in this call. Raise unless either the field or the argument `deterministic` is set.

    Args:
      module: a layer with a field `deterministic`, and one named `rate`.
      deterministic: the argument of the layer's call.
    """
    layer, fields = layer_name(module), vars(module)
    value = fields[rate]
    check_number(f"{layer}: {rate}", value, "of at least 0 and below 1", is_rate)
    if value == 0:
        return False
    flags = [flag for flag in (fields["deterministic"], deterministic) if flag is not None]
    if len(flags) != 1:
        raise ValueError(
            f"{layer}: a layer with {rate}={value} needs deterministic as its field or as an argument of its call, got "
            f"{'both' if flags else 'neither'}; pass deterministic=False in training, and True elsewhere"
        )
    check_bool(f"{layer}: deterministic", flags[0])
    return not flags[0]


def drop(module: nn.Module, branch: jax.Array, rate: float, residual: jax.Array | None = None) -> jax.Array:
    """The branch after dropout, plus the residual."""
    return dropout(branch, module.make_rng("dropout"), rate, residual, current_tensor())
