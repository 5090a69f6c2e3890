"""One optimizer step as one jitted program with donated state: on a GPU, one CUDA graph.

    weights → FP8, once
    batch → microbatches ─scan→ gradients (mean, float32), amaxes (max) → finish_step, once, in place → fp8, scales
                                   └→ optimizer, in place → params, opt_state,
                                      and the weight cache cast with these scales

Donated buffers keep their addresses from step to step, and the rest of a step does too (addresses.py), so the graph is
recorded once; nothing waits for the host.
"""

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from jax_fp8.core.checks import check_flags, check_integer, first_difference
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.state import no_amaxes
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.update_state import as_metrics, finish_step
from jax_fp8.optim.updates import InPlace, apply_updates, was_applied
from jax_fp8.train.checks import (
    check_batch,
    check_is,
    check_kept_types,
    check_loss_fn,
    check_not_donated,
    check_opt_state,
    check_optimizer,
    check_state,
)
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS, make_room, zero_metrics
from jax_fp8.train.gradients import list_gemms, value_grads_and_amaxes, warm_start, with_first_scales
from jax_fp8.train.lowering import Lowering
from jax_fp8.train.microbatches import PendingStep, add_microbatch, begin, begin_if_needed, is_complete, split
from jax_fp8.train.train_state import TrainState
from jax_fp8.train.weight_cache import cast_requests, check_flag, refresh, renewed

STATE_REMEDY = "call step(state, batch) with TrainState.create(variables=..., tx=tx)"


class TrainStep:
    """`state, metrics = step(state, batch)`; made by `make_train_step`.

    The argument `state` is donated: use the returned one. `metrics` holds device scalars: "loss" (float32, mean over
    microbatches); "nonfinite_amaxes" (int32, tensors with an infinity or a NaN, whose scale was therefore left alone);
    "underflowing_amaxes" (int32, tensors so small at their scale that little more than zeros was left of them: more
    than 0 for many steps says that an outlier has blown up scales; see `DelayedScaling(forget_outliers=True)`).

    The same step in pieces, for callers who drive the microbatches themselves:

        pending = step.start(state)
        for i in range(microbatches):
            pending = step.accumulate_step(state, pending, next(data), is_first_microbatch=i == 0)
        state, pending, metrics = step.apply_step(state, pending)
    """

    def __init__(self, programs: "_Programs", donate: bool, compiler_options: dict, warm_start: bool):
        def jit(function, donated):
            return jax.jit(
                inside_its_mesh(function), donate_argnums=donated if donate else (), compiler_options=compiler_options
            )

        self._step, self._start = jit(programs.step, (0, 2)), jax.jit(programs.start)
        self._accumulate, self._apply = jit(programs.accumulate, 1), jit(programs.apply, (0, 1))
        self._warm = jit(programs.warm, 0) if warm_start else None
        self._donate, self._last_step_count, self._room = donate, None, None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        check_is("state", state, TrainState, STATE_REMEDY)
        if isinstance(state.step, Tracer):  # being looked at, not run
            return self._step(state, batch, zero_metrics())
        check_not_donated(state)
        # Only a state this object did not return itself can be a fresh one;
        # asking its step count would otherwise wait for the device.
        if self._warm is not None and state.step is not self._last_step_count and int(state.step) == 0:
            state = self._warm(state, batch)
        state, metrics = self._step(state, batch, zero_metrics())
        if self._room is None:
            self._room = make_room(state.step)
        self._last_step_count = state.step
        return state, metrics

    def start(self, state: TrainState) -> PendingStep:
        """What `accumulate_step` adds to: sums at zero and, for delayed scaling, the weights in FP8.
        It can be used for every step from now on.

        Current scaling casts the weights in every microbatch here, for only the loss of a batch would tell which;
        a step as a whole casts them once.
        """
        return self._start(state)

    def accumulate_step(
        self, state: TrainState, pending: PendingStep, microbatch: Any, is_first_microbatch: bool | jax.Array
    ) -> PendingStep:
        """Add the gradients of a microbatch.

        The weights are cast and the sums begin at zero at the first microbatch, and whenever `pending` belongs to
        another state than this one: after an optimizer step, or when params were overwritten. There is no warm start:
        the first step finds scales of 1 unless they were calibrated.

        Args:
          state: not donated, and not changed.
          pending: from `start`, `accumulate_step` or `apply_step`; donated.
          microbatch: as the loss takes it.
          is_first_microbatch: bool, or bool[] on the device; one program serves both values.
        """
        check_flag(is_first_microbatch)
        if not self._donate:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(pending))
            warnings.warn(
                f"accumulate_step copies what it adds to, {size / 2**20:,.1f} MiB a microbatch, "
                "because the step was made with donate=False; leave donate=True",
                stacklevel=2,
            )
        return self._accumulate(state, pending, microbatch, jnp.asarray(is_first_microbatch))

    def apply_step(
        self, state: TrainState, pending: PendingStep
    ) -> tuple[TrainState, PendingStep, dict[str, jax.Array]]:
        """The optimizer step after the last microbatch. Both arguments are donated.

        Unless `pending` holds exactly the `microbatches` of this state that the step was made with, nothing changes and
        the loss is NaN: a mean of fewer, or a second use of the same gradients,
        would be another step than the one that was asked for.

        Returns:
          The state, `pending` for the next step's microbatches, and the metrics of a step with "microbatches" (int32,
          how many there were).
        """
        return self._apply(state, pending)

    def lower(self, state: TrainState, batch: Any) -> Lowering:
        """Lower the step for inspection, as `capture_report` does; arrays or `jax.ShapeDtypeStruct`s.

        Its third input is `zero_metrics()`.
        """
        return Lowering(self._step.lower(state, batch, zero_metrics()))

    def trace(self, state: TrainState, batch: Any) -> jax.stages.Traced:
        """Trace the step for inspection; arrays or `jax.ShapeDtypeStruct`s."""
        return self._step.trace(state, batch, zero_metrics())


