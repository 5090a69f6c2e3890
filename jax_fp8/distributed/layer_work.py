"""The units of work of one layer of a pipeline, as programs that are traced once for all layers of a kind.

    variables of a layer, x ─forward→ y, kept          kept, dy ─backward→ dx, sums and amaxes raised
                                                       kept, dy ─input gradient→ dx, operands ─weight gradient→ sums

Tracing a layer, its `custom_vjp`s and Flax's modules takes ten times as long as repeating the equations that come out
of it. So layers that compute the same share these programs, whichever chunk they are in (distributed/stage_work.py).

GEMMs add up the gradients of their kernels in place, as over microbatches on one device. Only backward passes record
amaxes: a forward without a backward records nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import take_current_trace

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm, GradientSum, Record
from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import no_amaxes
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.grads.tape import GradientTape, Observed, Totals, added_by_gemms
from jax_fp8.jaxprs.split_vjp import Halves, Program, needed
from jax_fp8.ops.gemm_residual import GemmResidual
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import backward_wgrad


@dataclass(frozen=True, eq=False)
class LayerWork:
    """The units of work of one layer.

    Args:
      loss: of the model.
      name: of the layer: the only key in each collection of its variables, and the first name of all paths.
      variables: shapes of the layer's variables, with its weights in FP8.
      gemms: in FP8, and their recipes.
      weight: of a microbatch's gradient in the sum.
      from_current: scale each tensor by its own amax.
      x: shape and dtype of the layer's input.
      observe: what backward passes measure of its GEMMs.
    """

    loss: LayeredLoss
    name: str
    variables: Variables
    gemms: Mapping[LayerPath, Recipe]
    weight: float
    from_current: bool
    x: jax.ShapeDtypeStruct
    observe: Observed = ()

    @property
    def forward(self) -> Program:
        """`forward(variables, x) -> y, kept`."""
        return self._halves.forward

    @cached_property
    def backward(self) -> Program:
        """`backward(variables, kept, dy, totals) -> dx, totals`."""

        def run(variables: Variables, kept: list[jax.Array], dy: jax.Array, totals: Totals) -> tuple[jax.Array, Totals]:
            return self._differentiate(variables, kept, dy, self._tape(totals))

        return needed(run, *self._shapes_of_backward)

    @property
    def input_gradient(self) -> Program:
        """`input_gradient(variables, kept, dy, totals) -> (dx, totals), operands`: those operands of the weight
        gradients that the forward has not kept.
        """
        return self._input_gradient[0]

    @cached_property
    def weight_gradient(self) -> Program:
        """`weight_gradient(variables, kept, operands, totals) -> totals`."""

        def run(variables: Variables, kept: list[jax.Array], operands: list[jax.Array], totals: Totals) -> Totals:
            tape = self._tape(totals)
            for operand in self._input_gradient[1]:
                x, dy = operand.read(kept, operands)
                self._add_weight_gradient(variables["params"], operand.gemm, x, dy, tape)
            return replace(totals, sums=tape.added_up())

        variables, kept, _, totals = self._shapes_of_backward
        _, operands = jax.eval_shape(self.input_gradient, *self._shapes_of_backward)
        return needed(run, variables, kept, operands, totals)

    def _tape(self, totals: Totals, collector: "_OperandCollector | None" = None) -> GradientTape:
        state = self.variables.get("fp8", {})
        stateless = [gemm for gemm in self.gemms if not at_path(state, gemm)]
        deferred = {}
        if collector is not None:
            added = added_by_gemms(state, totals.sums, stateless)
            deferred = {gemm: _Deferral(collector, gemm) for gemm in self.gemms if kernel_paths(gemm)[0] in added}
        return GradientTape(
            self.variables,
            gemms=stateless,
            weight=self.weight,
            observe=self.observe,
            defer=deferred,
            from_current=self.from_current,
            earlier=totals,
        )

    @cached_property
    def _halves(self) -> Halves:
        return Halves(self._pull_back, lambda: self._tape(self._no_totals()), self.variables, self.x)

    def _no_totals(self) -> Totals:
        return no_totals(self.variables, self.observe)

    def _pull_back(self, variables: Variables, x: jax.Array, tape: GradientTape) -> tuple[jax.Array, Callable]:
        """`jax.vjp` of the layer by params, x, and the rows whose cotangents are amaxes."""

        def run(params: PyTree, x: jax.Array, rows: jax.Array) -> jax.Array:
            tape.receive(rows)
            recorded = tape.recorded({**variables, "params": params})
            return self.loss.layer(of_layer(recorded, self.name), x, self.name)

        return jax.vjp(run, variables["params"], x, no_amaxes(variables.get("fp8", {})))

    def _differentiate(
        self, variables: Variables, kept: list[jax.Array], dy: jax.Array, tape: GradientTape
    ) -> tuple[jax.Array, Totals]:
        dparams, dx, of_rows = self._halves.pullback(variables, jnp.zeros_like(dy), kept, tape)(dy)
        return dx, tape.read_totals(dparams, of_rows)

    @cached_property
    def _shapes_of_backward(self) -> tuple[Variables, list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct, Totals]:
        _, kept = jax.eval_shape(self.forward, self.variables, self.x)
        return self.variables, kept, self.x, jax.eval_shape(self._no_totals)

    @cached_property
    def _input_gradient(self) -> tuple[Program, list["_Operand"]]:
        """The program, and where the operands of the weight gradients are after it."""
        found: list[_Operand] = []

        def run(
            variables: Variables, kept: list[jax.Array], dy: jax.Array, totals: Totals
        ) -> tuple[tuple[jax.Array, Totals], list[jax.Array]]:
            collector = _OperandCollector()
            results = self._differentiate(variables, kept, dy, self._tape(totals, collector))
            # What the forward has kept stays where it is.
            numbers = {id(leaf): number for number, leaf in enumerate(kept)}
            not_kept: list[jax.Array] = []
            for gemm, x, output_gradient in collector.operands:
                places = []
                for leaf in (x.values, x.scale, output_gradient.values, output_gradient.scale):
                    if id(leaf) not in numbers:
                        not_kept.append(leaf)
                    places.append((True, numbers[id(leaf)]) if id(leaf) in numbers else (False, len(not_kept) - 1))
                found.append(_Operand(gemm, tuple(places)))
            return results, not_kept

        return needed(run, *self._shapes_of_backward), found

    def _add_weight_gradient(
        self, params: PyTree, gemm: LayerPath, x: Fp8Array, dy: Fp8Array, tape: GradientTape
    ) -> None:
        kernels = [at_path(params, kernel) for kernel in kernel_paths(gemm)]
        sums = GradientSum(tuple(tape.sums[kernel] for kernel in kernel_paths(gemm)), self.weight)
        fp8_gemm = Fp8Gemm(self.gemms[gemm], "/".join(gemm), record=Record(gradient=sums))
        likes = LinearParameters(tuple(map(ParamInfo.from_arrays, kernels)), None)
        x_only: Any = GemmResidual(x, None, None, None)  # type: ignore[arg-type]
        backward_wgrad(Fp8Pair(None, dy, None), None, x_only, likes, fp8_gemm, tuple(k.shape[-1] for k in kernels))


def no_totals(variables: Variables, observe: Observed) -> Totals:
    """What the backward passes of layers with these variables add to: zeros."""
    sums = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), variables["params"])
    return Totals.none(variables, observe, sums, first=(1,))


@dataclass(frozen=True)
class _Operand:
    """Where the operands of a weight gradient are: the values and scales of xᵀ and dyᵀ, each either kept by the forward
    or returned by the input gradient (True or False), and under which number.
    """

    gemm: LayerPath
    places: tuple[tuple[bool, int], ...]

    def read(self, kept: list[jax.Array], operands: list[jax.Array]) -> tuple[Fp8Array, Fp8Array]:
        x, x_scale, dy, dy_scale = (kept[number] if is_kept else operands[number] for is_kept, number in self.places)
        return Fp8Array(x, x_scale), Fp8Array(dy, dy_scale)


class _OperandCollector:
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
    """Where a GEMM leaves its operands: the protocol of core/deferral.py, for one trace."""

    collector: _OperandCollector
    gemm: LayerPath

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: object, name: str, accumulation: str) -> None:
        self.collector.keep(self.gemm, x, dy)

    def named(self, kernels: PyTree) -> PyTree:
        return kernels


def _current_trace() -> object:
    with take_current_trace() as trace:
        return trace
