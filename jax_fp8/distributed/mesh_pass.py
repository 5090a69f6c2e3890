"""A pass on every device of a mesh: one program in one `shard_map`, in which each device runs the model on its part of
the batch and of the params.

    shards of params ─cast, gather→ a device's own state ─loss, backward→ gradients ─reduce→ gradients of the shards

Inside the `shard_map` runs the pass of one device. Layers learn from `core/shards.py` how they are split, and contain
the collectives that this needs. All other collectives are in `parallel/transfers.py`. Each device divides the loss of
its part of the batch by the number of parts: so output gradients and their amaxes are those of the mean over all parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.distributed import shard_trace
from jax_fp8.distributed.layer_kinds import LayerKinds
from jax_fp8.distributed.microbatches import PendingStep, begin_if_needed
from jax_fp8.distributed.pipeline_checks import check_first, check_has_no_collections, check_layers, check_states
from jax_fp8.distributed.pipeline_pass import PipelinePass
from jax_fp8.grads.checks import ALONE, ALONE_OR_PAIR, check_loss
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.loss_aux import joined_devices
from jax_fp8.grads.loss_trace import LossTrace, checked, is_called_whole, reporting, shapes_of_part
from jax_fp8.grads.tape import Observed, PassResult, add_share, share_of
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.placement import Placement, placed_shapes, put
from jax_fp8.parallel.stages import Stages
from jax_fp8.parallel.transfers import (
    gather_params,
    gather_weight,
    on_any_device,
    reduce_gradients,
    summed_axes,
    whole_amaxes,
    whole_loss,
)
from jax_fp8.state.train_state import TrainState, placed_state
from jax_fp8.state.weight_cache import with_version

WHOLE = PartitionSpec()
Result = TypeVar("Result")


@dataclass(frozen=True)
class MeshPass:
    """How a pass runs on a mesh, for states and batches of given shapes.

    Args:
      recipe: the recipe of the state.
      trace: the trace of the loss as on one device.
      gemms: all GEMMs in FP8, and the recipes of their layers.
      in_fp8: the GEMMs whose weights are cast as shards and gathered in FP8; before this is settled, the candidates.
      once: weights are gathered once a step instead of once a microbatch.
      is_settled: the loss was traced as a device computes it: all devices have the same loss, and the layers of
        `in_fp8` find their weights.
      pipeline: the pass over the stages of a pipeline, if there are any.
      has_aux: the loss returns `(loss, Aux)`.
    """

    placement: Placement
    loss_fn: Callable
    recipe: Recipe | None
    trace: LossTrace
    gemms: dict[LayerPath, Recipe]
    in_fp8: dict[LayerPath, Recipe]
    once: bool
    is_settled: bool = False
    pipeline: PipelinePass | None = None
    has_aux: bool = False

    @classmethod
    def from_state(
        cls,
        parallel: Parallelism,
        loss_fn: Callable,
        recipe: Recipe | None,
        once: bool,
        state: TrainState,
        batch: Batch,
        microbatches: int = 1,
        has_aux: bool = False,
        trace: LossTrace | None = None,
    ) -> "MeshPass":
        """The pass for a state and a batch, arrays or their shapes. `trace` is the loss's trace with the whole batch,
        as on one device; None makes it.
        """
        if parallel.stages > 1:
            check_has_no_collections(state)
            assert isinstance(loss_fn, LayeredLoss), "checked when the step was made"
            return cls._with_stages(
                parallel, loss_fn, recipe, once, state, shapes_of_part(batch, microbatches), microbatches
            )
        trace = trace or LossTrace.from_function(checked(loss_fn, has_aux), state.variables, batch)
        placement = shard_trace.place_state(parallel, state, trace)
        in_fp8 = shard_trace.can_be_gathered(placement, trace, state.fp8)
        gemms = trace.gemms_of(placement.by_path, state.fp8)
        return cls(placement, loss_fn, recipe, trace, gemms, in_fp8, once, has_aux=has_aux)

    @classmethod
    def _with_stages(
        cls,
        parallel: Parallelism,
        loss: LayeredLoss,
        recipe: Recipe | None,
        once: bool,
        state: TrainState,
        microbatch: Batch,
        microbatches: int,
    ) -> "MeshPass":
        layers = LayerKinds.from_loss(loss, state.variables, microbatch)
        trace = layers.trace
        placement = shard_trace.place_state(parallel, state, trace)
        trace.check_kernels_are_params()
        check_first(layers.first, trace.gemms)
        check_states(loss.layers, trace.gemms, state.fp8)
        short = {collection: layers.short(tree) for collection, tree in state.variables.items()}
        short_placement = replace(placement, places=layers.short(placement.places))
        gathered = shard_trace.can_be_gathered(short_placement, trace, short.get("fp8", {}))
        in_fp8 = layers.of_all(
            shard_trace.trace_on_shards(short_placement, layers.short_loss, short, microbatch, gathered)
        )
        gemms = trace.gemms_of(placement.by_path, state.fp8)
        check_layers(Stages(loss.layers, parallel.stages, parallel.num_chunks), layers.kinds, placement, gemms, in_fp8)
        pipeline = PipelinePass(placement, loss, gemms, in_fp8, microbatches)
        return cls(placement, loss, recipe, trace, gemms, in_fp8, once, is_settled=True, pipeline=pipeline)

    def settled(self, state: TrainState, batch: Batch) -> "MeshPass":
        """This pass after the loss was traced as a device computes it."""
        if self.is_settled:
            return self
        trace = partial(shard_trace.trace_on_shards, self.placement, self.loss_fn, state.variables, batch)
        return replace(self, in_fp8=trace(self.in_fp8, self.has_aux), is_settled=True)

    def gradients(
        self, local: Callable[..., PassResult], state: TrainState, batch: Batch, observe: Observed
    ) -> PassResult:
        """The pass of all devices; each runs `local(loss_fn, state_of, batch, gemms, observe)`."""

        def on_device(shards: TrainState, batch: Batch) -> PassResult:
            if self.pipeline is not None:
                return self._whole(self.pipeline.gradients(shards, batch, False, observe))
            own = local(self._share, self._state_of(shards), batch, self._stateless, observe)
            return self._whole(replace(own, grads=reduce_gradients(self.placement, own.grads, shards.params)))

        specs: PyTree = WHOLE, self.placement.specs, WHOLE, WHOLE, WHOLE
        return self._run(on_device, (), PassResult(*specs), state, batch)

    def first_amaxes(self, local: Callable, state: TrainState, batch: Batch) -> tuple[jax.Array, "MeshPass"]:
        """The amaxes of all devices in a pass in which every tensor is scaled by its own amax; and this pass, settled
        by the same trace.
        """
        if not self.is_settled and not is_called_whole(self.loss_fn):
            return self.settled(state, batch).first_amaxes(local, state, batch)
        cached: list[LayerPath] = []

        def report(program: ClosedJaxpr, trace: LossTrace, *args: PyTree) -> None:
            shard_trace.check_is_whole(self.placement, program.jaxpr, args, self.has_aux)
            cached.extend(trace.cached)

        loss = self._share if self.is_settled else reporting(self._share, self.has_aux, report)

        def on_device(shards: TrainState, batch: Batch) -> jax.Array:
            if self.pipeline is not None:
                amaxes = self.pipeline.gradients(shards, batch, from_current=True).amaxes
            else:
                amaxes = local(loss, self._state_of(shards, from_current=True), batch, self._stateless)
            return whole_amaxes(self.placement.parallel, amaxes)

        amaxes = self._run(on_device, (), WHOLE, state, batch)
        if self.is_settled:
            return amaxes, self
        settled = replace(self, in_fp8=shard_trace.found_in_cache(self.in_fp8, cached), is_settled=True)
        return (amaxes, settled) if settled.in_fp8 == self.in_fp8 else settled.first_amaxes(local, state, batch)

    def add_microbatch(
        self, microbatches: int, state: TrainState, pending: PendingStep, microbatch: Batch, is_first: jax.Array
    ) -> PendingStep:
        """Add one of so many microbatches to `pending`, whose sums are shards like the params. Its weights in FP8 are
        kept until a new sum begins.
        """
        parallel, share = self.placement.parallel, 1 / microbatches

        def on_device(shards: TrainState, microbatch: Batch, pending: PendingStep, is_first: jax.Array) -> PendingStep:
            pending = replace(pending, cache=jax.tree.map(lambda x: x[0], pending.cache))
            cast, agree = partial(self._own_weights, shards), partial(on_any_device, parallel)
            pending = begin_if_needed(shards, pending, is_first, cast, (), agree)
            own = self._own_state(shards, pending.cache or None)
            result = take_gradients(self._share)(own.variables, microbatch)
            gradients = jax.tree.map(partial(share_of, share), result.grads)
            gradients = reduce_gradients(self.placement, gradients, pending.gradients)
            return replace(
                pending,
                count=pending.count + 1,
                loss=add_share(pending.loss, share, whole_loss(parallel, result.loss)),
                gradients=jax.tree.map(jnp.add, pending.gradients, gradients),
                amaxes=jnp.maximum(pending.amaxes, whole_amaxes(parallel, result.amaxes)),
                cache=jax.tree.map(lambda x: x[None], pending.cache),
            )

        each: PyTree = WHOLE, WHOLE, WHOLE, self.placement.specs, WHOLE, self._each
        specs = PendingStep(*each)
        return self._run(on_device, (specs, WHOLE), specs, state, microbatch, pending, is_first)

    @property
    def shared(self) -> dict[LayerPath, Recipe]:
        """The GEMMs whose weights in FP8 `add_microbatch` keeps for the next microbatch: those that are gathered in
        FP8, or, if there are none, those whose kernels `fsdp` does not split.
        """
        places = self.placement.by_path
        whole = {
            gemm: recipe
            for gemm, recipe in self.gemms.items()
            if all(places[kernel].fsdp_dim is None for kernel in kernel_paths(gemm))
        }
        return self.in_fp8 or whole

    def shapes_of_weights(self, state: TrainState, batch: Batch) -> dict:
        """Shapes and places of the weights in FP8 as `add_microbatch` keeps them. Each device has its own: they are
        stacked along a first dim that all axes split.
        """

        def on_device(shards: TrainState, _: Batch) -> PyTree:
            return jax.tree.map(lambda x: x[None], self._own_weights(shards))

        shapes = jax.eval_shape(lambda *args: self._run(on_device, (), self._each, *args), state, batch)
        each = NamedSharding(self.placement.parallel.mesh, self._each)
        return placed_shapes(shapes, jax.tree.map(lambda _: each, shapes))

    def _run(
        self,
        on_device: Callable[..., Result],
        specs: tuple,
        out_specs: PyTree,
        state: TrainState,
        batch: Batch,
        *others,
    ) -> Result:
        """Run `on_device(shards, batch, *others)` on every device; `specs` are those of the others."""
        parallel = self.placement.parallel

        def run(shards: TrainState, *args: PyTree) -> Result:
            with self.placement.shards.active():
                return on_device(shards, *args)

        placed = placed_state(self.placement, state := replace(state, opt_state=None))
        collections = jax.tree.map(lambda sharding: sharding.spec, placed.collections)
        fields: PyTree = WHOLE, self.placement.specs, WHOLE, None, WHOLE, collections
        batch_specs = jax.tree.map(lambda x: parallel.batch_spec if jnp.ndim(x) else WHOLE, batch)
        in_specs = TrainState(*fields), batch_specs, *specs
        on_all = jax.shard_map(run, mesh=parallel.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        batch = put(batch, jax.tree.map(partial(NamedSharding, parallel.mesh), batch_specs))
        return on_all(put(state, placed), batch, *others)

    @property
    def _each(self) -> PartitionSpec:
        """The spec of arrays of which each device has its own, stacked."""
        return PartitionSpec(self.placement.parallel.mesh.axis_names)

    def constrain(self, state: TrainState) -> TrainState:
        """The state with its shardings on the mesh."""
        return put(state, placed_state(self.placement, state))

    def _whole(self, own: PassResult) -> PassResult:
        """The loss, aux, amaxes and measurements of all devices, from those of each device."""
        parallel = self.placement.parallel
        maxima = whole_amaxes(parallel, jnp.concatenate([own.amaxes, own.measured]))
        amaxes, measured = jnp.split(maxima, [own.amaxes.size])
        aux = joined_devices(own.aux, summed_axes(parallel)) if self.has_aux else None
        return PassResult(whole_loss(parallel, own.loss), own.grads, amaxes, measured, aux)

    @property
    def _stateless(self) -> list[LayerPath]:
        """The GEMMs in FP8 without FP8 state."""
        return [] if self.recipe is None or self.recipe.has_state else [*self.gemms]

    @property
    def _share(self) -> Callable:
        """The loss whose value is the device's share of the mean over all parts of the batch."""
        loss_fn, parts = self.loss_fn, self.placement.parallel.batch_parts
        if parts == 1:
            return loss_fn

        def share(function: Callable, remedy: str) -> Callable:
            def run(*args: PyTree) -> PyTree:
                out = function(*args)
                check_loss(out, self.has_aux, remedy)
                return (out[0] / parts, out[1]) if self.has_aux else out / parts

            return run

        if isinstance(loss_fn, LayeredLoss):
            return replace(loss_fn, last=share(loss_fn.last, ALONE), whole=share(loss_fn, ALONE))
        return share(loss_fn, ALONE_OR_PAIR)

    def _state_of(self, shards: TrainState, from_current: bool = False) -> Callable[[], TrainState]:
        """A function that returns the state that a device computes with, made once or in every call."""
        state_of = partial(self._own_state, shards, from_current=from_current)
        if not self.once:
            return state_of
        made = state_of()
        return lambda: made

    def _own_state(self, shards: TrainState, cache: PyTree = None, from_current: bool = False) -> TrainState:
        """The state that a device computes with. `cache` holds its weights in FP8; None casts them."""
        if cache is None:
            cache = self._cast(self.in_fp8, shards, from_current) if self.in_fp8 else shards.cache
        not_gathered = [kernel for gemm in self.in_fp8 for kernel in kernel_paths(gemm)]
        return replace(shards, params=gather_params(self.placement, shards.params, not_gathered), cache=cache)

    def _own_weights(self, shards: TrainState) -> dict:
        """The weights in FP8 of the GEMMs in `shared`."""
        return with_version(self._cast(self.shared, shards), shards.params)

    def _cast(self, gemms: Mapping[LayerPath, Recipe], shards: TrainState, from_current: bool = False) -> dict:
        """Weights in FP8, cast as shards and gathered."""
        places, scales = self.placement.by_path, {} if from_current else shards.fp8
        kernels = {gemm: [places[kernel] for kernel in kernel_paths(gemm)] for gemm in gemms}
        gathers = {gemm: partial(gather_weight, own_places) for gemm, own_places in kernels.items()}
        return cast_gemms(shards.params, scales, gemms, gathers)
