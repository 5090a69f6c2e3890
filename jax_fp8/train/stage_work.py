"""What a stage of a pipeline computes in one unit of work: the forward of its layers, their backward or half of it.

    variables of a chunk, x ─forward→ y, kept          kept, dy ─backward→ dx, sums and amaxes raised
                                                       kept, dy ─input gradient→ dx, operands ─weight gradient→ sums

The gradients of kernels are added up by their GEMMs, in place, as over microbatches on one device. Amaxes are recorded
by backward passes alone, for a forward of which no backward follows is none.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm, GradientSum, Record
from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import RECORDER, ByIdentity, Cotangents, Recorder
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import GemmResidual, backward_wgrad
from jax_fp8.train.diagnostics import HEALTH
from jax_fp8.train.gradients import added_by_gemms, sums_are_maxima
from jax_fp8.train.halves import Halves, needed
from jax_fp8.train.pipeline_checks import check_is_on_device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """What the microbatches have left in a chunk: `sums` of the gradients of its params, float32; `amaxes` f32[1, 3] of
    its GEMMs, by path; `health` f32[1, 2, STATISTICS] of those that are measured.
    """

    sums: Any
    amaxes: dict[LayerPath, jax.Array]
    health: dict[LayerPath, jax.Array]


@dataclass(frozen=True)
class _Refs:
    """Where a backward pass writes: Refs of kernels and of GEMMs by their paths, the way out where no Ref is, and the
    keeper of operands, if weight gradients are for later.
    """

    sums: dict[LayerPath, Any]
    amaxes: dict[LayerPath, Any]
    health: dict[LayerPath, Any]
    cotangents: Cotangents
    keeper: "_Keeper | None" = None


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """The units of work of one chunk of layers.

    Args:
      loss: of the model.
      names: under which its layers lie in the variables.
      variables: of the stage's own layers, with their weights in FP8.
      gemms: in FP8, and their recipes.
      weight: of a microbatch's gradient in the sum.
      from_current: scale each tensor by its own amax.
      x: shape and dtype of what enters a layer.
      observed: GEMMs whose casts are measured (train/diagnostics.py).
    """

    loss: LayeredLoss
    names: tuple[str, ...]
    variables: Mapping
    gemms: Mapping[LayerPath, Recipe]
    weight: float
    from_current: bool
    x: jax.ShapeDtypeStruct
    observed: Collection[LayerPath] = ()

    def no_totals(self) -> Totals:
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.variables["params"])
        amaxes = {gemm: jnp.zeros((1, 3), jnp.float32) for gemm in self._with_state}
        return Totals(sums, amaxes, {gemm: jnp.zeros((1, *HEALTH), jnp.float32) for gemm in self.observed})

    def forward(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        y, kept = self._halves.forward(self.variables, x)
        check_is_on_device(kept)
        return y, kept

    def backward(self, kept: list[jax.Array], dy: jax.Array, totals: Totals) -> tuple[jax.Array, Totals]:
        return self._backward(self.variables, kept, dy, totals)

    def input_gradient(self, kept: list[jax.Array], dy: jax.Array, totals: Totals) -> tuple[jax.Array, Any, Totals]:
        (dx, totals), operands = self._input_gradient[0](self.variables, kept, dy, totals)
        return dx, operands, totals

    def weight_gradient(self, kept: list[jax.Array], operands: list[jax.Array], totals: Totals) -> Totals:
        refs = self._refs(totals)
        for operand in self._input_gradient[1]:
            x, dy = operand.of(kept, operands)
            self._add_weight_gradient(operand.gemm, x, dy, refs)
        return Totals(self._sums(totals, refs), totals.amaxes, totals.health)

    @property
    def _fp8_state(self) -> Mapping:
        return self.variables.get("fp8", {})

    @property
    def _with_state(self) -> list[LayerPath]:
        return [gemm for gemm in self.gemms if at_path(self._fp8_state, gemm)]

    @cached_property
    def _added(self) -> list[LayerPath]:
        """The kernels whose gradients GEMMs add up in place."""
        stateless = [gemm for gemm in self.gemms if not at_path(self._fp8_state, gemm)]
        return added_by_gemms(self._fp8_state, self.variables["params"], stateless)

    def _refs(self, totals: Totals, keeper: "_Keeper | None" = None) -> _Refs:
        sums = {kernel: jax.new_ref(at_path(totals.sums, kernel)) for kernel in self._added}
        amaxes = {gemm: jax.new_ref(of_gemm) for gemm, of_gemm in totals.amaxes.items()}
        health = {gemm: jax.new_ref(of_gemm) for gemm, of_gemm in totals.health.items()}
        return _Refs(sums, amaxes, health, Cotangents(), keeper)

    def _sums(self, totals, refs) -> Any:
        return map_with_names(lambda names, total: refs.sums[names][...] if names in refs.sums else total, totals.sums)

    @cached_property
    def _halves(self) -> Halves:
        return Halves(self._pull_back, lambda: self._refs(self.no_totals()), _shapes(self.variables), self.x)

    def _pull_back(self, variables, x, refs: _Refs):
        """`jax.vjp` of the chunk by params, x, and f32[rows] whose cotangents are amaxes."""
        recorded: dict = {}
        for gemm in self.gemms:
            put_at_path(
                recorded, gemm, {**(at_path(variables.get("fp8", {}), gemm) or {}), **self._recorder(gemm, refs)}
            )

        def run(params, x, rows):
            refs.cotangents.vector = sums_are_maxima(rows)
            given = {**variables, "params": params, **({"fp8": recorded} if recorded else {})}
            for name in self.names:
                x = self.loss.layer(of_layer(given, name), x, name)
            return x

        return jax.vjp(run, variables["params"], x, jnp.zeros(3 * len(self._with_state), jnp.float32))

    def _recorder(self, gemm, refs) -> dict[str, Recorder]:
        sums = tuple(ByIdentity(refs.sums[kernel]) for kernel in kernel_paths(gemm) if kernel in refs.sums)
        deferral = ByIdentity(_Deferral(refs.keeper, gemm)) if refs.keeper is not None and sums else None
        health = ByIdentity(refs.health[gemm]) if gemm in refs.health else None
        slot = jnp.int32(0)  # with which the backward alone records: see `DeclaredGemm.stage`
        if gemm not in refs.amaxes:
            others = refs.cotangents, 0, deferral, health
            return {RECORDER: Recorder(None, sums, self.weight, True, slot if health else None, *others)}
        amaxes, first_row = ByIdentity(refs.amaxes[gemm]), 3 * self._with_state.index(gemm)
        others = refs.cotangents, first_row, deferral, health, gemm if self.from_current else None
        return {RECORDER: Recorder(amaxes, sums, self.weight, self.from_current, slot, *others)}

    def _differentiate(self, variables, x, kept, dy, totals, refs) -> tuple[jax.Array, Totals]:
        dparams, dx, rows = self._halves.pullback(variables, x, kept, refs)(dy)
        share = np.float32(self.weight)
        sums = jax.tree.map(
            lambda total, gradient: total + share * gradient.astype(jnp.float32), self._sums(totals, refs), dparams
        )
        amaxes = {gemm: ref[...] for gemm, ref in refs.amaxes.items()}
        if refs.cotangents.is_used:
            of_gemms = dict(zip(self._with_state, rows.reshape(-1, 1, 3), strict=True))
            amaxes = {gemm: jnp.maximum(found, of_gemms[gemm]) for gemm, found in amaxes.items()}
        return dx, Totals(sums, amaxes, {gemm: ref[...] for gemm, ref in refs.health.items()})

    @property
    def _shapes_of_backward(self) -> tuple:
        variables = _shapes(self.variables)
        _, kept = jax.eval_shape(self._halves.forward, variables, self.x)
        return variables, kept, self.x, jax.eval_shape(self.no_totals)

    @cached_property
    def _backward(self) -> Callable:
        def run(variables, kept, dy, totals):
            return self._differentiate(variables, jnp.zeros_like(dy), kept, dy, totals, self._refs(totals))

        return needed(run, *self._shapes_of_backward)

    @cached_property
    def _input_gradient(self) -> tuple[Callable, list["_Operand"]]:
        """The program, and what it leaves for the weight gradients."""
        found: list[_Operand] = []

        def run(variables, kept, dy, totals):
            keeper = _Keeper()
            results = self._differentiate(variables, jnp.zeros_like(dy), kept, dy, totals, self._refs(totals, keeper))
            # What the forward has kept stays where it is.
            of_kept = {id(leaf): number for number, leaf in enumerate(kept)}
            left: list[jax.Array] = []
            for gemm, x, dy in keeper.operands:
                places = []
                for leaf in (x.values, x.scale, dy.values, dy.scale):
                    if id(leaf) not in of_kept:
                        left.append(leaf)
                    places.append((True, of_kept[id(leaf)]) if id(leaf) in of_kept else (False, len(left) - 1))
                found.append(_Operand(gemm, tuple(places)))
            return results, left

        return needed(run, *self._shapes_of_backward), found

    def _add_weight_gradient(self, gemm, x: Fp8Array, dy: Fp8Array, refs) -> None:
        kernels = [at_path(self.variables["params"], kernel) for kernel in kernel_paths(gemm)]
        sums = GradientSum(tuple(refs.sums[kernel] for kernel in kernel_paths(gemm)), self.weight)
        fp8_gemm = Fp8Gemm(self.gemms[gemm], "/".join(gemm), record=Record(gradient=sums))
        likes = LinearParameters(tuple(map(ParamInfo.of, kernels)), None)
        x_only: Any = GemmResidual(x, None, None, None)  # type: ignore[arg-type]
        backward_wgrad(Fp8Pair(None, dy, None), None, x_only, likes, fp8_gemm, tuple(k.shape[-1] for k in kernels))


@dataclass(frozen=True)
class _Operand:
    """The operands of a weight gradient: of values and scales of xᵀ and dyᵀ, whether the forward has kept it, and its
    number there, or among what the input gradient has left.
    """

    gemm: LayerPath
    places: tuple[tuple[bool, int], ...]

    def of(self, kept, left) -> tuple[Fp8Array, Fp8Array]:
        x, x_scale, dy, dy_scale = (kept[number] if is_kept else left[number] for is_kept, number in self.places)
        return Fp8Array(x, x_scale), Fp8Array(dy, dy_scale)


class _Keeper:
    """Collects the operands of weight gradients in one trace."""

    def __init__(self):
        self.operands: list[tuple[LayerPath, Fp8Array, Fp8Array]] = []
        self._trace = _current_trace()

    def keep(self, gemm: LayerPath, x: Fp8Array, dy: Fp8Array) -> None:
        if _current_trace() is not self._trace:
            raise ValueError(
                "zero-bubble keeps the operands of weight gradients, which a layer's own jax.checkpoint or scan hides, "
                f"got {'/'.join(gemm)} in one; take another schedule, or recompute=True of jax_fp8's layers"
            )
        self.operands.append((gemm, x, dy))


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Deferral:
    """Where a GEMM leaves its operands: as core/deferral.py has it, for one trace."""

    keeper: _Keeper
    gemm: LayerPath

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: Any, name: str, accumulation: str) -> None:
        self.keeper.keep(self.gemm, x, dy)

    def named(self, kernels: Any) -> Any:
        return kernels


def _current_trace():
    with take_current_trace() as trace:
        return trace


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
