"""The end of a step: new scales from the amaxes of the passes, and the optimizer's new params from their gradients.

gradients, amaxes ─finish_step→ FP8 state ─┐
                  └─the optimizer, in place─┴→ params, opt_state, and the weight cache cast with these scales
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_fp8.core.recipe import Recipe
from jax_fp8.kernels.update_state import as_metrics, count_joined, finish_step
from jax_fp8.optim.skipping import Skips, choose, kept_unless, skips, was_taken, wrote_only_if
from jax_fp8.optim.updates import InPlace, NotLastError, apply_updates
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
        gradients: Any,
        amaxes: jax.Array,
        skip_above: jax.Array | None = None,
        changed: Mapping = NO_COLLECTIONS,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state and the metrics of the step. One that is skipped, by the optimizer or since its loss is not
        finite and at most `skip_above`, changes nothing but the step count.

        Args:
          state: before the step.
          loss: f32[].
          gradients: like the params.
          amaxes: f32[rows], of all passes of the step.
          skip_above: f32[]; None: whatever the loss.
          changed: the collections that the loss has changed.
        """
        apply = None if skip_above is None else loss.astype(jnp.float32) <= jnp.minimum(skip_above, LARGEST_LOSS)
        with jax.named_scope("fp8_state"):
            # Rows of which nothing was staged stay as they are: no choice between two states, a kernel for each GEMM.
            staged = amaxes if apply is None else jnp.where(apply, amaxes, 0)
            fp8, counts = finish_step(state.fp8, staged, self.recipe)
            if apply is not None and state.fp8:
                counts = count_joined(state.fp8, amaxes, self.recipe)
        with jax.named_scope("optimizer"):
            params, opt_state, updates, taken = self._optimize(state, gradients, fp8, apply)
        metrics = metrics_of(loss, counts)
        if apply is not None and taken is not None:
            metrics |= {"skipped": 1 - taken.astype(jnp.int32), "skip_above": jnp.float32(0)}
        if taken is not None and taken is not apply:
            fp8 = choose(taken, fp8, state.fp8)
        cache = refresh(state.cache, params, fp8, updates)
        if cache and taken is not None and not wrote_only_if(taken, updates):
            cache = choose(taken, cache, state.cache)
        collections = {**state.collections, **changed}
        if taken is not None:
            collections = choose(taken, collections, state.collections)
        step = jnp.asarray(optax.safe_increment(state.step))
        return TrainState(step, params, fp8, opt_state, cache, collections), metrics

    def _optimize(self, state, gradients, fp8, apply):
        """Params, state of the optimizer, its updates, and whether the step is taken, bool[] or None for always."""
        request = InPlace(cast_requests(state.cache, state.params, fp8), apply)
        updates, opt_state, found = self._updates(state, gradients, request)
        params = apply_updates(state.params, updates)
        taken = was_taken(apply, updates, found, gradients)
        if taken is not None:
            before = state.params, state.opt_state
            params, opt_state = kept_unless(taken, updates, (params, opt_state), before)
        return params, opt_state, updates, taken

    def _updates(self, state, gradients, request: InPlace) -> tuple[Any, Any, Skips]:
        """The optimizer's updates, its state, and what it said of skipping; in place where all of its chain can."""
        update: Any = partial(self.optimizer.update, gradients, state.opt_state, state.params)
        try:
            with skips() as found:
                return *update(in_place=request), found
        except NotLastError:
            warnings.warn(
                "a transform computes with what fused_adam returns, so this step writes updates and adds them to the "
                "params, more slowly than in place; move fused_adam to the end of the chain",
                stacklevel=2,
            )
        with skips() as found:
            return *update(), found


def metrics_of(loss: jax.Array, counts: jax.Array) -> dict[str, jax.Array]:
    """The metrics of every step: its loss, and int32[2] counts of amaxes that `finish_step` returns."""
    return {"loss": loss, **as_metrics(counts)}
