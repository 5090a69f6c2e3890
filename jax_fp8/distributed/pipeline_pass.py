"""A pass over the stages of a pipeline, inside the one `shard_map` of a step on a mesh.

    shards of params ─cast, exchange→ the stage's own layers ─a schedule→ sums ─exchange→ gradients of the shards

What a stage computes is in distributed/stage_work.py, in which order in parallel/runner.py, and what moves between
stages beside activations in parallel/stages.py. What comes before and after the layers belongs to all stages: each does
it for some of the microbatches.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import scattered_sum
from jax_fp8.core.state import gemm_states, join_amaxes, map_gemms_with_path, no_amaxes
from jax_fp8.distributed.microbatches import split
from jax_fp8.distributed.stage_work import ChunkWork
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.tape import Measurement, Observed, PassResult, Totals, add_share, nothing_measured
from jax_fp8.kernels.uninitialized import uninitialized
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.mesh import PIPE, TENSOR
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.runner import run_schedule
from jax_fp8.parallel.stages import Stages, gradients_of_layers, own_of, own_param, own_weights
from jax_fp8.parallel.ticks import Ticks, make_ticks
from jax_fp8.parallel.transfers import gather_params, sum_of
from jax_fp8.state.train_state import TrainState

ENTERING = "what enters"  # the last piece of a loss: among its params while it is differentiated


@dataclass(frozen=True)
class PipelinePass:
    """A state on a mesh with stages.

    Args:
      gemms: all in FP8, and the recipes of their layers.
      in_fp8: those whose weights are cast once, where they lie.
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

    def gradients(self, shards: TrainState, batch: Any, from_current: bool, observe: Observed = ()) -> PassResult:
        """On one device: its share of the loss, the gradients of its shards, and the amaxes that it found; what GEMMs
        of its layers have measured, and zeros of others.

        With `from_current` every tensor is scaled by its own amax.
        """
        self._check_are_carried(observe)
        outer = replace(self.placement, places=self._outer(self.placement.places))
        of_all = {"params": gather_params(outer, self._outer(shards.params), ()), "fp8": self._outer(shards.fp8)}
        batch = split(batch, self.microbatches)
        inputs, pull_first = self._first(of_all, batch)
        x = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
        chunks = self._chunks(shards, from_current, x, observe)
        nothing = PassResult(jnp.float32(0), _zeros(of_all["params"]), no_amaxes(of_all["fp8"]), nothing_measured(()))
        dx, totals, of_losses = run_schedule(
            self.ticks, chunks, partial(self._loss, of_all, batch, from_current), inputs, nothing, uninitialized
        )
        sums = jax.tree.map(self._add, of_losses.grads, pull_first(dx))
        gradients = self._gradients_of_layers(shards.params, totals)
        gradients |= map_with_names(lambda names, total: self._wired(total, sum_of, names), sums)
        params, tree = jax.tree.flatten(shards.params)  # whose containers need not be dicts
        leaves = zip(jax.tree.leaves(gradients), params, strict=True)
        gradients = tree.unflatten([gradient.astype(param.dtype) for gradient, param in leaves])
        amaxes = self._amaxes(shards.fp8, totals, of_all["fp8"], of_losses.amaxes)
        measured = join_amaxes([self._measured(of, totals) for of in observe])
        return PassResult(of_losses.loss, gradients, amaxes, measured)

    def _outer(self, tree: Mapping) -> dict:
        """What belongs to no layer."""
        return {name: entry for name, entry in tree.items() if name not in self.loss.layers}

    def _first(self, of_all, batch) -> tuple[jax.Array, Callable]:
        """What enters the first layer, of all microbatches; and the gradient of the params by that of all of these, in
        float32. What comes before the layers is computed again for it, as far as it is needed.
        """
        groups = -(-self.microbatches // self.placement.parallel.stages)
        numbers = jnp.minimum(lax.axis_index(PIPE) * groups + jnp.arange(groups), self.microbatches - 1)
        own = jax.tree.map(lambda leaf: leaf[numbers], batch)

        def first(params, microbatch):
            return self.loss.first({**of_all, "params": params}, microbatch)

        def add(sums, of_one):
            microbatch, dx = of_one
            (gradients,) = jax.vjp(lambda params: first(params, microbatch), of_all["params"])[1](dx)
            return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, gradients), None

        def pull_back(dx):
            behind = len(dx) - self.microbatches  # where the last group is not whole: there is still what entered
            dx = jnp.pad(dx[: self.microbatches], [(0, behind), *[(0, 0)] * (dx.ndim - 1)]) if behind else dx
            own_dx = scattered_sum(dx, PIPE, 0)
            return lax.scan(add, _zeros(of_all["params"]), (own, own_dx))[0]

        x = lax.map(partial(first, of_all["params"]), own)
        return lax.all_gather(x, PIPE, axis=0, tiled=True), pull_back

    def _add(self, total: jax.Array, of_one: jax.Array) -> jax.Array:
        """A sum over microbatches, and one more."""
        return add_share(total, 1 / self.microbatches, of_one)

    def _loss(
        self, of_all: Mapping, batch: Any, from_current: bool, number: jax.Array, y: jax.Array, totals: PassResult
    ) -> tuple[jax.Array, PassResult]:
        """The loss of a microbatch, from what leaves the last layer: as the runner takes it."""
        parts, is_one = self.placement.parallel.batch_parts, number < self.microbatches

        def last(variables, microbatch):
            params = dict(variables["params"])
            x = params.pop(ENTERING)
            loss = self.loss.last({**variables, "params": params}, x, microbatch)
            return loss if parts == 1 else loss / parts

        variables = {**of_all, "params": {**of_all["params"], ENTERING: y}}
        microbatch = jax.tree.map(lambda leaf: leaf[jnp.minimum(number, self.microbatches - 1)], batch)
        found = take_gradients(last, from_current=from_current)(variables, microbatch)
        dy = found.grads.pop(ENTERING)

        def add(total: jax.Array, new: jax.Array) -> jax.Array:  # what no microbatch has left may be anything, also NaN
            return jnp.where(is_one, self._add(total, new), total)

        amaxes = jnp.maximum(totals.amaxes, jnp.where(is_one, found.amaxes, 0))
        sums = jax.tree.map(add, totals.grads, found.grads)
        return dy, replace(totals, loss=add(totals.loss, found.loss), grads=sums, amaxes=amaxes)

    def _positions(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Chunk, number in it, and the layer of each stage that has this number there."""
        for chunk in range(self.stages.chunks):
            for number in range(self.stages.chunk_size):
                yield chunk, self.stages.at(chunk, number)

    def _chunks(self, shards: TrainState, from_current: bool, x: Any, observe: Observed) -> list[ChunkWork]:
        """The stage's own layers. They have the names of those of the first stage."""
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
        found, traced = [], {}
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
            found.append(work)
        return found

    def _own_params(self, of_stages, name) -> Any:
        """Params of the stage's own layer; NaN where its weights in FP8 are read instead."""
        in_fp8 = {kernel for gemm in self.in_fp8 for kernel in kernel_paths(gemm)}
        parallel, places = self.placement.parallel, self.placement.by_path

        def own(names, *parts):
            place = places[(name, *names)]
            if (name, *names) not in in_fp8:
                return own_param(parts, place)
            return jnp.full(place.shape_without_fsdp(parallel.size(TENSOR)), jnp.nan, parts[0].dtype)

        return map_with_names(own, *of_stages)

    def _weights(self, shards, from_current) -> dict[LayerPath, Any]:
        """In FP8, of the stage's own layers, by the names of those of the first stage."""
        of_layers = {gemm: recipe for gemm, recipe in self.in_fp8.items() if gemm[0] in self.loss.layers}
        with self.placement.shards_of_weights.active():
            cast = cast_gemms(shards.params, {} if from_current else shards.fp8, of_layers)
        places = self.placement.by_path
        found = {}
        for _, layers in self._positions():
            for gemm in of_layers:
                if gemm[0] == layers[0]:
                    parts = [at_path(cast, (layer, *gemm[1:]))["kernel"] for layer in layers]
                    found[gemm] = parts, [places[kernel] for kernel in kernel_paths(gemm)]
        own = own_weights([parts for parts, _ in found.values()], [of for _, of in found.values()])
        return dict(zip(found, own, strict=True))

    def _gradients_of_layers(self, params, totals: list[Totals]) -> dict:
        """Of this device's shards of all layers."""
        found: dict[str, Any] = {}
        for chunk, layers in self._positions():
            sums = totals[chunk].sums[layers[0]]
            each = map_with_names(
                lambda names, total, name=layers[0]: self._wired(total, gradients_of_layers, (name, *names)), sums
            )
            for stage, layer in enumerate(layers):
                found[layer] = jax.tree.map(lambda _, of_stages, stage=stage: of_stages[stage], sums, each)
        return found

    def _wired(self, total, reduce, names) -> Any:
        """A sum of gradients, in the dtype in which it is sent, as `reduce(parallel, total, place)` leaves it."""
        parallel = self.placement.parallel
        wire = parallel.gradient_dtype if total.ndim > 1 and parallel.gradient_dtype is not None else jnp.float32
        return reduce(parallel, total.astype(wire), self.placement.by_path[names])

    def _amaxes(self, fp8_state, totals: list[Totals], outer_state, outer) -> jax.Array:
        """f32[rows] of all GEMMs; zeros where other stages have them."""
        sizes = [gemm["scale"].size for gemm in gemm_states(outer_state)]
        of_outer = iter(jnp.split(outer, np.cumsum(sizes, dtype=int)[:-1]))
        found = []

        def collect(path, _):
            if path[0] not in self._home:
                found.append(next(of_outer))
                return
            chunk, stage, gemm = self._place_of(path)
            found.append(jnp.where(lax.axis_index(PIPE) == stage, totals[chunk].amaxes[gemm][0], 0))

        map_gemms_with_path(collect, fp8_state)
        return join_amaxes(found)

    def _measured(self, of: Measurement, totals: list[Totals]) -> jax.Array:
        """What this device has measured of a GEMM; zeros where another stage has it, or none."""
        if not self._is_carried(of):
            return jnp.zeros(of.shape, jnp.float32)
        chunk, stage, gemm = self._place_of(of.path)
        return jnp.where(lax.axis_index(PIPE) == stage, totals[chunk].measured[gemm, of.name][0], 0)

    def _is_carried(self, of: Measurement) -> bool:
        return of.path in self.gemms and of.path[0] in self._home

    def _check_are_carried(self, observe: Observed) -> None:
        lost = [of for of in observe if of.is_needed and not self._is_carried(of)]
        if lost:
            raise ValueError(
                "stages of a pipeline carry what is measured of the FP8 GEMMs in its layers, got "
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

    def _place_of(self, gemm: LayerPath) -> tuple[int, int, LayerPath]:
        chunk, stage, name = self._home[gemm[0]]
        return chunk, stage, (name, *gemm[1:])


def _zeros(params) -> Any:
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
