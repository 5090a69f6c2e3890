"""Skipped steps: params and the state of any optimizer stay as they were, to the bit.

`fused_adam` in place skips at no cost: its kernel does not write if `InPlace.apply` is False, or if
`skip_nonfinite=True` and a gradient is not finite. It reports this by `note_applied`. Other transforms in its chain do
not know of the skip. So the step chooses between their old and new states afterwards, one more pass over them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.types import PyTree
from jax_fp8.optim.adam_state import is_adam
from jax_fp8.optim.updates import NewParam, was_applied


class Skips:
    """The reports of optimizers, while their update is traced: whether they take the step.

    An optimizer in a branch, such as one in `optax.MultiSteps`, cannot hand its tracer out of the branch. Then it is
    known only that it may skip.
    """

    def __init__(self):
        self._trace, self._reports, self._some_are_in_branches = _current_trace(), [], False

    def note(self, applied: jax.Array) -> None:
        if _current_trace() is self._trace:
            self._reports.append(applied)
        else:
            self._some_are_in_branches = True

    def applied(self, gradients: PyTree) -> jax.Array | None:
        """Whether the step was taken, bool[]; None if no optimizer skips steps. For those in branches, the step counts
        as taken if its gradients are finite: `optax.MultiSteps` would add others to its sums.
        """
        reports = self._reports + ([all_finite(gradients)] if self._some_are_in_branches else [])
        return jnp.all(jnp.stack(reports)) if reports else None


_SKIPS: ContextVar[Skips | None] = ContextVar("skips", default=None)


@contextmanager
def skips() -> Iterator[Skips]:
    """Collect the reports of optimizers whose updates are traced in this context."""
    token = _SKIPS.set(reports := Skips())
    try:
        yield reports
    finally:
        _SKIPS.reset(token)


def note_applied(applied: jax.Array) -> None:
    """Report whether an optimizer takes a step, bool[], to the innermost `skips()`."""
    reports = _SKIPS.get()
    if reports is not None:
        reports.note(applied)


def was_taken(apply: jax.Array | None, updates: PyTree, reports: Skips, gradients: PyTree) -> jax.Array | None:
    """Whether a step is taken, bool[]; None if it never is skipped.

    Args:
      apply: bool[], the `InPlace.apply` of the request; None is True.
      updates, reports: from the optimizer.
      gradients: those that it got.
    """
    applied = was_applied(updates)
    if applied is not None:  # the optimizer has already combined it with `apply`
        return applied
    applied = reports.applied(gradients)
    if apply is None or applied is None:
        return apply if applied is None else applied
    return apply & applied


def all_finite(gradients: PyTree, norm: jax.Array | None = None) -> jax.Array:
    """Whether all gradients are finite, bool[]. Their norm says so without reading them again; it also overflows where
    squares are too large for float32.
    """
    if norm is not None:
        return jnp.isfinite(norm)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)], jnp.bool_))


def choose_step(
    apply: jax.Array, updates: PyTree, new: tuple[PyTree, PyTree], old: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
    """The new params and optimizer state if bool[] `apply` is True, else the old ones. Arrays that `fused_adam` wrote
    in place by the same `apply` need no choice.

    Args:
      updates: from the optimizer.
      new, old: params, and the state of the optimizer.
    """
    leaves = jax.tree.leaves(updates)
    written = [isinstance(leaf, NewParam) and leaf.applied is apply for leaf in leaves]
    params, tree = jax.tree.flatten(new[0], is_leaf=is_fp8)
    pairs = zip(params, tree.flatten_up_to(old[0]), written, strict=True)
    params = tree.unflatten([new if is_written else choose(apply, new, old) for new, old, is_written in pairs])
    adam_has_chosen = any(written) and wrote_only_if(apply, updates)

    def next_state(new: PyTree, old: PyTree) -> PyTree:
        return new if is_adam(new) and adam_has_chosen else choose(apply, new, old)

    return params, jax.tree.map(next_state, new[1], old[1], is_leaf=is_adam)


def wrote_only_if(apply: jax.Array, updates: PyTree) -> bool:
    """Whether bool[] `apply` decided over everything that was written in place. It may not have with two `fused_adam`
    in one optimizer: each skips by its own gradients.
    """
    return all(leaf.applied is apply for leaf in jax.tree.leaves(updates) if isinstance(leaf, NewParam))


def choose(apply: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """The new tree if bool[] `apply` is True, else the old one."""
    return jax.tree.map(lambda new, old: jnp.where(apply, new, old), new, old)


def _current_trace() -> object:
    with take_current_trace() as trace:
        return trace
