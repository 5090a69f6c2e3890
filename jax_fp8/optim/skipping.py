"""A step that is not taken: params and the state of any optimizer stay as they were, to the bit.

`fused_adam` that works in place does not write when it is told so (`InPlace.apply`), which costs nothing. All else is
chosen afterwards, old or new, one more pass over it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.optim.adam_state import FusedAdamState
from jax_fp8.optim.updates import NewParam


def kept_unless(apply: jax.Array, updates: Any, new: tuple[Any, Any], old: tuple[Any, Any]) -> tuple[Any, Any]:
    """The new params and optimizer state where bool[] `apply` says so, else the old ones.

    Args:
      updates: from the optimizer, which may have been told to change nothing.
      new, old: params, and the state of the optimizer.
    """
    written = [isinstance(leaf, NewParam) and leaf.applied is not None for leaf in jax.tree.leaves(updates)]

    def choose(new, old):
        return jax.tree.map(lambda new, old: jnp.where(apply, new, old), new, old)

    params, tree = jax.tree.flatten(new[0], is_leaf=is_fp8)
    pairs = zip(params, tree.flatten_up_to(old[0]), written, strict=True)
    params = tree.unflatten([new if is_written else choose(new, old) for new, old, is_written in pairs])

    def of_state(new, old):
        return new if _is_adam(new) and any(written) else choose(new, old)

    return params, jax.tree.map(of_state, new[1], old[1], is_leaf=_is_adam)


def _is_adam(node) -> bool:
    return isinstance(node, FusedAdamState)
