"""A step that is not taken: params and the state of any optimizer stay as they were, to the bit.

`fused_adam` that works in place does not write when it is told so (`InPlace.apply`), or when it finds a gradient that
is not finite, which costs nothing. All else is chosen afterwards, old or new, one more pass over it: what stands beside
`fused_adam` in a chain has seen the same gradients, and knows nothing of the skip.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.optim.adam_state import FusedAdamState
from jax_fp8.optim.updates import NewParam, was_applied


class Skips:
    """What optimizers say of a step while their update is traced: whether they take it.

    One that is traced in a branch (`optax.MultiSteps`) cannot say it to who is outside; it can say only that it skips.
    """

    def __init__(self):
        self._trace, self._answers, self._hides = _current_trace(), [], False

    def note(self, applied: jax.Array) -> None:
        if _current_trace() is self._trace:
            self._answers.append(applied)
        else:
            self._hides = True

    def applied(self, gradients: Any) -> jax.Array | None:
        """Whether the step was taken, bool[]; None if nobody skips. Of who cannot say it: whether the gradients that
        the whole optimizer got are finite, so that none that is not is added to sums.
        """
        answers = self._answers + ([_all_finite(gradients)] if self._hides else [])
        return jnp.all(jnp.stack(answers)) if answers else None


_SKIPS: ContextVar[Skips | None] = ContextVar("skips", default=None)


@contextmanager
def skips() -> Iterator[Skips]:
    """Collect what optimizers say while their updates are traced in this context."""
    token = _SKIPS.set(found := Skips())
    try:
        yield found
    finally:
        _SKIPS.reset(token)


def note_applied(applied: jax.Array) -> None:
    """An optimizer says whether it takes a step, bool[], to whoever asks."""
    found = _SKIPS.get()
    if found is not None:
        found.note(applied)


def was_taken(apply: jax.Array | None, updates: Any, found: Skips, gradients: Any) -> jax.Array | None:
    """Whether a step is taken, bool[]; None if it never is skipped.

    Args:
      apply: bool[], what the optimizer was told, if it was asked to work in place; None is True.
      updates: from the optimizer.
      found: what it said meanwhile.
      gradients: what it got.
    """
    applied = was_applied(updates)
    if applied is not None:  # `apply` is in it
        return applied
    applied = found.applied(gradients)
    if apply is None or applied is None:
        return apply if applied is None else applied
    return apply & applied


def kept_unless(apply: jax.Array, updates: Any, new: tuple[Any, Any], old: tuple[Any, Any]) -> tuple[Any, Any]:
    """The new params and optimizer state where bool[] `apply` says so, else the old ones.

    Args:
      updates: from the optimizer, which may have been told to change nothing.
      new, old: params, and the state of the optimizer.
    """
    leaves = jax.tree.leaves(updates)
    written = [isinstance(leaf, NewParam) and leaf.applied is apply for leaf in leaves]
    params, tree = jax.tree.flatten(new[0], is_leaf=is_fp8)
    pairs = zip(params, tree.flatten_up_to(old[0]), written, strict=True)
    params = tree.unflatten([new if is_written else choose(apply, new, old) for new, old, is_written in pairs])
    all_know = any(written) and wrote_only_if(apply, updates)

    def of_state(new, old):
        return new if _is_adam(new) and all_know else choose(apply, new, old)

    return params, jax.tree.map(of_state, new[1], old[1], is_leaf=_is_adam)


def wrote_only_if(apply: jax.Array, updates: Any) -> bool:
    """Whether everything that was written in place was left alone where bool[] `apply` is False. Of two `fused_adam` in
    one optimizer each skips by its own gradients.
    """
    return all(leaf.applied is apply for leaf in jax.tree.leaves(updates) if isinstance(leaf, NewParam))


def choose(apply: jax.Array, new: Any, old: Any) -> Any:
    """One of two trees, by bool[]."""
    return jax.tree.map(lambda new, old: jnp.where(apply, new, old), new, old)


def _is_adam(node) -> bool:
    return isinstance(node, FusedAdamState)


def _all_finite(gradients) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(gradient)) for gradient in jax.tree.leaves(gradients)]))


def _current_trace() -> Any:
    with take_current_trace() as trace:
        return trace
