"""What a stage of a pipeline computes in one unit of work: the forward of its layers, their backward or half of it.

    x ─layer_0─→ ─layer_1─→ ... → y, kept of all layers
    dx ←─layer_0─ ←─layer_1─ ... ← dy, kept of all layers           totals of each layer raised on the way

A chunk runs its layers one after the other, by the programs of distributed/layer_work.py. All stages run one program,
and one program serves all microbatches and slots.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import Variables
from jax_fp8.distributed.layer_work import LayerWork, no_totals
from jax_fp8.distributed.pipeline_checks import check_is_on_device
from jax_fp8.grads.tape import Observed, Totals
from jax_fp8.jaxprs.split_vjp import Program


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
      x: shape and dtype of a layer's input.
      observe: what backward passes measure of its GEMMs.
      traced: the programs of layers, by what they compute; chunks of one pass share them.
    """

    loss: LayeredLoss
    names: tuple[str, ...]
    variables: Variables
    gemms: Mapping[LayerPath, Recipe]
    weight: float
    from_current: bool
    x: jax.ShapeDtypeStruct
    observe: Observed = ()
    traced: dict[Hashable, LayerWork] = field(default_factory=dict)

    def no_totals(self) -> Totals:
        return no_totals(self.variables, self.observe)

    def forward(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        y, kept = self._forward[0](self.variables, x)
        check_is_on_device(kept)
        return y, kept

    def backward(self, kept: list[jax.Array], dy: jax.Array, totals: Totals) -> tuple[jax.Array, Totals]:
        return self._backward(self.variables, kept, dy, totals)

    def input_gradient(
        self, kept: list[jax.Array], dy: jax.Array, totals: Totals
    ) -> tuple[jax.Array, list[list[jax.Array]], Totals]:
        return self._input_gradient(self.variables, kept, dy, totals)

    def weight_gradient(self, kept: list[jax.Array], operands: list[list[jax.Array]], totals: Totals) -> Totals:
        return self._weight_gradient(self.variables, kept, operands, totals)

    @cached_property
    def _layers(self) -> list["_Layer"]:
        return [_Layer(name, self._work(name)) for name in self.names]

    def _work(self, name: str) -> LayerWork:
        """The programs of a layer, or of one that computes the same."""
        variables = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), of_layer(self.variables, name)
        )
        gemms = {gemm: recipe for gemm, recipe in self.gemms.items() if gemm[0] == name}
        observe = [of for of in self.observe if of.path[0] == name]
        leaves, structure = jax.tree.flatten({collection: tree[name] for collection, tree in variables.items()})
        described = (
            self.loss.kind_of(name),
            structure,
            tuple((leaf.shape, leaf.dtype) for leaf in leaves),
            tuple((gemm[1:], recipe) for gemm, recipe in gemms.items()),
            tuple(replace(of, path=of.path[1:]) for of in observe),
        )
        if described not in self.traced:
            self.traced[described] = LayerWork(
                self.loss, name, variables, gemms, self.weight, self.from_current, self.x, observe
            )
        return self.traced[described]

    @cached_property
    def _forward(self) -> tuple[Callable, list[list[int]]]:
        """The program, and for each layer the numbers of what it keeps. Each array is kept once, also where one layer
        keeps its output and the next one its input.
        """
        of_layers: list[list[int]] = []

        def forward(variables: Variables, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            kept: dict[int, jax.Array] = {}
            of_layers.clear()
            for layer in self._layers:
                x, own = layer.program(layer.work.forward)(layer.variables(variables), x)
                kept.update({id(leaf): leaf for leaf in own})
                numbers = {identity: number for number, identity in enumerate(kept)}
                of_layers.append([numbers[id(leaf)] for leaf in own])
            return x, [*kept.values()]

        return jax.jit(forward), of_layers

    def _backwards(self, kept: list[jax.Array]) -> Iterator[tuple["_Layer", list[jax.Array]]]:
        """The layers from the last one to the first, each with what its forward has kept."""
        for layer, numbers in zip(reversed(self._layers), reversed(self._forward[1]), strict=True):
            yield layer, [kept[number] for number in numbers]

    @cached_property
    def _backward(self) -> Callable:
        def backward(
            variables: Variables, kept: list[jax.Array], dy: jax.Array, totals: Totals
        ) -> tuple[jax.Array, Totals]:
            for layer, own in self._backwards(kept):
                program = layer.program(layer.work.backward)
                dy, added = program(layer.variables(variables), own, dy, layer.totals(totals))
                totals = layer.with_totals(totals, added)
            return dy, totals

        return jax.jit(backward)

    @cached_property
    def _input_gradient(self) -> Callable:
        def input_gradient(
            variables: Variables, kept: list[jax.Array], dy: jax.Array, totals: Totals
        ) -> tuple[jax.Array, list[list[jax.Array]], Totals]:
            operands = []
            for layer, own in self._backwards(kept):
                program = layer.program(layer.work.input_gradient)
                (dy, added), own_operands = program(layer.variables(variables), own, dy, layer.totals(totals))
                totals = layer.with_totals(totals, added)
                operands.append(own_operands)
            return dy, operands, totals

        return jax.jit(input_gradient)

    @cached_property
    def _weight_gradient(self) -> Callable:
        def weight_gradient(
            variables: Variables, kept: list[jax.Array], operands: list[list[jax.Array]], totals: Totals
        ) -> Totals:
            for (layer, own), own_operands in zip(self._backwards(kept), operands, strict=True):
                program = layer.program(layer.work.weight_gradient)
                added = program(layer.variables(variables), own, own_operands, layer.totals(totals))
                totals = layer.with_totals(totals, added)
            return totals

        return weight_gradient


@dataclass(frozen=True)
class _Layer:
    """A layer, and the programs that it shares. They know it by the name of the layer that was traced."""

    name: str
    work: LayerWork

    def program(self, traced: Program) -> Program:
        return traced.in_scope(self.work.name, self.name)

    def variables(self, variables: Variables) -> Variables:
        """Those of this layer, from those of the chunk."""
        own = of_layer(variables, self.name)
        return {collection: {self.work.name: tree[self.name]} for collection, tree in own.items()}

    def totals(self, totals: Totals) -> Totals:
        """Those of this layer, from those of the chunk."""
        traced = self.work.name
        return Totals(
            {traced: totals.sums[self.name]},
            {(traced, *path[1:]): amax for path, amax in totals.amaxes.items() if path[0] == self.name},
            {((traced, *path[1:]), of): x for (path, of), x in totals.measured.items() if path[0] == self.name},
        )

    def with_totals(self, totals: Totals, own: Totals) -> Totals:
        """Those of the chunk, with new ones of this layer."""
        return Totals(
            {**totals.sums, self.name: own.sums[self.work.name]},
            {**totals.amaxes, **{(self.name, *path[1:]): amax for path, amax in own.amaxes.items()}},
            {**totals.measured, **{((self.name, *path[1:]), of): x for (path, of), x in own.measured.items()}},
        )
