"""A pass on every device of a mesh: one program in one `shard_map`, in which each device runs the model on its part of
the batch and of the params.

    shards of params ─cast, gather→ a state as of one device ─loss, backward→ gradients ─reduce→ those of the shards

What runs inside is the pass of one device. Layers know from `core/shards.py` how they are split; all else that moves
between devices is in `parallel/transfers.py`. The loss is that of the device's part, divided by the number of parts: so
output gradients are those of the mean over all, and amaxes, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import no_amaxes
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
from jax_fp8.parallel.mesh import Parallelism, describe_mesh
from jax_fp8.parallel.placement import Placement, place_params, placed_shapes, put
from jax_fp8.parallel.stages import Stages
from jax_fp8.parallel.tiles import check_sequence
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


@dataclass(frozen=True)
class MeshPass:
    """A state on a mesh.

    Args:
      recipe: of the state.
      trace: what the loss says of its layers.
      gemms: all in FP8, and the recipes of their layers.
      in_fp8: those whose weights are cast where they lie and gathered in FP8, or may be before this is settled.
      once: weights are gathered once a step, and not once a microbatch.
      is_settled: the loss was traced as a device computes it: all devices have one, and `in_fp8` find their weights.
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
    def of(
        cls,
        parallel: Parallelism,
        loss_fn: Callable,
        recipe: Recipe | None,
        once: bool,
        state: TrainState,
        batch: Any,
        microbatches: int = 1,
        has_aux: bool = False,
        trace: LossTrace | None = None,
    ) -> "MeshPass":
        """Of a state and a batch; `trace`: of the loss with the whole batch, as on one device, if there is one."""
        if parallel.stages > 1:
            check_has_no_collections(state)
            assert isinstance(loss_fn, LayeredLoss), "checked when the step was made"
            return cls._with_stages(
                parallel, loss_fn, recipe, once, state, shapes_of_part(batch, microbatches), microbatches
            )
        trace = trace or LossTrace.from_function(checked(loss_fn, has_aux), state.variables, batch)
        placement = _place(parallel, state, trace)
        in_fp8 = shard_trace.can_be_gathered(placement, trace, state.fp8)
        gemms = trace.gemms_of(placement.by_path, state.fp8)
        return cls(placement, loss_fn, recipe, trace, gemms, in_fp8, once, has_aux=has_aux)

    @classmethod
    def _with_stages(cls, parallel, loss: LayeredLoss, recipe, once, state, microbatch, microbatches) -> "MeshPass":
        layers = LayerKinds.from_loss(loss, state.variables, microbatch)
        trace = layers.trace
        placement = _place(parallel, state, trace)
        trace.check_kernels_are_params()
        check_first(layers.first, trace.gemms)
        check_states(loss.layers, trace.gemms, state.fp8)
        short = {collection: layers.short(tree) for collection, tree in state.variables.items()}
        of_short = replace(placement, places=layers.short(placement.places))
        short_gemms = shard_trace.can_be_gathered(of_short, trace, short.get("fp8", {}))
        in_fp8 = layers.of_all(shard_trace.trace_on_shards(of_short, layers.short_loss, short, microbatch, short_gemms))
        gemms = trace.gemms_of(placement.by_path, state.fp8)
        check_layers(Stages(loss.layers, parallel.stages, parallel.num_chunks), layers.kinds, placement, gemms, in_fp8)
        pipeline = PipelinePass(placement, loss, gemms, in_fp8, microbatches)
        return cls(placement, loss, recipe, trace, gemms, in_fp8, once, is_settled=True, pipeline=pipeline)

    def settled(self, state: TrainState, batch: Any) -> "MeshPass":
        """The same, after the loss was traced as a device computes it."""
        if self.is_settled:
            return self
        given = self.loss_fn, state.variables, batch, self.in_fp8, self.has_aux
        return replace(self, in_fp8=shard_trace.trace_on_shards(self.placement, *given), is_settled=True)

    def gradients(
        self, local: Callable[..., PassResult], state: TrainState, batch: Any, observe: Observed
    ) -> PassResult:
        """The pass of all devices, where each has `local(loss_fn, state_of, batch, gemms, observe)`."""

        def on_device(shards: TrainState, batch: Any) -> PassResult:
            if self.pipeline is not None:
                return self._whole(self.pipeline.gradients(shards, batch, False, observe))
            found = local(self._share, self._state_of(shards), batch, self._stateless, observe)
            return self._whole(replace(found, grads=reduce_gradients(self.placement, found.grads, shards.params)))

        specs: Any = WHOLE, self.placement.specs, WHOLE, WHOLE, WHOLE
        return self._run(on_device, (), PassResult(*specs), state, batch)

    def first_amaxes(self, local: Callable, state: TrainState, batch: Any) -> tuple[jax.Array, "MeshPass"]:
        """The amaxes of all devices, where every tensor is scaled by its own; and this, settled by the same trace."""
        if not self.is_settled and not is_called_whole(self.loss_fn):
            return self.settled(state, batch).first_amaxes(local, state, batch)
        cached: list[LayerPath] = []

        def report(program: ClosedJaxpr, trace: LossTrace, *args: Any) -> None:
            shard_trace.check_is_whole(self.placement, program.jaxpr, args, self.has_aux)
            cached.extend(trace.cached)

        loss = self._share if self.is_settled else reporting(self._share, self.has_aux, report)

        def on_device(shards: TrainState, batch: Any) -> jax.Array:
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
        self, microbatches: int, state: TrainState, pending: PendingStep, microbatch: Any, is_first: jax.Array
    ) -> PendingStep:
        """One of so many microbatches added to `pending`, whose sums are shards like the params. Weights that it has
        are kept until it begins anew.
        """
        parallel, share = self.placement.parallel, 1 / microbatches

        def on_device(shards, microbatch, pending, is_first):
            pending = replace(pending, cache=jax.tree.map(lambda x: x[0], pending.cache))
            cast, agree = partial(self._own_weights, shards), partial(on_any_device, parallel)
            pending = begin_if_needed(shards, pending, is_first, cast, (), agree)
            own = self._own_state(shards, pending.cache or None)
            found = take_gradients(self._share)(own.variables, microbatch)
            gradients = jax.tree.map(partial(share_of, share), found.grads)
            gradients = reduce_gradients(self.placement, gradients, pending.gradients)
            return replace(
                pending,
                count=pending.count + 1,
                loss=add_share(pending.loss, share, whole_loss(parallel, found.loss)),
                gradients=jax.tree.map(jnp.add, pending.gradients, gradients),
                amaxes=jnp.maximum(pending.amaxes, whole_amaxes(parallel, found.amaxes)),
                cache=jax.tree.map(lambda x: x[None], pending.cache),
            )

        places: Any = WHOLE, WHOLE, WHOLE, self.placement.specs, WHOLE, self._each
        specs = PendingStep(*places)
        return self._run(on_device, (specs, WHOLE), specs, state, microbatch, pending, is_first)

    @property
    def shared(self) -> dict[LayerPath, Recipe]:
        """The GEMMs whose weights in FP8 `add_microbatch` keeps for the next one: those that are gathered in FP8, or,
        where `fsdp` splits none, all.
        """
        places = self.placement.by_path
        whole = {
            gemm: recipe
            for gemm, recipe in self.gemms.items()
            if all(places[kernel].fsdp_dim is None for kernel in kernel_paths(gemm))
        }
        return self.in_fp8 or whole

    def shapes_of_weights(self, state: TrainState, batch: Any) -> dict:
        """Shapes and places of the weights in FP8 as `add_microbatch` keeps them. They are each device's own: the parts
        are stacked along a first dim that all axes split.
        """

        def on_device(shards, _):
            return jax.tree.map(lambda x: x[None], self._own_weights(shards))

        shapes = jax.eval_shape(lambda *args: self._run(on_device, (), self._each, *args), state, batch)
        each = NamedSharding(self.placement.parallel.mesh, self._each)
        return placed_shapes(shapes, jax.tree.map(lambda _: each, shapes))

    def _run(self, on_device, specs, out_specs, state, batch, *others) -> Any:
        """`on_device(shards, batch, *others)` on every device; `specs` are those of the others."""
        parallel = self.placement.parallel

        def run(step, params, fp8, cache, collections, batch, *others):
            with self.placement.shards.active():
                return on_device(TrainState(step, params, fp8, None, cache, collections), batch, *others)

        batch_specs = jax.tree.map(lambda x: parallel.batch_spec if jnp.ndim(x) else WHOLE, batch)
        in_specs = WHOLE, self.placement.specs, WHOLE, WHOLE, WHOLE, batch_specs, *specs
        on_all = jax.shard_map(run, mesh=parallel.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        batch = put(batch, jax.tree.map(partial(NamedSharding, parallel.mesh), batch_specs))
        state = self.constrain(replace(state, opt_state=None))
        return on_all(state.step, state.params, state.fp8, state.cache, state.collections, batch, *others)

    @property
    def _each(self) -> PartitionSpec:
        """Of arrays that are each device's own."""
        return PartitionSpec(self.placement.parallel.mesh.axis_names)

    def constrain(self, state: TrainState) -> TrainState:
        """The state where it belongs."""
        return put(state, placed_state(self.placement, state))

    def _whole(self, own: PassResult) -> PassResult:
        """The loss and aux of all devices, and their amaxes and measurements, from each one's."""
        parallel = self.placement.parallel
        maxima = whole_amaxes(parallel, jnp.concatenate([own.amaxes, own.measured]))
        amaxes, measured = jnp.split(maxima, [own.amaxes.size])
        aux = joined_devices(own.aux, summed_axes(parallel)) if self.has_aux else None
        return PassResult(whole_loss(parallel, own.loss), own.grads, amaxes, measured, aux)

    @property
    def _stateless(self) -> list[LayerPath]:
        """The GEMMs of which no state says that they are in FP8."""
        return [] if self.recipe is None or self.recipe.has_state else [*self.gemms]

    @property
    def _share(self) -> Callable:
        """The loss whose value is the device's share of the mean over all parts."""
        loss_fn, parts = self.loss_fn, self.placement.parallel.batch_parts
        if parts == 1:
            return loss_fn

        def share(function, remedy):
            def run(*args):
                out = function(*args)
                check_loss(out, self.has_aux, remedy)
                return (out[0] / parts, out[1]) if self.has_aux else out / parts

            return run

        if isinstance(loss_fn, LayeredLoss):
            return replace(loss_fn, last=share(loss_fn.last, ALONE), whole=share(loss_fn, ALONE))
        return share(loss_fn, ALONE_OR_PAIR)

    def _state_of(self, shards: TrainState, from_current: bool = False) -> Callable[[], TrainState]:
        """What a device computes with, made once or whenever it is asked for."""
        state_of = partial(self._own_state, shards, from_current=from_current)
        if not self.once:
            return state_of
        made = state_of()
        return lambda: made

    def _own_state(self, shards: TrainState, cache: Any = None, from_current: bool = False) -> TrainState:
        """What a device computes with, by weights that it has from before, or by new ones."""
        if cache is None:
            cache = self._cast(self.in_fp8, shards, from_current) if self.in_fp8 else shards.cache
        not_gathered = [kernel for gemm in self.in_fp8 for kernel in kernel_paths(gemm)]
        return replace(shards, params=gather_params(self.placement, shards.params, not_gathered), cache=cache)

    def _own_weights(self, shards: TrainState) -> dict:
        """The weights in FP8 of `shared`."""
        return with_version(self._cast(self.shared, shards), shards.params)

    def _cast(self, gemms: Mapping[LayerPath, Recipe], shards: TrainState, from_current: bool = False) -> dict:
        """Weights in FP8, cast where they lie and gathered."""
        places, scales = self.placement.by_path, {} if from_current else shards.fp8
        kernels = {gemm: [places[kernel] for kernel in kernel_paths(gemm)] for gemm in gemms}
        return cast_gemms(
            shards.params, scales, gemms, {gemm: partial(gather_weight, of) for gemm, of in kernels.items()}
        )


def _place(parallel: Parallelism, state: TrainState, trace: LossTrace) -> Placement:
    placement = place_params(parallel, state.params, trace.declared)
    if parallel.sequence_parallel:
        check_sequence(trace.gemms.values())
        shard_trace.check_rows_are_split(trace, placement)
    if state.cache and placement.splits_params:
        raise ValueError(
            "a state that carries a weight cache must have whole params on every device, "
            f"got a step on {describe_mesh(parallel.mesh)}; leave fp8_cache out of the variables: "
            "the step casts each shard once, and gathers it in FP8"
        )
    return placement


def shapes_of_pending(parallel: Parallelism, state: TrainState) -> Any:
    """Shapes and places of what `add_microbatch` adds to, but for weights: sums lie where the params do."""
    whole = NamedSharding(parallel.mesh, WHOLE)
    numbers = jnp.int32(0), jnp.int32(0), jnp.float32(0), jax.eval_shape(no_amaxes, state.fp8)
    step, count, loss, amaxes = placed_shapes(numbers, (whole,) * 4)
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), state.params)
    return PendingStep(step, count, loss, sums, amaxes, {})
