"""One optimizer step as one jitted program with donated state: on a GPU, one CUDA graph.

    weights ─cast once→ FP8
    batch → microbatches ─scan→ gradients (mean, float32) ─optimizer, in place→ params, opt_state, weight cache
                              └ amaxes (maximum) ─finish_step, once, in place→ new scales ┘

Donated buffers keep their addresses from step to step, and so does all other memory of a step (cuda_graph.py). So the
graph is recorded once, and the device never waits for the host.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_fp8.core.checks import check_flags, check_integer, check_number
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.types import Batch, PyTree, RandomLoss, Variables
from jax_fp8.core.unpicklable import Unpicklable
from jax_fp8.distributed.microbatches import PendingStep, warn_of_copies
from jax_fp8.distributed.pipeline_checks import check_pipeline
from jax_fp8.grads.loss_aux import AuxLoss
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.parallel.mesh import Parallelism, as_parallelism
from jax_fp8.parallel.placement import placed_shapes
from jax_fp8.parallel.tiles import check_sequence
from jax_fp8.state.checks import (
    check_is,
    check_not_donated,
    check_on_mesh,
    check_optimizer,
    check_step_loss,
    explain_donation,
)
from jax_fp8.state.train_state import STATE_REMEDY, TrainState, check_given, placed_state
from jax_fp8.state.weight_cache import check_flag
from jax_fp8.train.arrival import Arrivals
from jax_fp8.train.cuda_graph import make_room, options_of_step, zero_metrics
from jax_fp8.train.diagnostics import Diagnostics
from jax_fp8.train.initialize import make_by_array
from jax_fp8.train.lowering import Lowering
from jax_fp8.train.programs import Programs
from jax_fp8.train.recipes import same_recipe
from jax_fp8.train.rngs import DrawingLoss, check_rngs, drawn
from jax_fp8.train.warming import WarmUp


class TrainStep(Unpicklable):
    """`state, metrics = step(state, batch)`; made by `make_train_step`.

    The argument `state` is donated: use the returned one. `metrics` holds device scalars:

        "loss"                   float32, mean over microbatches
        "nonfinite_amaxes"       int32, how many tensors had an infinity or a NaN; their scales stay as they were
        "underflowing_amaxes"    int32, how many tensors were so small at their scale that FP8 kept little more than
                                 zeros. More than 0 for many steps: an outlier made scales too large; see
                                 `DelayedScaling(forget_outliers=True)`
        "aux"                    with `has_aux`: what the loss returned beside its number

    A call has two options. Each makes a program of its own, compiled at its first use:

        step(state, batch, diagnose=True)     the same step, and `metrics["diagnostics"]`, a `Diagnostics`:
                                              how each tensor was cast, and gradients by layer
        step(state, batch, skip_above=4.0)    a step whose loss is larger, or not finite, changes nothing but the step
                                              count. Then `metrics["skipped"]` (int32) is 1, as it also is where
                                              `fused_adam(skip_nonfinite=True)` has skipped in place.
                                              `metrics["skip_above"]` is the limit; with math.inf only a loss that is
                                              not finite skips

    `step.diagnose(state, batch)` returns the diagnostics of that step, and leaves the state as it is.

    The same step in pieces, for callers who drive the microbatches themselves:

        pending = step.start(state)
        for i in range(microbatches):
            pending = step.accumulate_step(state, pending, next(data), is_first_microbatch=i == 0)
        state, pending, metrics = step.apply_step(state, pending)

    On a mesh, `init_state` makes a sharded state, and `place` shards a state that is already there. A step splits a
    batch or microbatch of NumPy arrays over the devices; with several processes, each passes its own part.
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
        """The state before the first step, from the variables that `init_fn(*args)` returns. On a mesh it is made in
        shards, so it may be larger than the memory of one device.

        Args:
          init_fn: `model.init`.
          args: its arguments: a random key, and inputs, of which only the shapes count.
        """
        return make_by_array(*self._programs.create(init_fn, *args), *args)

    def state_shapes(self, init_fn: Callable, *args: PyTree) -> TrainState:
        """The state of `init_state` as `jax.ShapeDtypeStruct`s with shardings. `lower` takes them before there is a
        state.
        """
        _, shapes, shardings = self._programs.create(init_fn, *args)
        return shapes if shardings is None else placed_shapes(shapes, shardings)

    def place(self, state: TrainState, batch: Batch) -> TrainState:
        """The state, moved to the mesh with the shardings of a step; of `batch` only the shapes count."""
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
        """How a step from this state would cast its tensors, and its gradients by layer; the state stays as it is."""
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
        """A state with first scales from this batch, as a step finds them by itself: for a loop of `accumulate_step`,
        or a step with `warm_start=False`. The argument `state` is donated.

        Rows of the FP8 state that have a scale already keep it. If an amax of this batch is not finite, all rows stay
        as they are. A recipe without state has nothing to warm.
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
        """The first `pending` for `accumulate_step`: sums of zeros and, for delayed scaling or a state with a weight
        cache, the weights in FP8. It serves all steps from now on.

        With a recipe without state, only the loss of a batch says which weights are in FP8. Unless the state has a
        weight cache, every microbatch casts them here, while `step(state, batch)` casts them once.

        On a mesh the sums are sharded like the params. The first `accumulate_step` allocates the weights in FP8, with
        either recipe: each device keeps those that it computes with, gathered over `fsdp`. With `cache_weights=False`
        every microbatch gathers them anew.
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
        """The optimizer step after the last microbatch. Both arguments are donated.

        `pending` must hold as many microbatches of this state as `microbatches` of `make_train_step` says. Otherwise
        nothing changes and the loss is NaN: so a mean of fewer, or gradients used twice, cannot move the params.

        Returns:
          The state, `pending` for the next step's microbatches, and the metrics of a step with "microbatches" (int32,
          how many there were).
        """
        check_not_donated(state, pending)
        return self._apply(state, pending)

    def lower(
        self, state: TrainState, batch: Batch, *, diagnose: bool = False, skip_above: float | None = None
    ) -> Lowering:
        """Lower the step for inspection, as `capture_report` does; arrays or `jax.ShapeDtypeStruct`s.

        The third input of the program is `zero_metrics()`.
        """
        self._check_options(diagnose, skip_above)
        return Lowering(self._step.lower(state, batch, self._zeros(state, batch, diagnose, skip_above)))

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Trace the step for inspection; arrays or `jax.ShapeDtypeStruct`s."""
        return self._step.trace(state, batch, zero_metrics())


def make_train_step(
    loss_fn: Callable[[Variables, Batch], PyTree] | RandomLoss,
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    microbatches: int = 1,
    *,
    cache_weights: bool = True,
    warm_start: bool = True,
    donate: bool = True,
    compiler_options: Mapping[str, object] | None = None,
    parallel: Parallelism | Mesh | None = None,
    rngs: Mapping[str, jax.Array] | None = None,
    has_aux: bool = False,
) -> TrainStep:
    """Make the training step of a loss.

    Args:
      loss_fn: `loss_fn(variables, batch)`, or `loss_fn(variables, batch, rngs=...)`: the mean loss of a (micro)batch, a
        scalar. A model, and a function of other arguments, are refused. With `fsdp`, only FP8 layers may read their
        kernels: these are gathered in FP8, and any other use of one finds NaN.
      tx: the optimizer, an `optax.GradientTransformation`; others are refused. `fused_adam` writes params, masters,
        moments and the weight cache in one kernel, if it is the last transform that touches the updates. If another
        one computes with its result, the step warns, and adds updates to params as with any optimizer.
      recipe: the recipe of the model's layers, or None for plain bfloat16. A layer with another recipe is refused when
        the loss is traced.
      microbatches: into how many the batch is split, whose leaves all have one leading dim; 1 by default. Gradients and
        loss are means over them, amaxes maxima, and the FP8 state moves once. They must divide the batch.
      cache_weights: True casts the weights once for all microbatches. False casts them in every one, which gives the
        same numbers more slowly; refused with `pipe`. A weight cache in the state is read in any case.
      warm_start: True runs the loss once with current scaling before a step that would meet rows of the FP8 state
        without history: before step 0, after a first step that was skipped, and when a layer runs for the first time.
        With False these rows have a scale of 1.
      donate: True updates the state in place; False leaves the argument `state` alive, for the memory of a second one.
      compiler_options: a dict of XLA options. None makes one CUDA graph per step where the default backend is a GPU,
        and on a mesh runs collectives beside compute (parallel/overlap.py).
      parallel: spread the step over the devices of this mesh, or as this `Parallelism` says. None runs it on one
        device, or as jax splits it by the shardings of its arguments. The loss of a batch is the mean over its parts.
        The axis `pipe` needs a `LayeredLoss`, as `next_token_loss` of a `GPT` returns it.
      rngs: keys for a loss that draws, such as {"dropout": jax.random.key(0)}; None for one that does not. From these
        and the step count, the step makes other keys for each microbatch and each device's part of the batch, and
        passes them to the loss. Refused with `pipe`, and with layers that keep activations on the host.
      has_aux: True for a loss that returns `(loss, aux)`. Entries of a dict `aux` that are named like
        `state.collections`, such as "batch_stats", become those of the state; `metrics["aux"]` is the rest. Over
        microbatches and devices that split the batch, floats are means. Of the rest, integers are sums, and flags are
        true where any is; of collections, integers and flags are maxima. Refused with `pipe`, a `LayeredLoss`, and
        `accumulate_step`.
    """
    check_step_loss(loss_fn, rngs is not None)
    check_optimizer(tx)
    check_recipe(recipe)
    check_integer("microbatches", microbatches)
    check_flags(cache_weights=cache_weights, warm_start=warm_start, donate=donate, has_aux=has_aux)
    offloads = isinstance(loss_fn, LayeredLoss) and bool(loss_fn.on_host)
    parallel = as_parallelism(parallel)
    compiler_options = options_of_step(compiler_options, parallel is not None, offloads)
    optimizer = optax.with_extra_args_support(tx)
    if parallel is not None and parallel.sequence_parallel:
        check_sequence([recipe])
    if parallel is not None and parallel.stages > 1:
        check_pipeline(parallel, loss_fn, microbatches, cache_weights, has_aux)
    loss_fn = AuxLoss(loss_fn) if has_aux else loss_fn
    if rngs is not None:
        check_rngs(rngs, loss_fn, parallel)
        loss_fn = DrawingLoss(loss_fn, rngs)
    programs = Programs(loss_fn, optimizer, recipe, microbatches, cache_weights, parallel, has_aux)
    return TrainStep(programs, donate, compiler_options, warm_start)
