"""A pass over the stages of a pipeline, inside the one `shard_map` of a step on a mesh.

    shards of params ─cast, exchange→ the stage's own layers ─a schedule→ sums ─exchange→ gradients of the shards

distributed/stage_work.py has the units of work of a stage, parallel/runner.py runs them in order and sends activations,
and parallel/stages.py exchanges params and gradients. All stages share the work before and after the layers: each does
it for some of the microbatches.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import scattered_sum
from jax_fp8.core.state import gemm_states, join_amaxes, map_gemms_with_path, no_amaxes
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.distributed.layer_work import LayerWork
from jax_fp8.distributed.microbatches import split
from jax_fp8.distributed.stage_work import ChunkWork
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.tape import Measurement, Observed, PassResult, Totals, add_share, nothing_measured
from jax_fp8.kernels.uninitialized import uninitialized
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.mesh import PIPE, Parallelism
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.runner import run_schedule
from jax_fp8.parallel.stages import Stages, gradients_of_layers, own_of, own_param, own_weights
from jax_fp8.parallel.ticks import Ticks, make_ticks
from jax_fp8.parallel.transfers import gather_params, sum_of
from jax_fp8.state.train_state import TrainState

ENTERING = "what enters"  # the input of the last piece: among the loss's params while its last piece is differentiated

Reduced = TypeVar("Reduced")


@dataclass(frozen=True)
class PipelinePass:
    """How a pass runs on a mesh with stages.

    Args:
      gemms: all GEMMs in FP8, and the recipes of their layers.
      in_fp8: those whose weights are cast once, as shards.
    """

    placement: Placement
    loss: LayeredLoss
    gemms: Mapping[LayerPath, Recipe]
    in_fp8: Mapping[LayerPath, Recipe]
    microbatches: int

    @cached_property
    def stages(self) -> Stages:
        parallel = self.placement.parallel
        return Stages(self.loss.layers, parallel.stages, parallel.num_chunks)

    @cached_property
    def ticks(self) -> Ticks:
        return make_ticks(self.placement.parallel.schedule_of(self.microbatches))

    def gradients(self, shards: TrainState, batch: Batch, from_current: bool, observe: Observed = ()) -> PassResult:
        """The pass on one device: its share of the loss, the gradients of its shards, and the amaxes and measurements
        of the layers of its stage, with zeros for others.

        With `from_current` every tensor is scaled by its own amax.
        """
        self._check_are_carried(observe)
        outer = replace(self.placement, places=self._outer(self.placement.places))
        variables = {"params": gather_params(outer, self._outer(shards.params), ()), "fp8": self._outer(shards.fp8)}
        batch = split(batch, self.microbatches)
        inputs, pull_first = self._first(variables, batch)
        x = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
        chunks = self._chunks(shards, from_current, x, observe)
        no_losses = PassResult(
            jnp.float32(0), _zeros(variables["params"]), no_amaxes(variables["fp8"]), nothing_measured(())
        )
        dx, totals, losses = run_schedule(
            self.ticks, chunks, partial(self._loss, variables, batch, from_current), inputs, no_losses, uninitialized
        )
        sums = jax.tree.map(self._add, losses.grads, pull_first(dx))
        gradients = self._gradients_of_layers(shards.params, totals)
        gradients |= map_with_names(lambda names, total: self._wired(total, sum_of, names), sums)
        params, tree = jax.tree.flatten(shards.params)  # their containers need not be dicts
        leaves = zip(jax.tree.leaves(gradients), params, strict=True)
        gradients = tree.unflatten([gradient.astype(param.dtype) for gradient, param in leaves])
        amaxes = self._amaxes(shards.fp8, totals, variables["fp8"], losses.amaxes)
        measured = join_amaxes([self._measured(measurement, totals) for measurement in observe])
        return PassResult(losses.loss, gradients, amaxes, measured)

    def _outer(self, tree: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The entries that belong to no layer."""
        return {name: entry for name, entry in tree.items() if name not in self.loss.layers}

    def _first(self, variables: Variables, batch: Batch) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
        """The inputs of the first layer, for all microbatches; and a function that takes their gradients to those of
        the params, in float32. It recomputes the part of the loss before the layers, as far as it is needed.
        """
        groups = -(-self.microbatches // self.placement.parallel.stages)
        numbers = jnp.minimum(lax.axis_index(PIPE) * groups + jnp.arange(groups), self.microbatches - 1)
        own = jax.tree.map(lambda leaf: leaf[numbers], batch)

        def first(params: PyTree, microbatch: Batch) -> jax.Array:
            return self.loss.first({**variables, "params": params}, microbatch)

        def add(sums: PyTree, microbatch_and_dx: tuple[Batch, jax.Array]) -> tuple[PyTree, None]:
            microbatch, dx = microbatch_and_dx
            (gradients,) = jax.vjp(lambda params: first(params, microbatch), variables["params"])[1](dx)
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, gradients), None

        def pull_back(dx: jax.Array) -> PyTree:
            missing = len(dx) - self.microbatches  # of the last group: there `dx` still holds inputs
            dx = jnp.pad(dx[: self.microbatches], [(0, missing), *[(0, 0)] * (dx.ndim - 1)]) if missing else dx
            own_dx = scattered_sum(dx, PIPE, 0)
            return lax.scan(add, _zeros(variables["params"]), (own, own_dx))[0]

        x = lax.map(partial(first, variables["params"]), own)
        return lax.all_gather(x, PIPE, axis=0, tiled=True), pull_back

    def _add(self, total: jax.Array, new: jax.Array) -> jax.Array:
        """A sum over microbatches, with the share of one more."""
        return add_share(total, 1 / self.microbatches, new)

    def _loss(
        self,
        outer_variables: Variables,
        batch: Batch,
        from_current: bool,
        number: jax.Array,
        y: jax.Array,
        totals: PassResult,
    ) -> tuple[jax.Array, PassResult]:
        """The loss of a microbatch from the output of the last layer, and its gradient: `loss` of `run_schedule`."""
        parts, is_one = self.placement.parallel.batch_parts, number < self.microbatches

        def last(variables: Variables, microbatch: Batch) -> jax.Array:
            params = dict(variables["params"])
            x = params.pop(ENTERING)
            loss = self.loss.last({**variables, "params": params}, x, microbatch)
            return loss if parts == 1 else loss / parts

        variables = {**outer_variables, "params": {**outer_variables["params"], ENTERING: y}}
        microbatch = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, self.microbatches - 1)], batch)
        result = take_gradients(last, from_current=from_current)(variables, microbatch)
        dy = result.grads.pop(ENTERING)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:  # past the last microbatch `new` may be NaN
            return jnp.where(is_one, self._add(total, new), total)

        amaxes = jnp.maximum(totals.amaxes, jnp.where(is_one, result.amaxes, 0))
        sums = jax.tree.map(add, totals.grads, result.grads)
        return dy, replace(totals, loss=add(totals.loss, result.loss), grads=sums, amaxes=amaxes)

    def _positions(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Each number of a layer in a chunk: the chunk, and the layers of all stages with this number."""
        for chunk in range(self.stages.chunks):
            for number in range(self.stages.chunk_size):
                yield chunk, self.stages.at(chunk, number)

    def _chunks(
        self, shards: TrainState, from_current: bool, x: jax.ShapeDtypeStruct, observe: Observed
    ) -> list[ChunkWork]:
        """The stage's own layers. On every stage they have the names that they have on the first one."""
        variables = [{"params": {}, "fp8": {}, "fp8_cache": {}} for _ in range(self.stages.chunks)]
        weights = self._weights(shards, from_current)
        for chunk, layers in self._positions():
            name = layers[0]
            own = variables[chunk]
            own["params"][name] = self._own_params([shards.params[layer] for layer in layers], name)
            states = [shards.fp8[layer] for layer in layers if layer in shards.fp8]
            if states:
                own["fp8"][name] = jax.tree.map(lambda *of_stages: own_of(of_stages), *states)
        for gemm, weight in weights.items():
            chunk = next(chunk for chunk, layers in self._positions() if layers[0] == gemm[0])
            put_at_path(variables[chunk]["fp8_cache"], gemm, {"kernel": weight})
        works: list[ChunkWork] = []
        traced: dict[Hashable, LayerWork] = {}
        for own in variables:
            gemms = {gemm: recipe for gemm, recipe in self.gemms.items() if gemm[0] in own["params"]}
            collections = {collection: tree for collection, tree in own.items() if tree}
            work = ChunkWork(
                self.loss,
                tuple(own["params"]),
                collections,
                gemms,
                weight=1 / self.microbatches,
                from_current=from_current,
                x=x,
                observe=[measurement for measurement in observe if measurement.path in gemms],
                traced=traced,
            )
            works.append(work)
        return works

    def _own_params(self, params: list[PyTree], name: str) -> PyTree:
        """The params of the stage's own layer, from the shards of the layers of all stages; NaN where GEMMs read
        weights in FP8 instead.
        """
        in_fp8 = {kernel for gemm in self.in_fp8 for kernel in kernel_paths(gemm)}
        parallel, places = self.placement.parallel, self.placement.by_path

        def own(names: LayerPath, *parts: jax.Array) -> jax.Array:
            place = places[(name, *names)]
            if (name, *names) not in in_fp8:
                return own_param(parts, place)
            return jnp.full(place.shape_in_layer(parallel), jnp.nan, parts[0].dtype)

        return map_with_names(own, *params)

    def _weights(self, shards: TrainState, from_current: bool) -> dict[LayerPath, Fp8Pair]:
        """The weights in FP8 of the stage's own layers, by the names of the layers of the first stage."""
        of_layers = {gemm: recipe for gemm, recipe in self.in_fp8.items() if gemm[0] in self.loss.layers}
        with self.placement.shards_of_weights.active():
            cast = cast_gemms(shards.params, {} if from_current else shards.fp8, of_layers)
        places = self.placement.by_path
        parts: dict[LayerPath, list[Fp8Pair]] = {}  # this device's, of the weights of all stages
        for _, layers in self._positions():
            for gemm in of_layers:
                if gemm[0] == layers[0]:
                    parts[gemm] = [at_path(cast, (layer, *gemm[1:]))["kernel"] for layer in layers]
        own = own_weights([*parts.values()], [[places[kernel] for kernel in kernel_paths(gemm)] for gemm in parts])
        return dict(zip(parts, own, strict=True))

    def _gradients_of_layers(self, params: PyTree, totals: list[Totals]) -> dict[str, PyTree]:
        """The gradients of this device's shards of all layers."""
        gradients: dict[str, PyTree] = {}
        for chunk, layers in self._positions():
            sums = totals[chunk].sums[layers[0]]
            each = map_with_names(
                lambda names, total, name=layers[0]: self._wired(total, gradients_of_layers, (name, *names)), sums
            )
            for stage, layer in enumerate(layers):
                gradients[layer] = jax.tree.map(lambda _, of_stages, stage=stage: of_stages[stage], sums, each)
        return gradients

    def _wired(
        self, total: jax.Array, reduce: Callable[[Parallelism, jax.Array, ParamPlace], Reduced], names: LayerPath
    ) -> Reduced:
        """`reduce(parallel, total, place)` of a sum of gradients, in the dtype in which it is sent."""
        parallel = self.placement.parallel
        wire = parallel.gradient_dtype if total.ndim > 1 and parallel.gradient_dtype is not None else jnp.float32
        return reduce(parallel, total.astype(wire), self.placement.by_path[names])

    def _amaxes(
        self, fp8_state: PyTree, totals: list[Totals], outer_state: PyTree, outer_amaxes: jax.Array
    ) -> jax.Array:
        """The amaxes f32[rows] of all GEMMs; zeros for those in layers of other stages."""
        sizes = [gemm["scale"].size for gemm in gemm_states(outer_state)]
        of_outer = iter(jnp.split(outer_amaxes, np.cumsum(sizes, dtype=int)[:-1]))
        amaxes: list[jax.Array] = []

        def collect(path: LayerPath, _: PyTree) -> None:
            if path[0] not in self._home:
                amaxes.append(next(of_outer))
                return
            chunk, stage, gemm = self._locate(path)
            amaxes.append(jnp.where(lax.axis_index(PIPE) == stage, totals[chunk].amaxes[gemm][0], 0))

        map_gemms_with_path(collect, fp8_state)
        return join_amaxes(amaxes)

    def _measured(self, measurement: Measurement, totals: list[Totals]) -> jax.Array:
        """What this device has measured of a GEMM; zeros where the GEMM is in no layer of its stage."""
        if not self._is_carried(measurement):
            return jnp.zeros(measurement.shape, jnp.float32)
        chunk, stage, gemm = self._locate(measurement.path)
        return jnp.where(lax.axis_index(PIPE) == stage, totals[chunk].measured[gemm, measurement.name][0], 0)

    def _is_carried(self, measurement: Measurement) -> bool:
        """Whether stages measure it: of FP8 GEMMs in their layers alone."""
        return measurement.path in self.gemms and measurement.path[0] in self._home

    def _check_are_carried(self, observe: Observed) -> None:
        lost = [measurement for measurement in observe if measurement.is_needed and not self._is_carried(measurement)]
        if lost:
            raise ValueError(
                "stages of a pipeline measure only the FP8 GEMMs in its layers, got "
                f"{lost[0].name} of {'/'.join(lost[0].path)}; do not ask for it, or leave out the axis pipe"
            )

    @cached_property
    def _home(self) -> dict[str, tuple[int, int, str]]:
        """The chunk and the stage of each layer, and its name there."""
        return {
            layer: (chunk, stage, layers[0])
            for chunk, layers in self._positions()
            for stage, layer in enumerate(layers)
        }

    def _locate(self, gemm: LayerPath) -> tuple[int, int, LayerPath]:
        """The chunk and the stage of a GEMM, and its path there."""
        chunk, stage, name = self._home[gemm[0]]
        return chunk, stage, (name, *gemm[1:])


def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
