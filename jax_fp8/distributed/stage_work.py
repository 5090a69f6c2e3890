"""What a stage of a pipeline computes in one unit of work: the forward of its layers, their backward or half of it.

    variables of a chunk, x ─forward→ y, kept          kept, dy ─backward→ dx, sums and amaxes raised
                                                       kept, dy ─input gradient→ dx, operands ─weight gradient→ sums

The gradients of kernels are added up by their GEMMs, in place, as over microbatches on one device. Only backward passes
record amaxes: a forward without a backward records nothing.
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
from jax_fp8.distributed.pipeline_checks import check_is_on_device
from jax_fp8.grads.tape import GradientTape, Observed, Totals, added_by_gemms
from jax_fp8.jaxprs.split_vjp import Halves, needed
from jax_fp8.ops.parameters import LinearParameters, ParamInfo
from jax_fp8.ops.passes import GemmResidual, backward_wgrad


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
      observe: what backward passes measure of its GEMMs.
    """

    loss: LayeredLoss
    names: tuple[str, ...]
    variables: Mapping
    gemms: Mapping[LayerPath, Recipe]
    weight: float
    from_current: bool
    x: jax.ShapeDtypeStruct
    observe: Observed = ()

    def no_totals(self) -> Totals:
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.variables["params"])
        return Totals.none(self.variables, self.observe, sums, first=(1,))

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
        tape = self._tape(totals)
        for operand in self._input_gradient[1]:
            x, dy = operand.of(kept, operands)
            self._add_weight_gradient(operand.gemm, x, dy, tape)
        return replace(totals, sums=tape.added_up())

    def _tape(self, totals: Totals, keeper: "_Keeper | None" = None) -> GradientTape:
        state = self.variables.get("fp8", {})
        stateless = [gemm for gemm in self.gemms if not at_path(state, gemm)]
        deferred = {}
        if keeper is not None:
            added = added_by_gemms(state, totals.sums, stateless)
            deferred = {gemm: _Deferral(keeper, gemm) for gemm in self.gemms if kernel_paths(gemm)[0] in added}
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
        return Halves(self._pull_back, lambda: self._tape(self.no_totals()), _shapes(self.variables), self.x)

    def _pull_back(self, variables: Mapping, x: jax.Array, tape: GradientTape) -> tuple[jax.Array, Callable]:
        """`jax.vjp` of the chunk by params, x, and the rows whose cotangents are amaxes."""

        def run(params: Any, x: jax.Array, rows: jax.Array) -> jax.Array:
            tape.receive(rows)
            given = tape.recorded({**variables, "params": params})
            for name in self.names:
                x = self.loss.layer(of_layer(given, name), x, name)
            return x

        return jax.vjp(run, variables["params"], x, no_amaxes(variables.get("fp8", {})))

    def _differentiate(
        self, variables: Mapping, kept: list[jax.Array], dy: jax.Array, tape: GradientTape
    ) -> tuple[jax.Array, Totals]:
        dparams, dx, of_rows = self._halves.pullback(variables, jnp.zeros_like(dy), kept, tape)(dy)
        return dx, tape.read_totals(dparams, of_rows)

    @property
    def _shapes_of_backward(self) -> tuple:
        variables = _shapes(self.variables)
        _, kept = jax.eval_shape(self._halves.forward, variables, self.x)
        return variables, kept, self.x, jax.eval_shape(self.no_totals)

    @cached_property
    def _backward(self) -> Callable:
        def run(variables, kept, dy, totals):
            return self._differentiate(variables, kept, dy, self._tape(totals))

        return needed(run, *self._shapes_of_backward)

    @cached_property
    def _input_gradient(self) -> tuple[Callable, list["_Operand"]]:
        """The program, and what it leaves for the weight gradients."""
        found: list[_Operand] = []

        def run(variables, kept, dy, totals):
            keeper = _Keeper()
            results = self._differentiate(variables, kept, dy, self._tape(totals, keeper))
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

    def _add_weight_gradient(self, gemm: LayerPath, x: Fp8Array, dy: Fp8Array, tape: GradientTape) -> None:
        kernels = [at_path(self.variables["params"], kernel) for kernel in kernel_paths(gemm)]
        sums = GradientSum(tuple(tape.sums[kernel] for kernel in kernel_paths(gemm)), self.weight)
        fp8_gemm = Fp8Gemm(self.gemms[gemm], "/".join(gemm), record=Record(gradient=sums))
        likes = LinearParameters(tuple(map(ParamInfo.from_arrays, kernels)), None)
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
