"""`TrainStep`: the jitted programs of one optimizer step, with donated state.

Donated buffers keep their addresses from step to step, and so does all other memory of a step (cuda_graph.py). So the
CUDA graph is recorded once, and the device never waits for the host.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_fp8.core.checks import check_flags, check_number
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.core.unpicklable import Unpicklable
from jax_fp8.distributed.microbatches import PendingStep, warn_of_copies
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.parallel.placement import placed_shapes
from jax_fp8.state.checks import check_is, check_not_donated, check_on_mesh, explain_donation
from jax_fp8.state.train_state import STATE_REMEDY, TrainState, check_given, placed_state
from jax_fp8.state.weight_cache import check_flag
from jax_fp8.train.arrival import Arrivals
from jax_fp8.train.cuda_graph import make_room, zero_metrics
from jax_fp8.train.diagnostics import Diagnostics
from jax_fp8.train.initialize import make_by_array
from jax_fp8.train.lowering import Lowering
from jax_fp8.train.programs import Programs
from jax_fp8.train.recipes import same_recipe
from jax_fp8.train.rngs import drawn
from jax_fp8.train.warming import WarmUp


class TrainStep(Unpicklable):
    """A training step: `state, metrics = step(state, batch)`; made by `make_train_step`.

    The argument `state` is donated: use the returned one. `metrics` holds device scalars:

        "loss"                   float32, mean over microbatches
        "nonfinite_amaxes"       int32, how many tensors had an infinity or a NaN; their scales stay as they were
        "underflowing_amaxes"    int32, how many tensors were so small at their scale that FP8 kept little more than
                                 zeros. More than 0 for many steps: an outlier made scales too large; see
                                 `DelayedScaling(forget_outliers=True)`
        "aux"                    with `has_aux`: what the loss returned beside its number

    The same step in pieces, for callers who drive the microbatches themselves:

        pending = step.start(state)
        for i in range(microbatches):
            pending = step.accumulate_step(state, pending, next(data), is_first_microbatch=i == 0)
        state, pending, metrics = step.apply_step(state, pending)
    """

    _cannot_be_pickled = (
        "a step cannot be pickled, for it is made of functions; pickle its state, and call make_train_step again"
    )

    def __init__(self, programs: Programs, donate: bool, compiler_options: Mapping[str, object], warm_start: bool):
        def jit(function: Callable, donated: int | tuple[int, ...]) -> jax.stages.Wrapped:
            options = dict(compiler_options)
            return jax.jit(
                inside_its_mesh(function), donate_argnums=donated if donate else (), compiler_options=options
            )

        checked = same_recipe(programs.recipe)  # around programs that trace the loss
        self._step, self._start = jit(checked(programs.step), (0, 2)), jax.jit(programs.start)
        self._accumulate, self._apply = jit(checked(programs.accumulate), 1), jit(programs.apply, (0, 1))
        self._diagnose, self._no_diagnostics = jit(checked(programs.diagnose), ()), None
        has_state = programs.recipe is not None and programs.recipe.has_state
        self._warm = jit(checked(programs.warm), 0) if has_state else None
        self._warm_up = WarmUp(self._warm) if warm_start and self._warm is not None else None
        self._arrivals = Arrivals(None if programs.parallel is None else programs.parallel.mesh)
        self._donate, self._room, self._programs = donate, None, programs

    def init_state(self, init_fn: Callable, *args: PyTree) -> TrainState:
        """Make the state before the first step, from the variables that `init_fn(*args)` returns.

        Args:
          init_fn: `model.init`.
          *args: its arguments: a random key, and inputs, of which only the shapes count.

        Returns:
          The state; on a mesh it is made in shards, so it may be larger than the memory of one device.

        Raises:
          ValueError: if `init_fn` does not return such variables.
        """
        return make_by_array(*self._programs.create(init_fn, *args), *args)

    def state_shapes(self, init_fn: Callable, *args: PyTree) -> TrainState:
        """Find the shapes and shardings of the state of `init_state`, which `lower` takes before there is a state.

        Args:
          init_fn: `model.init`.
          *args: its arguments, or a `jax.ShapeDtypeStruct` in place of any.

        Returns:
          A state of `jax.ShapeDtypeStruct`s.

        Raises:
          ValueError: if `init_fn` does not return such variables.
        """
        _, shapes, shardings = self._programs.create(init_fn, *args)
        return shapes if shardings is None else placed_shapes(shapes, shardings)

    def place(self, state: TrainState, batch: Batch) -> TrainState:
        """Move a state to the mesh, with the shardings of a step; without a mesh it stays where it is.

        Args:
          state: on any devices.
          batch: as a step takes it; only its shapes count.

        Returns:
          The state.

        Raises:
          ValueError: if `state` is not a `TrainState`, or was donated before; or if `batch` holds no arrays.
        """
        check_given(state, batch)
        check_not_donated(state)
        if self._programs.parallel is None:
            return state
        batch = drawn(self._programs.loss_fn, state, batch)
        placement = self._programs.mesh_pass(state, batch, self._programs.microbatches).placement
        return jax.device_put(state, placed_state(placement, state))

    def __call__(
        self, state: TrainState, batch: Batch, *, diagnose: bool = False, skip_above: float | None = None
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """Take one optimizer step. Each option makes a program of its own, compiled at its first use.

        Args:
          state: of the step's recipe and optimizer, on its mesh; donated, unless `donate=False`.
          batch: a tree of arrays, which a mesh splits by rows. With several processes, each passes its own part.
          diagnose: add "diagnostics" to the metrics: how each tensor was cast, and the gradients by layer.
          skip_above: a step whose loss is larger, or not finite, changes nothing but the step count; None never skips,
            math.inf only where the loss is not finite. The metrics then have "skip_above", the limit, and "skipped",
            int32, which is also 1 where `fused_adam(skip_nonfinite=True)` has skipped in place.

        Returns:
          The next state, and the metrics by name, as in the description of the class.

        Raises:
          ValueError: if `state` or `batch` does not fit the step, `state` was donated before, or the loss is no scalar.
        """
        check_given(state, batch)
        self._check_options(diagnose, skip_above)
        if isinstance(state.step, Tracer):  # the caller traces the step and does not run it
            return self._step(state, batch, self._zeros(state, batch, diagnose, skip_above))
        with explain_donation(state):
            if self._programs.parallel is not None:
                batch = self._programs.parallel.place_batch(batch, self._programs.microbatches)
            is_own, state = self._arrivals.check(state), self._arrivals.with_own_cache(state)
            if self._warm_up is not None:
                state = self._warm_up.before_step(state, batch, is_own)
            state, metrics = self._step(state, batch, self._zeros(state, batch, diagnose, skip_above))
        if self._room is None:
            self._room = make_room(state.step)
        self._arrivals.returned(state)
        return state, metrics

    def diagnose(self, state: TrainState, batch: Batch) -> Diagnostics:
        """Find how a step from this state would cast its tensors, and its gradients by layer; the state stays as it is.

        Args:
          state: not donated.
          batch: as a step takes it.

        Returns:
          The diagnostics, on the device.

        Raises:
          ValueError: as in a call of the step.
        """
        check_given(state, batch)
        check_not_donated(state)
        return self._diagnose(state, self._placed(state, batch))

    def _check_options(self, diagnose: bool, skip_above: float | None) -> None:
        check_flags(diagnose=diagnose)
        if skip_above is not None and skip_above != math.inf:
            check_number("skip_above", skip_above, "or math.inf", lambda _: True, "None never skips")

    def _zeros(self, state: TrainState, batch: Batch, diagnose: bool, skip_above: float | None) -> dict[str, PyTree]:
        if diagnose and self._no_diagnostics is None:
            self._no_diagnostics = self._programs.no_diagnostics(state, batch)
        return zero_metrics(skip_above, self._no_diagnostics if diagnose else None)

    def warm_start(self, state: TrainState, batch: Batch) -> TrainState:
        """Give the state first scales from this batch, as a step does by itself.

        A loop of `accumulate_step` calls it, or one over a step with `warm_start=False`. Rows of the FP8 state that
        have a scale already keep it. If an amax of this batch is not finite, all rows stay as they are. A recipe
        without state has nothing to warm.

        Args:
          state: donated.
          batch: as a step takes it.

        Returns:
          The state.

        Raises:
          ValueError: as in a call of the step.
        """
        check_given(state, batch)
        if self._warm is None:
            return state
        check_not_donated(state)
        return self._warm(state, self._placed(state, batch))[0]

    def _placed(self, state: TrainState, batch: Batch) -> Batch:
        """The batch, split over the mesh; raise unless the state is on it."""
        if self._programs.parallel is None or isinstance(state.step, Tracer):
            return batch
        check_on_mesh(state, self._programs.parallel.mesh)
        return self._programs.parallel.place_batch(batch, self._programs.microbatches)

    def start(self, state: TrainState) -> PendingStep:
        """Make the first `pending` for `accumulate_step`; it serves all steps from now on.

        It has sums of zeros and, for delayed scaling or a state with a weight cache, the weights in FP8. With a recipe
        without state, only the loss of a batch says which weights are in FP8. Unless the state has a weight cache,
        every microbatch casts them here, while `step(state, batch)` casts them once.

        On a mesh the sums are sharded like the params. The first `accumulate_step` allocates the weights in FP8, with
        either recipe: each device keeps those that it computes with, gathered over `fsdp`. With `cache_weights=False`
        every microbatch gathers them anew.

        Args:
          state: not donated.

        Returns:
          The pending step.

        Raises:
          ValueError: if `state` is not a `TrainState`, or was donated before.
        """
        check_is("state", state, TrainState, STATE_REMEDY)
        check_not_donated(state)
        if self._programs.parallel is not None:
            return self._programs.start_on_mesh(state)
        return self._start(state)

    def accumulate_step(
        self, state: TrainState, pending: PendingStep, microbatch: Batch, is_first_microbatch: bool | jax.Array
    ) -> PendingStep:
        """Add the gradients of a microbatch; on a mesh, their sum over the devices.

        At the first microbatch the step casts the weights and sets the sums to zero. It also does so whenever `pending`
        belongs to another state than this one: after an optimizer step, or when params were overwritten. There is no
        warm start: rows without history have scales of 1 until `step.warm_start` or a calibration gives them others.

        Args:
          state: not donated, and not changed.
          pending: from `start`, `accumulate_step` or `apply_step`; donated.
          microbatch: as the loss takes it. The loss knows no other microbatch: a loss with a mask is the mean over the
            learned tokens of this one alone.
          is_first_microbatch: bool, or bool[] on the device; one program serves both values.

        Returns:
          The next `pending`.

        Raises:
          ValueError: as in a call of the step; also if `pending` was donated, or `is_first_microbatch` is not a bool.
        """
        check_given(state, microbatch)
        check_flag(is_first_microbatch)
        check_not_donated(state, pending)
        if not self._donate:
            warn_of_copies(pending)
        parallel, is_first = self._programs.parallel, jnp.asarray(is_first_microbatch)
        if parallel is not None and not isinstance(state.step, Tracer):
            microbatch, is_first = parallel.place_batch(microbatch, 1), parallel.place_batch(is_first, 1)
            pending = self._programs.with_weights(state, pending, microbatch)
        return self._accumulate(state, pending, microbatch, is_first)

    def apply_step(
        self, state: TrainState, pending: PendingStep
    ) -> tuple[TrainState, PendingStep, dict[str, jax.Array]]:
        """Take the optimizer step after the last microbatch.

        `pending` must hold as many microbatches of this state as `microbatches` of `make_train_step` says. Otherwise
        nothing changes and the loss is NaN: so a mean of fewer, or gradients used twice, cannot move the params.

        Args:
          state: that of the microbatches; donated.
          pending: from the last `accumulate_step`; donated.

        Returns:
          The state, `pending` for the next step's microbatches, and the metrics of a step with "microbatches" (int32,
          how many there were).

        Raises:
          ValueError: if `state` or `pending` was donated before.
        """
        check_not_donated(state, pending)
        return self._apply(state, pending)

    def lower(
        self, state: TrainState, batch: Batch, *, diagnose: bool = False, skip_above: float | None = None
    ) -> Lowering:
        """Lower the step for inspection, as `capture_report` does; the third input of the program is `zero_metrics()`.

        Args:
          state, batch: as in a call of the step; arrays or `jax.ShapeDtypeStruct`s.
          diagnose, skip_above: as in a call of the step.

        Returns:
          A `Lowering`, with the methods of a `jax.stages.Lowered`.

        Raises:
          ValueError: if a setting is not valid.
        """
        self._check_options(diagnose, skip_above)
        return Lowering(self._step.lower(state, batch, self._zeros(state, batch, diagnose, skip_above)))

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Trace the step for inspection.

        Args:
          state, batch: as in a call of the step; arrays or `jax.ShapeDtypeStruct`s.

        Returns:
          What `jax.jit(...).trace` returns.

        Raises:
          ValueError: as in a call of the step.
        """
        return self._step.trace(state, batch, zero_metrics())
