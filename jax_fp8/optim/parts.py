"""An optimizer of a part of the params, and a rule of its own for the others."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jax_fp8.core.types import PyTree
from jax_fp8.optim.updates import InPlace, NewParam, was_applied

Delta = Callable[[jax.Array], jax.Array]  # from the gradient of a param to what is added to the param


def update_part(
    inner: optax.GradientTransformationExtraArgs,
    mask: PyTree,
    delta_of: Delta | None,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    in_place: InPlace | None = None,
    **extra: object,
) -> tuple[PyTree, PyTree]:
    """The updates of all params and the next state of `inner`, in place if `in_place` asks for it.

    Args:
      inner: `optax.masked` by the same mask.
      mask: like the params, True where `inner` updates the param.
      delta_of: for the others; None leaves them as they are, to the bit.
      updates, state, params, in_place, extra: as of an `update`.
    """
    own: dict[str, PyTree] = extra if in_place is None else {**extra, "in_place": in_place}
    updates, state = inner.update(updates, state, params, **own)
    applied = was_applied(updates)
    if applied is None and in_place is not None:
        applied = in_place.apply

    def others(is_inner: bool, update: PyTree, param: PyTree) -> PyTree:
        if is_inner:
            return update
        if delta_of is None:
            return jax.tree.map(jnp.zeros_like, update) if in_place is None else NewParam(param, applied=applied)
        if in_place is None:
            return delta_of(update)
        new = param + delta_of(update)
        return NewParam(new if applied is None else jnp.where(applied, new, param), applied=applied)

    return jax.tree.map(others, mask, updates, updates if params is None else params), state