def make_train_step(
    loss_fn: Callable[[dict, Any], jax.Array],
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    microbatches: int = 1,
    *,
    cache_weights: bool = True,
    warm_start: bool = True,
    donate: bool = True,
    in_place: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Make the training step of a loss.

    Args:
      loss_fn: `loss_fn(variables, batch)`, the mean loss of a (micro)batch, a scalar.
      tx: the optimizer.
      recipe: the recipe of the model's layers; None for plain bfloat16.
      microbatches: split the batch, whose leaves all have one leading dim, into this many; gradients and loss are their
        mean, amaxes their maximum, and the FP8 state moves once.
      cache_weights: cast the weights once for all microbatches; False casts them in every one, for the same numbers
        more slowly. A state that carries them is read in any case.
      warm_start: before step 0, run the loss once with current scaling,
        so that the first step finds scales instead of ones.
      donate: update the state in place.
      in_place: let `fused_adam` write params, masters, moments and the weight cache in one kernel. It must then be the
        last transform that touches the updates; pass False for a `tx` that computes with what it returns
        (`optax.MultiSteps`, a scale after it). Other optimizers are not affected.
      compiler_options: XLA options; None is one CUDA graph per step where the default backend is a GPU.
    """
    check_loss_fn(loss_fn)
    check_optimizer(tx)
    check_recipe(recipe)
    check_integer("microbatches", microbatches)
    check_flags(cache_weights=cache_weights, warm_start=warm_start, donate=donate, in_place=in_place)
    if not isinstance(compiler_options, dict | None):
        raise ValueError(f"compiler_options must be a dict or None, got {compiler_options!r}; name XLA's options")
    if compiler_options is None:
        compiler_options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    optimizer = optax.with_extra_args_support(tx)
    programs = _Programs(loss_fn, optimizer, recipe, microbatches, cache_weights, in_place)
    return TrainStep(programs, donate, compiler_options, warm_start and _has_state(recipe))


@dataclass(frozen=True, repr=False)
class _Programs:
    """The functions behind a `TrainStep`, before they are jitted; fields as in `make_train_step`."""

    loss_fn: Callable
    optimizer: optax.GradientTransformationExtraArgs
    recipe: Recipe | None
    microbatches: int
    cache_weights: bool
    in_place: bool

    def step(self, state, batch, zeros):
        self._check(state, batch, self.microbatches)
        state = _with_its_cache(state, self.recipe)
        if self.microbatches == 1:
            loss, gradients, amaxes = value_grads_and_amaxes(self.loss_fn)(state.variables, batch)
        else:
            pending = self._scan(state, batch)
            loss, gradients, amaxes = pending.loss, pending.gradients, pending.amaxes
        state, metrics = self._update(state, loss, gradients, amaxes)
        return state, jax.tree.map(jnp.add, metrics, zeros)

    def warm(self, state, batch):
        self._check(state, batch, self.microbatches)
        if self.microbatches == 1:
            return state.replace(fp8=warm_start(self.loss_fn, self.recipe)(state.variables, batch))
        record = value_grads_and_amaxes(self.loss_fn, from_current=True)

        def largest(amaxes, microbatch):
            return jnp.maximum(amaxes, record(state.variables, microbatch)[2]), None

        amaxes, _ = lax.scan(largest, no_amaxes(state.fp8), split(batch, self.microbatches))
        return state.replace(fp8=with_first_scales(state.fp8, amaxes, self.recipe))

    def start(self, state):
        self._check(state)
        return begin(state, self.recipe, self.cache_weights)

    def accumulate(self, state, pending, microbatch, is_first_microbatch):
        self._check(state, microbatch)
        _check_pending(pending, state)
        pending = begin_if_needed(state, self.recipe, pending, is_first_microbatch)
        # A cache in the state may be stale, and the state is not donated: mending it here would copy it.
        state = dataclasses.replace(state, cache={})
        return add_microbatch(self.loss_fn, self.microbatches, state, pending, microbatch)

    def apply(self, state, pending):
        self._check(state)
        _check_pending(pending, state)
        complete = is_complete(state, pending, self.microbatches)

        def update(state):
            updated = self._update(state, pending.loss, pending.gradients, pending.amaxes)
            check_kept_types(state, updated[0])
            return updated

        def keep(state):
            return state, _metrics(jnp.float32(jnp.nan), jnp.zeros(2, jnp.int32))

        new_state, metrics = lax.cond(complete, update, keep, state)
        metrics["microbatches"] = pending.count
        return new_state, dataclasses.replace(pending, step=state.step - 1, count=jnp.int32(0)), metrics

    def _check(self, state, batch=None, microbatches=1):
        """Raise unless all of this belongs together."""
        check_is("state", state, TrainState, STATE_REMEDY)
        check_batch(batch, microbatches)
        check_state(state, self.recipe)
        check_opt_state(state.opt_state, self.optimizer, state.params)

    def _scan(self, state, batch):
        parts = split(batch, self.microbatches)
        gemms = self._gemms(state, parts)

        def body(pending, microbatch):
            return add_microbatch(self.loss_fn, self.microbatches, state, pending, microbatch, gemms), None

        start = begin(state, self.recipe, self.cache_weights and not state.cache, gemms)
        return lax.scan(body, start, parts)[0]

    def _gemms(self, state, parts) -> list[LayerPath]:
        """The layers in FP8 where the state does not say; a state with amax histories does."""
        if self.recipe is None or self.recipe.has_state:
            return []
        return list_gemms(self.loss_fn, state.variables, jax.tree.map(lambda x: x[0], parts))

    def _update(self, state, loss, gradients, amaxes):
        """The end of a step: scales from the amaxes, params and the rest of the state from the gradients."""
        with jax.named_scope("fp8_state"):
            fp8, counts = finish_step(state.fp8, amaxes, self.recipe)
        with jax.named_scope("optimizer"):
            casts = cast_requests(state.cache, state.params, fp8)
            request = {"in_place": InPlace(casts)} if self.in_place else {}
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params, **request)
            params = apply_updates(state.params, updates)
        applied = was_applied(updates)
        if applied is not None:
            fp8 = jax.tree.map(lambda new, old: jnp.where(applied, new, old), fp8, state.fp8)
        cache = refresh(state.cache, params, fp8, updates)
        return TrainState(state.step + 1, params, fp8, opt_state, cache), _metrics(loss, counts)


def _metrics(loss, counts) -> dict[str, jax.Array]:
    return {"loss": loss, **as_metrics(counts)}


def _has_state(recipe) -> bool:
    return recipe is not None and recipe.has_state


def _with_its_cache(state, recipe):
    """The state with a cache of its own params: a state may be put together from parts."""
    return dataclasses.replace(state, cache=renewed(state.cache, state.variables, recipe))


def _check_pending(pending, state):
    check_is("pending", pending, PendingStep, "pass what start, accumulate_step or apply_step returned")
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), state.params)
    difference = first_difference(sums, pending.gradients)
    if difference is not None:
        raise ValueError(
            f"pending must be of this state, but of its gradients {difference}; pass what start(state) returned"
        )
