"""The end of a step: new scales from the amaxes of the passes, and the optimizer's new params from their gradients.

    amaxes ─finish_step→ FP8 state with new scales ─┐
    gradients ──────────────────────────────────────┴─optimizer, in place→ params, opt_state, weight cache

The new scales come first because the optimizer also casts the new weights, with these scales, into the weight cache.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.update_state import as_metrics, count_joined, finish_step
from jax_fp8.optim.adam_state import is_adam
from jax_fp8.optim.skipping import Skips, choose, choose_step, skips, was_taken, wrote_only_if
from jax_fp8.optim.updates import InPlace, NewParam, NotLastError, apply_updates
from jax_fp8.state.train_state import TrainState
from jax_fp8.state.weight_cache import cast_requests, refresh

LARGEST_LOSS = np.finfo(np.float32).max
NO_COLLECTIONS: Mapping = MappingProxyType({})


@dataclass(frozen=True)
class OptimizerStep:
    """Fields as in `make_train_step`."""

    optimizer: optax.GradientTransformationExtraArgs
    recipe: Recipe | None

    def __call__(
        self,
        state: TrainState,
        loss: jax.Array,
        gradients: PyTree,
        amaxes: jax.Array,
        skip_above: jax.Array | None = None,
        changed: Mapping = NO_COLLECTIONS,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state and the metrics of the step. A step is skipped if the optimizer says so, or if its loss is
        larger than `skip_above` or not finite. It then changes nothing but the step count.

        Args:
          state: before the step.
          loss: f32[].
          gradients: like the params.
          amaxes: f32[rows], of all passes of the step.
          skip_above: f32[]; with None no loss is too large.
          changed: the collections that the loss changed.
        """
        apply = None if skip_above is None else loss.astype(jnp.float32) <= jnp.minimum(skip_above, LARGEST_LOSS)
        with jax.named_scope("fp8_state"):
            # An amax of 0 leaves its row of the state as it is. So a skipped step passes zeros, which is cheaper than
            # to choose between the old and the new state: that would be a kernel for each GEMM.
            staged = amaxes if apply is None else jnp.where(apply, amaxes, 0)
            fp8, counts = finish_step(state.fp8, staged, self.recipe)
            if apply is not None and state.fp8:
                counts = count_joined(state.fp8, amaxes, self.recipe)
        with jax.named_scope("optimizer"):
            params, opt_state, updates, taken = self._optimize(state, gradients, fp8, apply)
        metrics = metrics_of(loss, counts)
        if apply is not None and taken is not None:
            metrics |= {"skipped": 1 - taken.astype(jnp.int32), "skip_above": jnp.float32(0)}
        if taken is not None and taken is not apply:  # the optimizer skips by itself, and `staged` did not know of it
            fp8 = choose(taken, fp8, state.fp8)
        cache = refresh(state.cache, params, fp8, updates)
        if cache and taken is not None and not wrote_only_if(taken, updates):
            cache = choose(taken, cache, state.cache)
        if taken is not None:
            changed = choose(taken, dict(changed), {name: state.collections[name] for name in changed})
        collections = {**state.collections, **changed}
        step = jnp.asarray(optax.safe_increment(state.step))
        return TrainState(step, params, fp8, opt_state, cache, collections), metrics

    def _optimize(
        self, state: TrainState, gradients: PyTree, fp8: Mapping, apply: jax.Array | None
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array | None]:
        """Params, state of the optimizer, its updates, and whether the step is taken, bool[] or None for always."""
        request = InPlace(cast_requests(state.cache, state.params, fp8), apply)
        updates, opt_state, reports = self._updates(state, gradients, request)
        params = apply_updates(state.params, updates)
        taken = was_taken(apply, updates, reports, gradients)
        if taken is not None:
            before = state.params, state.opt_state
            params, opt_state = choose_step(taken, updates, (params, opt_state), before)
        return params, opt_state, updates, taken

    def _updates(self, state: TrainState, gradients: PyTree, request: InPlace) -> tuple[PyTree, PyTree, Skips]:
        """The optimizer's updates, its state, and its reports of skipping; in place if its whole chain can."""
        update = partial(self.optimizer.update, gradients, state.opt_state, state.params)
        try:
            with skips() as reports:
                updates, opt_state = update(in_place=request)
        except NotLastError:
            _warn_of_updates(
                "a transform computes with what fused_adam returns", "move fused_adam to the end of the chain"
            )
            with skips() as reports:
                updates, opt_state = update()
        else:
            if _has_adam(state.opt_state) and not _is_in_place(updates):
                _warn_of_updates(
                    "the transform around fused_adam, such as optax.MultiSteps, does not pass `in_place` on",
                    "accumulate gradients by make_train_step(..., microbatches=) instead of optax.MultiSteps",
                )
        return updates, opt_state, reports


def _has_adam(opt_state: PyTree) -> bool:
    return any(map(is_adam, jax.tree.leaves(opt_state, is_leaf=is_adam)))


def _is_in_place(updates: PyTree) -> bool:
    return any(isinstance(leaf, NewParam) for leaf in jax.tree.leaves(updates))


def _warn_of_updates(reason: str, remedy: str) -> None:
    warnings.warn(
        f"{reason}, so this step writes updates and adds them to the params, which is slower than in place; {remedy}",
        stacklevel=4,
    )


def metrics_of(loss: jax.Array, counts: jax.Array) -> dict[str, jax.Array]:
    """The metrics of every step: its loss, and the int32[2] counts of amaxes that `finish_step` returned."""
    return {"loss": loss, **as_metrics(counts)}
