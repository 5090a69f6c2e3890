"""`GradientTape`: every pass that takes gradients uses it, by `jax.grad`, layer by layer, in a pipeline, or with NNX.

    tape = GradientTape(variables)                                    puts a recorder beside each GEMM's state
    loss_fn(tape.variables, ...), differentiated by params and rows   backward passes write to the recorders' Refs
    tape.read(loss, grads, d_rows)                                    PassResult(loss, grads, amaxes, measured)

`rows` f32[rows] is the vector whose cotangent takes amaxes where Refs cannot be written to. Each function that is
differentiated has it as an argument, and calls `tape.receive(rows)` first.

Backward passes also leave measurements, by maximum like amaxes. A new one takes a `Measurement` in `observe`, and one
line in the backward of an op: `gemm.record.measure(name, numbers)`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.deferral import Deferral
from jax_fp8.core.fp8_gemm import GradientSum, Record
from jax_fp8.core.maxima import sums_are_maxima
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recorder import RECORDER, Cotangents, Recorder, Refs
from jax_fp8.core.state import check_dtypes, join_amaxes, map_gemms_with_path, no_amaxes
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.kernels.vma import vary
from jax_fp8.ops.passes import share_wgrad


@dataclass(frozen=True)
class Measurement:
    """Numbers that backward passes of a layer leave, by maximum over uses, microbatches and devices.

    Args:
      path: the path of the GEMM, or of another module that finds a recorder in its collection.
      name: the name under which the layer writes them, by `Record.measure`.
      shape: the shape of the numbers, float32; the first dim is that of layers, where `nn.scan` stacks them.
      is_needed: whether a pass that cannot carry them fails; otherwise it returns zeros.
    """

    path: LayerPath
    name: str
    shape: tuple[int, ...]
    is_needed: bool = True


Observed: TypeAlias = Sequence[Measurement]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassResult:
    """The result of a pass, or of several passes together.

    Args:
      loss: a scalar.
      grads: like the params; with gradient accumulation the sums, float32.
      amaxes: f32[rows], in the order of `join_amaxes`: for `finish_step` or `stage_joined`.
      measured: f32[size], the measurements one after the other.
      aux: the aux of the loss.
    """

    loss: jax.Array
    grads: PyTree
    amaxes: jax.Array
    measured: jax.Array
    aux: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """The accumulated results of backward passes, with an array for each GEMM.

    Args:
      sums: of gradients, like the params, float32; without gradient accumulation, the gradients.
      amaxes: f32[3] by GEMM, f32[layers, 3] where layers are stacked. In a pipeline they have a first dim of 1.
      measured: f32[*shape] by GEMM and name of the measurement, with the same first dim.
    """

    sums: PyTree
    amaxes: dict[LayerPath, jax.Array]
    measured: dict[tuple[LayerPath, str], jax.Array]

    @classmethod
    def none(cls, variables: Variables, observe: Observed, sums: PyTree, first: tuple[int, ...] = ()) -> "Totals":
        """The totals before the first backward, zeros beside `sums`; `first`: dims in front of the others."""
        amaxes = {path: (*_layers(stacked), 3) for path, stacked in _states(fp8_state_of(variables)).items()}
        measured = {(each.path, each.name): jnp.zeros((*first, *each.shape)) for each in observe}
        return cls(sums, {path: jnp.zeros((*first, *shape)) for path, shape in amaxes.items()}, measured)


class GradientTape:
    """Puts a recorder beside the state of each GEMM, and reads the recorders after a pass.

    Args:
      variables: with "params".
      gemms: GEMMs without state, whose kernels may be among the sums, or whose operands are deferred.
      sums: of gradients, float32, like the params: this pass adds its own to them. None: gradients are returned.
      weight: of this pass's gradients in the sums.
      observe: the measurements that backward passes make.
      defer: by GEMM, where its backward leaves the operands of the wgrad GEMM.
      from_current: scale every tensor by its own amax.
      axes: the mesh axes over which the loss's arguments vary, in a `shard_map` that checks this.
      earlier: the totals of a pipeline stage's earlier units of work, in place of `sums`. Then only backward passes
        record: a forward without a backward records nothing.
    """

    def __init__(
        self,
        variables: Variables,
        *,
        gemms: Collection[LayerPath] = (),
        sums: PyTree = None,
        weight: float = 1.0,
        observe: Observed = (),
        defer: Mapping[LayerPath, Deferral] = MappingProxyType({}),
        from_current: bool = False,
        axes: frozenset[str] = frozenset(),
        earlier: Totals | None = None,
    ):
        self._plain, self._state, self._axes = variables, fp8_state_of(variables), axes
        check_dtypes(self._state)
        self._weight, self._before = weight, earlier or Totals.none(variables, observe, sums)
        added = () if self._before.sums is None else added_by_gemms(self._state, self._before.sums, gemms)
        self.sums = {path: jax.new_ref(at_path(self._before.sums, path)) for path in added}
        self._amaxes = {path: jax.new_ref(vary(start, axes)) for path, start in self._before.amaxes.items()}
        self._measured = {key: jax.new_ref(vary(start, axes)) for key, start in self._before.measured.items()}
        self._cotangents, self._recorders, first_row = Cotangents(), {}, 0
        for path in dict.fromkeys([*self._amaxes, *gemms, *(each.path for each in observe)]):
            has_state, stacked = path in self._amaxes, self._stacked(path)
            record = self._record(path, defer.get(path), path if from_current and has_state else None)
            slot = jnp.arange(math.prod(stacked), dtype=jnp.int32).reshape(stacked) if stacked else None
            if earlier is not None and (has_state or record.measured):
                slot = jnp.int32(0)  # with a slot, only the backward records: see `Fp8Gemm.record_forward`
            if has_state or record.measured or record.gradient or record.deferral:
                refs = Refs(
                    record=record,
                    from_current=from_current or not has_state,
                    cotangents=self._cotangents,
                    first_row=first_row,
                    needed=tuple(each.name for each in observe if each.path == path and each.is_needed),
                )
                self._recorders[path] = Recorder(refs, slot)
            first_row += 3 * math.prod(stacked) if has_state else 0

    def _record(self, path: LayerPath, deferral: Deferral | None, staged: LayerPath | None) -> Record:
        """The Refs of a GEMM; `staged`: its path, where `reached_rows` is to know which rows are staged."""
        measured = {name: ref for (gemm, name), ref in self._measured.items() if gemm == path}
        sums = tuple(self.sums[kernel] for kernel in kernel_paths(path) if kernel in self.sums)
        gradient = GradientSum(sums, self._weight) if sums else None
        return Record(self._amaxes.get(path), gradient=gradient, deferral=deferral, measured=measured, path=staged)

    @property
    def variables(self) -> dict[str, PyTree]:
        """The variables with recorders, with which to call the loss."""
        return self.recorded(self._plain)

    @property
    def rows(self) -> jax.Array:
        """f32[rows] of zeros, to differentiate by."""
        return vary(no_amaxes(self._state), self._axes)

    def recorded(self, variables: Variables) -> dict[str, PyTree]:
        """Variables of the same structure as those of the tape, with its recorders."""
        state: dict = {}
        for path, recorder in self._recorders.items():
            own = at_path(variables["fp8"], path) if path in self._amaxes else {}
            put_at_path(state, path, {**own, RECORDER: recorder})
        return {**variables, "fp8": state} if state else {**variables}

    def receive(self, rows: jax.Array) -> None:
        """Take the `rows` by which a function is differentiated, while the function is being traced."""
        self._cotangents.vector = sums_are_maxima(rows)

    def read(self, loss: jax.Array, grads: PyTree, d_rows: jax.Array, aux: PyTree = None) -> PassResult:
        """The result of the pass.

        Args:
          grads: the gradients; like the params if there are sums.
          d_rows: the gradient of `rows`.
        """
        totals = self.read_totals(grads, d_rows)
        amaxes, measured = (join_amaxes([*arrays.values()]) for arrays in (totals.amaxes, totals.measured))
        return PassResult(loss, totals.sums, amaxes, measured, aux)

    def read_totals(self, grads: PyTree, d_rows: jax.Array) -> Totals:
        """`read` with an array for each GEMM: the totals of a pipeline stage up to this unit of work."""
        self._check_are_met()
        amaxes = {path: ref[...] for path, ref in self._amaxes.items()}
        if self._cotangents.is_used:
            ends = np.cumsum([amax.size for amax in amaxes.values()])
            by_gemm = zip(amaxes.items(), jnp.split(d_rows, ends[:-1]), strict=True)
            amaxes = {path: jnp.maximum(amax, rows.reshape(amax.shape)) for (path, amax), rows in by_gemm}
        if self._before.sums is not None:
            # A gradient that a GEMM has added to its Ref is zeros here. If the loss uses the kernel in another way too,
            # the gradient holds that part, so it is added.
            grads = jax.tree.map(lambda total, grad: add_share(total, self._weight, grad), self.added_up(), grads)
        return Totals(grads, amaxes, {key: ref[...] for key, ref in self._measured.items()})

    def added_up(self) -> PyTree:
        """The sums, like the params, with the gradients that GEMMs have added to their Refs."""
        return map_with_names(
            lambda path, total: self.sums[path][...] if path in self.sums else total, self._before.sums
        )

    def _check_are_met(self) -> None:
        """Raise where a needed measurement is of a layer that the loss does not run."""
        for path, recorder in self._recorders.items():
            if recorder.refs.needed and not recorder.refs.is_met:
                raise ValueError(
                    "a measurement must be made in a layer that the loss runs, got "
                    f"{', '.join(recorder.refs.needed)} of {'/'.join(path)}; pass the path of such a layer"
                )

    def _stacked(self, path: LayerPath) -> tuple[int, ...]:
        """The dims along which `nn.scan` stacks the layers of a GEMM."""
        if path in self._amaxes:
            return at_path(self._state, path)["scale"].shape[:-1]
        kernel = at_path(self._plain["params"], next(iter(kernel_paths(path)), ()))
        return getattr(kernel, "shape", ())[: -3 if is_of_experts(path) else -2]


def add_share(total: jax.Array, weight: float, gradient: jax.Array) -> jax.Array:
    """`total + weight * gradient`, in float32."""
    return total + share_of(weight, gradient)


def share_of(weight: float, gradient: jax.Array) -> jax.Array:
    """`weight * gradient`, in float32."""
    return np.float32(weight) * gradient.astype(jnp.float32)


def added_by_gemms(fp8_state: Mapping, sums: PyTree, gemms: Collection[LayerPath] = ()) -> list[LayerPath]:
    """The kernels, of GEMMs with state and of `gemms`, whose gradients the wgrad GEMMs themselves add to the sums in
    place; those of other params are added after the pass.

    Such kernels are matrices, or one for each expert, not stacked by `nn.scan`, and large enough for a wgrad GEMM of
    their own, as all of experts are.
    """
    added: dict[LayerPath, None] = {}
    for path in [*gemms, *_states(fp8_state)]:
        kernels, of_experts = [at_path(sums, kernel) for kernel in kernel_paths(path)], is_of_experts(path)
        if not kernels or any(getattr(kernel, "ndim", None) != 2 + of_experts for kernel in kernels):
            continue
        if of_experts or not share_wgrad(kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)):
            added |= dict.fromkeys(kernel_paths(path))
    return list(added)


def nothing_measured(observe: Observed) -> jax.Array:
    """`PassResult.measured` before the first pass."""
    return jnp.zeros(sum(math.prod(each.shape) for each in observe), jnp.float32)


def fp8_state_of(variables: PyTree) -> Mapping[str, PyTree]:
    """The collection "fp8", or {}. Raise unless the variables have "params"."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        arrived = f"a dict with {sorted(variables)}" if isinstance(variables, Mapping) else type(variables).__name__
        raise ValueError(
            f'loss_fn must take a variable dict with "params" first, got {arrived}; pass {{"params": ..., "fp8": ...}}'
        )
    return variables.get("fp8", {})


def _states(fp8_state: Mapping) -> dict[LayerPath, tuple[int, ...]]:
    """The GEMMs of a state, in order, and the dims along which `nn.scan` stacks their layers."""
    found: dict[LayerPath, tuple[int, ...]] = {}
    map_gemms_with_path(lambda path, gemm: found.update({path: gemm["scale"].shape[:-1]}), fp8_state)
    return found


def _layers(stacked: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(stacked),) if stacked else ()
