"""The programs of a step, before they are jitted: what happens in them, and in which order.

    state, batch ─gradients→ loss, gradients, amaxes ─update→ state, metrics

The first part runs on one device, or on every device of a mesh (distributed/mesh_pass.py). The second is written for
whole arrays; on a mesh the compiler splits it, for it computes element by element, and any Optax transform is right.
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

from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.reach import reached_rows
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.shards import declared_shardings
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
from jax_fp8.train.warming import first_scales, of_all_stages


@dataclass(frozen=True, repr=False)
class Programs:
    """The functions behind a `TrainStep`; fields as in `make_train_step`; `parallel` is None on one device, and where
    the compiler splits the program by itself.
    """

    loss_fn: Callable
    optimizer: optax.GradientTransformationExtraArgs
    recipe: Recipe | None
    microbatches: int
    cache_weights: bool
    parallel: Parallelism | None = None
    has_aux: bool = False
    traces: dict[str, LossTrace] = field(default_factory=dict, compare=False)  # by shapes, on one device
    meshes: dict[str, MeshPass] = field(default_factory=dict, compare=False)  # by shapes, for each is a trace
    placements: dict[str, Placement] = field(default_factory=dict, compare=False)  # by shapes of params

    def create(self, init_fn: Callable, *args: Any) -> tuple[Any, Any, Any]:
        """The program of a state before the first step, of the variables that `init_fn(*args)` returns; the shapes of
        what it makes; and where these are to be on the mesh, None without one.
        """

        def make(*args):
            return TrainState.create(variables=init_fn(*args), tx=self.optimizer)

        with declared_shardings() as found:
            program, shapes = jax.make_jaxpr(make, return_shape=True)(*args)
        if self.parallel is None:
            return program, shapes, None
        state: Any = shapes
        placement = place_params(self.parallel, state.params, found)
        self.placements[_key(state.params)] = placement
        if self.parallel.stages > 1:
            check_has_no_collections(state)
        return program, shapes, placed_state(placement, state)

    def step(self, state, batch, zeros):
        """A step; `zeros` are what its metrics are added to, and say which there are (train/cuda_graph.py)."""
        batch = drawn_whole(self.loss_fn, state, batch, self.microbatches)
        state, result, found = self._pass(state, batch, "diagnostics" in zeros)
        aux = result.aux if self.has_aux else Aux({}, None)
        passed = result.loss, result.grads, result.amaxes
        new, metrics = self._update(state, *passed, zeros.get("skip_above"), aux.collections)
        if self.parallel is not None:
            new = self.mesh_pass(state, batch, self.microbatches).constrain(new)
        metrics = jax.tree.map(jnp.add, metrics | found, zeros)
        return new, metrics | ({"aux": aux.rest} if self.has_aux else {})

    def diagnose(self, state, batch):
        """What a step would say of its numbers."""
        return self._pass(state, drawn_whole(self.loss_fn, state, batch, self.microbatches), True)[2]["diagnostics"]

    def no_diagnostics(self, state, batch) -> Diagnostics:
        """Zeros, on the host."""
        layout = Layout.of(self.observed(state, drawn(self.loss_fn, state, batch)), state.params)
        nothing: Any = np.zeros(layout.size, np.float32)
        return Diagnostics(nothing, layout)

    def observed(self, state, batch) -> Observations:
        """The GEMMs whose tensors are measured, in program order."""
        if self.parallel is not None:
            gemms = self.mesh_pass(state, batch, self.microbatches).gemms
        else:
            gemms = self._trace_of_part(state, batch).gemms_of(_paths(state.params), state.fp8)
        return observe(gemms, state.params)

    def _pass(self, state, batch, diagnoses: bool) -> tuple[TrainState, PassResult, dict[str, Any]]:
        """The state as it computes, with its own weight cache; its pass; and diagnostics, if any."""
        self._check(state, batch, self.microbatches)
        state = _with_its_cache(state, self.recipe)
        if self.recipe is not None and (self.microbatches > 1 or state.cache):
            self._trace_of_part(state, batch).check_kernels_are_params()
        parts = self.microbatches * (1 if self.parallel is None else self.parallel.batch_parts)
        if self.has_aux and parts > 1:
            of_part, of_whole = self._trace(state, shapes_of_part(batch, parts)), self._trace(state, batch)
            check_shapes_of_parts(of_part.out, of_whole.out)
        observed = self.observed(state, batch) if diagnoses else ()
        measured = [of.measured for of in observed]
        if self.parallel is None:
            result = self._local.gradients(self.loss_fn, lambda: state, batch, self._gemms(state, batch), measured)
        else:
            mesh = self._settled(state, batch, self.microbatches)
            result = mesh.gradients(self._local.gradients, state, batch, measured)
        if not diagnoses:
            return state, result, {}
        found = Diagnostics.of(observed, result.measured, state.params, state.fp8, result.grads)
        return state, result, {"diagnostics": found}

    def warm(self, state, batch):
        """The state with first scales where it has none yet, and what the pass says of it (train/warming.py)."""
        batch = drawn_whole(self.loss_fn, state, batch, self.microbatches)
        self._check(state, batch, self.microbatches)
        find = self._local.first_amaxes
        with reached_rows() as reached:
            if self.parallel is None:
                amaxes = find(self._reporting(state, batch), lambda: state, batch, [])
            else:
                mesh = self.mesh_pass(state, batch, self.microbatches)
                amaxes, settled = mesh.first_amaxes(find, state, batch)
                self.meshes[_key((state.variables, batch))] = settled
        if self.parallel is not None and self.parallel.stages > 1:
            reached = of_all_stages(reached, self.loss_fn.layers)
        fp8, warmed = first_scales(state.fp8, amaxes, self.recipe, reached)
        return state.replace(fp8=fp8), warmed

    def mesh_pass(self, state, batch, microbatches) -> MeshPass:
        """How this state lies on the mesh, and a batch of so many microbatches."""
        assert self.parallel is not None, "there is a mesh"
        self.parallel.check_rows(batch, microbatches)
        key = _key((state.variables, batch))
        if key not in self.meshes:
            once = self.cache_weights or self.microbatches == 1
            options = microbatches, self.has_aux
            trace = self._trace(state, batch) if self.parallel.stages == 1 else None
            self.meshes[key] = MeshPass.from_state(
                self.parallel, self.loss_fn, self.recipe, once, state, batch, *options, trace
            )
            self.placements[_key(state.params)] = self.meshes[key].placement
        return self.meshes[key]

    def _settled(self, state, batch, microbatches) -> MeshPass:
        """The same, of which all is known."""
        mesh = self.mesh_pass(state, batch, microbatches).settled(state, batch)
        self.meshes[_key((state.variables, batch))] = mesh
        return mesh

    def _trace(self, state, batch) -> LossTrace:
        """What the loss says of its layers; it is traced once for each shape of what it takes."""
        key = _key((state.variables, batch))
        if key not in self.traces:
            self.traces[key] = LossTrace.of(checked(self.loss_fn, self.has_aux), state.variables, batch)
        return self.traces[key]

    def _trace_of_part(self, state, batch) -> LossTrace:
        """The same of a microbatch; on a mesh, where the loss was traced with the whole batch, of this."""
        if self.parallel is not None:
            return self.mesh_pass(state, batch, self.microbatches).trace
        return self._trace(state, shapes_of_part(batch, self.microbatches))

    def _reporting(self, state, batch) -> Callable:
        """The loss, of which the first trace is kept."""
        key = _key((state.variables, shapes_of_part(batch, self.microbatches)))
        return reporting(self.loss_fn, self.has_aux, lambda _, trace, *args: self.traces.setdefault(key, trace))

    def start(self, state):
        check_has_no_aux(self.has_aux)
        self._check(state)
        return begin(state, self.recipe, self.cache_weights)

    def start_on_mesh(self, state) -> PendingStep:
        """Made by the host, and without weights: only a microbatch tells which are in FP8. It belongs to the state
        before this one, so that the first microbatch begins anew.
        """
        assert self.parallel is not None, "there is a mesh"
        self.parallel.check_has_no_stages("start")
        check_has_no_aux(self.has_aux)
        self._check(state)
        check_on_mesh(state, self.parallel.mesh)
        return dataclasses.replace(zeros_like(shapes_of_pending(self.parallel, state)), step=of_no_state(state))

    def with_weights(self, state, pending, microbatch) -> PendingStep:
        """What `start_on_mesh` made, with room for the weights that microbatches like this one share."""
        if pending.cache or not self.cache_weights or self.recipe is None:
            return pending
        without_cache = dataclasses.replace(state, cache={})
        microbatch = drawn(self.loss_fn, state, microbatch)
        mesh = self._settled(without_cache, microbatch, 1)
        if not mesh.shared:
            return pending
        return dataclasses.replace(pending, cache=zeros_like(mesh.shapes_of_weights(without_cache, microbatch)))

    def accumulate(self, state, pending, microbatch, is_first_microbatch):
        check_has_no_aux(self.has_aux)
        self._check(state, microbatch)
        check_pending(pending, state)
        microbatch = drawn_next(self.loss_fn, state, pending, microbatch, is_first_microbatch)
        # A cache in the state may be stale, and the state is not donated: mending it here would copy it.
        without_cache = dataclasses.replace(state, cache={})
        if self.parallel is not None:
            self.parallel.check_has_no_stages("accumulate_step")
            mesh = self._settled(without_cache, microbatch, 1)
            mesh.trace.check_kernels_are_params()
            return mesh.add_microbatch(self.microbatches, without_cache, pending, microbatch, is_first_microbatch)
        self._trace(without_cache, microbatch).check_kernels_are_params()
        recipe: Any = self.recipe
        gemms = cached_gemms(pending.cache)
        by_gemm = added_by_gemms(state.fp8, pending.gradients, gemms)
        pending = begin_if_needed(
            state, pending, is_first_microbatch, lambda: cast_listed(state.variables, recipe, gemms), by_gemm
        )
        return add_microbatch(self.loss_fn, self.microbatches, without_cache, pending, microbatch, gemms)[0]

    def apply(self, state, pending):
        self._check(state)
        check_pending(pending, state)
        complete = is_complete(state, pending, self.microbatches)

        constrain = self._constrain(state)

        def update(state):
            updated, metrics = self._update(state, pending.loss, pending.gradients, pending.amaxes)
            check_kept_types(state, updated)
            return constrain(updated), metrics

        def keep(state):
            return state, metrics_of(jnp.float32(jnp.nan), jnp.zeros(2, jnp.int32))

        # What a conditional takes and returns is whole on every device of an Auto mesh, unless it is said outside.
        new_state, metrics = lax.cond(complete, update, keep, constrain(state))
        new_state = constrain(new_state)
        metrics["microbatches"] = pending.count
        return new_state, dataclasses.replace(pending, step=of_no_state(state), count=jnp.int32(0)), metrics

    def _constrain(self, state) -> Callable:
        """Puts a state where it belongs."""
        if self.parallel is None:
            return lambda state: state
        placement = self.placements.get(_key(state.params))
        if placement is None:
            raise ValueError(
                "apply_step on a mesh must know where params lie, got a state that this step has neither made, "
                "placed, nor accumulated for; call accumulate_step first"
            )
        return lambda state: put(state, placed_state(placement, state))

    def _check(self, state, batch=None, microbatches=1):
        """Raise unless all of this belongs together."""
        check_is("state", state, TrainState, STATE_REMEDY)
        check_batch(batch, microbatches)
        check_state(state, self.recipe)
        check_opt_state(state.opt_state, self.optimizer, state.params)

    @property
    def _local(self) -> LocalPass:
        return LocalPass(self.recipe, self.microbatches, self.cache_weights, self.has_aux)

    def _gemms(self, state, batch) -> list:
        """The layers in FP8 where the state does not say, and microbatches share their weights."""
        if self.microbatches == 1 or self.recipe is None or self.recipe.has_state:
            return []
        gemms = self._trace_of_part(state, batch).gemms
        return with_kernels([path for path, recipe in gemms.items() if recipe == self.recipe], state.params)

    @property
    def _update(self) -> OptimizerStep:
        return OptimizerStep(self.optimizer, self.recipe)


def _paths(params) -> dict[LayerPath, Any]:
    return {names_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _key(tree) -> str:
    """Structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return str((structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]))


def _with_its_cache(state, recipe):
    """The state with a cache of its own params: a state may be put together from parts."""
    return dataclasses.replace(state, cache=renewed(state.cache, state.variables, recipe))
