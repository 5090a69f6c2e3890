"""The programs of a step, before `TrainStep` jits them.

    state, batch ─gradients→ loss, gradients, amaxes ─update→ state, metrics

The first part runs on one device, or inside a `shard_map` on every device of a mesh (distributed/mesh_pass.py). The
second is written for whole arrays, so that every Optax transform is right on a mesh, too: the compiler splits it, which
is cheap because it computes element by element.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.reach import reached_rows
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import declared_shardings
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.distributed.local_pass import LocalPass
from jax_fp8.distributed.mesh_pass import MeshPass
from jax_fp8.distributed.microbatches import (
    PendingStep,
    add_microbatch,
    begin,
    begin_if_needed,
    check_pending,
    is_complete,
    of_no_state,
    shapes_of_pending,
)
from jax_fp8.distributed.pipeline_checks import check_has_no_collections
from jax_fp8.grads.gradients import with_kernels
from jax_fp8.grads.loss_aux import Aux, check_has_no_aux, check_shapes_of_parts
from jax_fp8.grads.loss_trace import LossTrace, checked, reporting, shapes_of_part
from jax_fp8.grads.tape import PassResult, added_by_gemms
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.placement import Placement, place_params, put, zeros_like
from jax_fp8.state.checks import (
    check_batch,
    check_is,
    check_kept_types,
    check_on_mesh,
    check_opt_state,
    check_state,
)
from jax_fp8.state.train_state import STATE_REMEDY, TrainState, placed_state
from jax_fp8.state.weight_cache import cached_gemms, cast_listed, renewed
from jax_fp8.train.diagnostics import Diagnostics, Layout, Observations, observe
from jax_fp8.train.optimizer_step import OptimizerStep, metrics_of
from jax_fp8.train.rngs import drawn, drawn_next, drawn_whole
from jax_fp8.train.warming import Warmed, first_scales, rows_of_all_stages


@dataclass(frozen=True, repr=False)
class Programs:
    """The functions behind a `TrainStep`; fields as in `make_train_step`. `parallel` is None on one device, and where
    the compiler alone splits the program, by the shardings of its arguments.
    """

    loss_fn: Callable
    optimizer: optax.GradientTransformationExtraArgs
    recipe: Recipe | None
    microbatches: int
    cache_weights: bool
    parallel: Parallelism | None = None
    has_aux: bool = False
    traces: dict[str, LossTrace] = field(default_factory=dict, compare=False)  # by shapes, on one device
    meshes: dict[str, MeshPass] = field(default_factory=dict, compare=False)  # by shapes; each holds a trace
    placements: dict[str, Placement] = field(default_factory=dict, compare=False)  # by shapes of params

    def create(self, init_fn: Callable, *args: PyTree) -> tuple[ClosedJaxpr, TrainState, TrainState | None]:
        """The program that makes the first state of `init_fn(*args)`; its shapes; its shardings, None on one device."""

        def make(*args: PyTree) -> TrainState:
            return TrainState.create(variables=init_fn(*args), tx=self.optimizer)

        with declared_shardings() as declared:
            program, shapes = jax.make_jaxpr(make, return_shape=True)(*args)
        assert isinstance(shapes, TrainState), "as `make` returns"
        if self.parallel is None:
            return program, shapes, None
        placement = place_params(self.parallel, shapes.params, declared, shapes.collections.get(FROZEN, {}))
        self.placements[_key(shapes.params)] = placement
        if self.parallel.stages > 1:
            check_has_no_collections(shapes)
        return program, shapes, placed_state(placement, shapes)

    def step(self, state: TrainState, batch: Batch, zeros: dict[str, PyTree]) -> tuple[TrainState, dict[str, PyTree]]:
        """A step. It adds its metrics to `zeros`, whose names say which metrics it computes (train/cuda_graph.py)."""
        batch = drawn_whole(self.loss_fn, state, batch, self.microbatches)
        state, result, diagnostics = self._pass(state, batch, "diagnostics" in zeros)
        aux = result.aux if self.has_aux else Aux({}, None)
        passed = result.loss, result.grads, result.amaxes
        new, metrics = self._update(state, *passed, zeros.get("skip_above"), aux.collections)
        if self.parallel is not None:
            new = self.mesh_pass(state, batch, self.microbatches).constrain(new)
        metrics = jax.tree.map(jnp.add, metrics | diagnostics, zeros)
        return new, metrics | ({"aux": aux.rest} if self.has_aux else {})

    def diagnose(self, state: TrainState, batch: Batch) -> Diagnostics:
        """The diagnostics of a step from this state, which is not taken."""
        return self._pass(state, drawn_whole(self.loss_fn, state, batch, self.microbatches), True)[2]["diagnostics"]

    def no_diagnostics(self, state: TrainState, batch: Batch) -> Diagnostics:
        """Diagnostics of zeros, on the host."""
        layout = Layout.for_observations(self.observed(state, drawn(self.loss_fn, state, batch)), state.params)
        zeros: PyTree = np.zeros(layout.size, np.float32)
        return Diagnostics(zeros, layout)

    def observed(self, state: TrainState, batch: Batch) -> Observations:
        """The GEMMs whose tensors are measured, in program order."""
        if self.parallel is not None:
            gemms = self.mesh_pass(state, batch, self.microbatches).gemms
        else:
            gemms = self._trace_of_part(state, batch).gemms_of(_paths(state.params), state.fp8)
        return observe(gemms, state.params)

    def _pass(
        self, state: TrainState, batch: Batch, diagnoses: bool
    ) -> tuple[TrainState, PassResult, dict[str, Diagnostics]]:
        """The state, with a weight cache of its own params; the pass over the batch; and diagnostics, if asked for."""
        self._check(state, batch, self.microbatches)
        state = _with_its_cache(state, self.recipe)
        if self.recipe is not None and (self.microbatches > 1 or state.cache):
            self._trace_of_part(state, batch).check_kernels_are_params()
        parts = self.microbatches * (1 if self.parallel is None else self.parallel.batch_parts)
        if self.has_aux and parts > 1:
            part_trace, whole_trace = self._trace(state, shapes_of_part(batch, parts)), self._trace(state, batch)
            check_shapes_of_parts(part_trace.out, whole_trace.out)
        observed = self.observed(state, batch) if diagnoses else ()
        measurements = [observation.measurement for observation in observed]
        if self.parallel is None:
            gemms = self._gemms(state, batch)
            result = self._local.gradients(self.loss_fn, lambda: state, batch, gemms, measurements)
        else:
            mesh = self._settled(state, batch, self.microbatches)
            result = mesh.gradients(self._local.gradients, state, batch, measurements)
        if not diagnoses:
            return state, result, {}
        diagnostics = Diagnostics.from_step(observed, result.measured, state.params, state.fp8, result.grads)
        return state, result, {"diagnostics": diagnostics}

    def warm(self, state: TrainState, batch: Batch) -> tuple[TrainState, Warmed]:
        """The state with first scales where it had none, and a report of the warm pass (train/warming.py)."""
        batch = drawn_whole(self.loss_fn, state, batch, self.microbatches)
        self._check(state, batch, self.microbatches)
        first_amaxes = self._local.first_amaxes
        with reached_rows() as reached:
            if self.parallel is None:
                amaxes = first_amaxes(self._reporting(state, batch), lambda: state, batch, [])
            else:
                mesh = self.mesh_pass(state, batch, self.microbatches)
                amaxes, settled = mesh.first_amaxes(first_amaxes, state, batch)
                self.meshes[_key((state.variables, batch))] = settled
        if self.parallel is not None and self.parallel.stages > 1:
            reached = rows_of_all_stages(reached, self.loss_fn.layers)
        fp8, warmed = first_scales(state.fp8, amaxes, self.recipe, reached)
        return state.replace(fp8=fp8), warmed

    def mesh_pass(self, state: TrainState, batch: Batch, microbatches: int) -> MeshPass:
        """The pass of these shapes over the mesh, made once; `microbatches` are those of the batch."""
        assert self.parallel is not None, "there is a mesh"
        self.parallel.check_rows(batch, microbatches)
        key = _key((state.variables, batch))
        if key not in self.meshes:
            once = self.cache_weights or self.microbatches == 1
            trace = self._trace(state, batch) if self.parallel.stages == 1 else None
            self.meshes[key] = MeshPass.from_state(
                self.parallel, self.loss_fn, self.recipe, once, state, batch, microbatches, self.has_aux, trace
            )
            self.placements[_key(state.params)] = self.meshes[key].placement
        return self.meshes[key]

    def _settled(self, state: TrainState, batch: Batch, microbatches: int) -> MeshPass:
        """The same pass, after the loss was also traced as each device computes it."""
        mesh = self.mesh_pass(state, batch, microbatches).settled(state, batch)
        self.meshes[_key((state.variables, batch))] = mesh
        return mesh

    def _trace(self, state: TrainState, batch: Batch) -> LossTrace:
        """The trace of the loss, made once for each set of shapes."""
        key = _key((state.variables, batch))
        if key not in self.traces:
            self.traces[key] = LossTrace.from_function(checked(self.loss_fn, self.has_aux), state.variables, batch)
        return self.traces[key]

    def _trace_of_part(self, state: TrainState, batch: Batch) -> LossTrace:
        """The trace of the loss with a microbatch; on a mesh with the whole batch, for which there is a trace."""
        if self.parallel is not None:
            return self.mesh_pass(state, batch, self.microbatches).trace
        return self._trace(state, shapes_of_part(batch, self.microbatches))

    def _reporting(self, state: TrainState, batch: Batch) -> Callable:
        """The loss, whose first trace in a pass is kept: so it is not traced a second time for `_trace`."""
        key = _key((state.variables, shapes_of_part(batch, self.microbatches)))
        return reporting(self.loss_fn, self.has_aux, lambda _, trace, *args: self.traces.setdefault(key, trace))

    def start(self, state: TrainState) -> PendingStep:
        check_has_no_aux(self.has_aux)
        self._check(state)
        return begin(state, self.recipe, self.cache_weights)

    def start_on_mesh(self, state: TrainState) -> PendingStep:
        """A `PendingStep` from the host, without weights: only a microbatch tells which are in FP8. Its step count is
        that of no state, so that the first microbatch begins anew.
        """
        assert self.parallel is not None, "there is a mesh"
        self.parallel.check_has_no_stages("start")
        check_has_no_aux(self.has_aux)
        self._check(state)
        check_on_mesh(state, self.parallel.mesh)
        return dataclasses.replace(zeros_like(shapes_of_pending(self.parallel, state)), step=of_no_state(state))

    def with_weights(self, state: TrainState, pending: PendingStep, microbatch: Batch) -> PendingStep:
        """The result of `start_on_mesh`, with memory for the FP8 weights that microbatches like this one share."""
        if pending.cache or not self.cache_weights or self.recipe is None:
            return pending
        without_cache = dataclasses.replace(state, cache={})
        microbatch = drawn(self.loss_fn, state, microbatch)
        mesh = self._settled(without_cache, microbatch, 1)
        if not mesh.shared:
            return pending
        return dataclasses.replace(pending, cache=zeros_like(mesh.shapes_of_weights(without_cache, microbatch)))

    def accumulate(
        self, state: TrainState, pending: PendingStep, microbatch: Batch, is_first_microbatch: jax.Array
    ) -> PendingStep:
        check_has_no_aux(self.has_aux)
        self._check(state, microbatch)
        check_pending(pending, state)
        microbatch = drawn_next(self.loss_fn, state, pending, microbatch, is_first_microbatch)
        # A cache in the state may be stale. The state is not donated, so to renew the cache here would copy it.
        without_cache = dataclasses.replace(state, cache={})
        if self.parallel is not None:
            self.parallel.check_has_no_stages("accumulate_step")
            mesh = self._settled(without_cache, microbatch, 1)
            mesh.trace.check_kernels_are_params()
            return mesh.add_microbatch(self.microbatches, without_cache, pending, microbatch, is_first_microbatch)
        self._trace(without_cache, microbatch).check_kernels_are_params()
        gemms = cached_gemms(pending.cache)
        by_gemm = added_by_gemms(state.fp8, pending.gradients, gemms)

        def cast() -> dict:
            assert self.recipe is not None, "bfloat16 has no weights in FP8"
            return cast_listed(state.variables, self.recipe, gemms)

        pending = begin_if_needed(state, pending, is_first_microbatch, cast, by_gemm)
        return add_microbatch(self.loss_fn, self.microbatches, without_cache, pending, microbatch, gemms)[0]

    def apply(self, state: TrainState, pending: PendingStep) -> tuple[TrainState, PendingStep, dict[str, jax.Array]]:
        self._check(state)
        check_pending(pending, state)
        complete = is_complete(state, pending, self.microbatches)
        constrain = self._constrain(state)

        def update(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
            updated, metrics = self._update(state, pending.loss, pending.gradients, pending.amaxes)
            check_kept_types(state, updated)
            return constrain(updated), metrics

        def keep(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
            return state, metrics_of(jnp.float32(jnp.nan), jnp.zeros(2, jnp.int32))

        # On an Auto mesh XLA replicates the operands and results of a conditional, unless constraints outside of it say
        # otherwise.
        new_state, metrics = lax.cond(complete, update, keep, constrain(state))
        new_state = constrain(new_state)
        metrics["microbatches"] = pending.count
        return new_state, dataclasses.replace(pending, step=of_no_state(state), count=jnp.int32(0)), metrics

    def _constrain(self, state: TrainState) -> Callable[[TrainState], TrainState]:
        """A function that constrains a state like this one to its shardings on the mesh."""
        if self.parallel is None:
            return lambda state: state
        placement = self.placements.get(_key(state.params))
        if placement is None:
            raise ValueError(
                "apply_step on a mesh must know the shardings of params, got a state that this step has neither made, "
                "placed, nor accumulated for; call accumulate_step first"
            )
        return lambda state: put(state, placed_state(placement, state))

    def _check(self, state: TrainState, batch: Batch = None, microbatches: int = 1) -> None:
        """Raise unless state, batch, recipe and optimizer fit together."""
        check_is("state", state, TrainState, STATE_REMEDY)
        check_batch(batch, microbatches)
        check_state(state, self.recipe)
        check_opt_state(state.opt_state, self.optimizer, state.params)

    @property
    def _local(self) -> LocalPass:
        return LocalPass(self.recipe, self.microbatches, self.cache_weights, self.has_aux)

    def _gemms(self, state: TrainState, batch: Batch) -> list[LayerPath]:
        """The GEMMs whose weights microbatches share in FP8; [] where the FP8 state names them already."""
        if self.microbatches == 1 or self.recipe is None or self.recipe.has_state:
            return []
        gemms = self._trace_of_part(state, batch).gemms
        return with_kernels([path for path, recipe in gemms.items() if recipe == self.recipe], state.params)

    @property
    def _update(self) -> OptimizerStep:
        return OptimizerStep(self.optimizer, self.recipe)


def _paths(params: PyTree) -> dict[LayerPath, jax.Array]:
    return {names_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _key(tree: PyTree) -> str:
    """The structure of a tree, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return str((structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]))


def _with_its_cache(state: TrainState, recipe: Any) -> TrainState:
    """The state with a weight cache of its own params: a caller may have replaced either of them. A cache without a
    recipe is refused.
    """
    return dataclasses.replace(state, cache=renewed(state.cache, state.variables, recipe))
