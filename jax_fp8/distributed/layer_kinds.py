"""What a pipeline must know of a `LayeredLoss` before it runs: what its parts say, and which layers are of one kind.

    first, the layers, last ─traced→ how params may be split, which GEMMs are in FP8       (see grads/loss_trace.py)
                                     for each layer the first layer of its kind
                                     └→ the loss with one layer of each kind

A model has many layers, usually of one kind. Where the loss says so (`LayersByKind`), one of them is traced for all.
Any other layer is traced once, and compared with the layers before it. Everything else is traced on the loss with one
layer of each kind.
"""

import itertools
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import listed_gemms
from jax_fp8.core.shards import ParamSharding
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.grads.loss_trace import LossTrace, changed_kernels, shapes_of, traced
from jax_fp8.jaxprs.jaxpr_equality import compute_the_same
from jax_fp8.parallel.runner import check_returns_what_it_takes

Value = TypeVar("Value")


@dataclass(frozen=True)
class LayerKinds:
    """A loss by its layers.

    Args:
      loss: the whole loss.
      trace: what all of its layers say, and what comes before and after them.
      first: the GEMMs before the layers.
      kinds: for each layer the first layer that is like it: with the same variables it computes the same, by the same
        recipes.
    """

    loss: LayeredLoss
    trace: LossTrace
    first: tuple[LayerPath, ...]
    kinds: Mapping[str, str]

    @classmethod
    def from_loss(cls, loss: LayeredLoss, variables: Variables, microbatch: Batch) -> "LayerKinds":
        """Trace a loss; `variables` and `microbatch` are arrays or their shapes."""
        _check_names(loss, variables["params"])
        layers: dict[str, _TracedLayer] = {}  # those that were traced
        sources: dict[str, str] = {}  # for each layer the one that was traced for it
        first: list[LayerPath] = []

        def run(variables: Variables, microbatch: Batch) -> jax.Array:
            x = loss.first(variables, microbatch)
            first.extend(listed_gemms())
            by_kind: dict[Hashable, str] = {}
            for name in loss.layers:
                own = of_layer(variables, name)
                sources[name] = by_kind.setdefault((loss.kind_of(name), _signature(own, name)), name)
                if sources[name] == name:
                    layers[name] = _trace_layer(loss, name, own, x)
            return loss.last(variables, x, microbatch)

        _, trace = traced(run, *shapes_of((variables, microbatch)))
        trace = replace(trace, changed=(*trace.changed, *(path for layer in layers.values() for path in layer.changed)))
        kinds = _kinds({name: (layers[name], *_said_by(trace, name)) for name in layers})
        return cls(loss, _of_all(trace, sources), tuple(first), {name: kinds[of] for name, of in sources.items()})

    @cached_property
    def short_loss(self) -> LayeredLoss:
        """With one layer of each kind."""
        return replace(self.loss, layers=tuple(dict.fromkeys(self.kinds.values())), whole=None)

    def short(self, tree: Mapping[str, Value]) -> dict[str, Value]:
        """A collection, or a tree like it, of the short loss."""
        return {name: entry for name, entry in tree.items() if self.kinds.get(name, name) == name}

    def of_all(self, of_short: Mapping[LayerPath, Value]) -> dict[LayerPath, Value]:
        """For the GEMMs of the whole loss, what `of_short` has for those of the short loss."""
        short = {gemm: (*(self.kinds.get(name, name) for name in gemm[:1]), *gemm[1:]) for gemm in self.trace.gemms}
        return {gemm: of_short[of_kind] for gemm, of_kind in short.items() if of_kind in of_short}


@dataclass(frozen=True)
class _TracedLayer:
    """The program of a layer, the structure of its variables without its name, and kernels that the loss has changed
    before the layer reads them.
    """

    program: ClosedJaxpr
    structure: Hashable
    changed: tuple[LayerPath, ...]


def _trace_layer(loss: LayeredLoss, name: str, own: Variables, x: jax.Array) -> _TracedLayer:
    """Inside of a trace of the whole loss, which lists the GEMMs."""

    def apply(own: Variables, x: jax.Array) -> jax.Array:
        return loss.layer(own, x, name)

    program, y = jax.make_jaxpr(apply, return_shape=True)(own, x)
    check_returns_what_it_takes(x, y)
    gemms = [gemm for gemm in listed_gemms() if gemm[:1] == (name,)]
    return _TracedLayer(program, _signature(own, name)[0], changed_kernels(program, gemms, own, x))


def _signature(own: Variables, name: str) -> tuple[Hashable, tuple]:
    """The structure of a layer's variables without its name, and their shapes and dtypes."""
    leaves, structure = jax.tree.flatten({collection: tree[name] for collection, tree in own.items()})
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _of_all(trace: LossTrace, sources: Mapping[str, str]) -> LossTrace:
    """The trace of a loss in which each layer says what the layer says that was traced for it."""

    def sharding_of(path: LayerPath, traced_path: LayerPath) -> ParamSharding:
        sharding = trace.declared[traced_path]
        columns_of = sharding.columns_of
        if path == traced_path or not columns_of:
            return sharding
        return replace(sharding, columns_of=(path[0], *columns_of[1:]))

    return replace(
        trace,
        declared={path: sharding_of(path, of) for path, of in _paths_of_all(trace.declared, sources).items()},
        gemms={path: trace.gemms[of] for path, of in _paths_of_all(trace.gemms, sources).items()},
        cached=tuple(_paths_of_all(trace.cached, sources)),
        changed=tuple(_paths_of_all(trace.changed, sources)),
    )


def _paths_of_all(paths: Collection[LayerPath], sources: Mapping[str, str]) -> dict[LayerPath, LayerPath]:
    """The paths of all layers in program order, from those of the layers that were traced; for each its traced path."""
    of_layers: dict[str, list[LayerPath]] = {source: [] for source in sources.values()}
    others = []
    for path in paths:
        of_layers.get(path[0] if path else "", others).append(path)
    before = [*itertools.takewhile(lambda path: path in others, paths)]
    copies = {(name, *path[1:]): path for name, source in sources.items() for path in of_layers[source]}
    return {path: path for path in before} | copies | {path: path for path in others}


def _kinds(described: Mapping[str, tuple]) -> dict[str, str]:
    """For each layer that was traced the first one like it."""
    kinds: dict[str, str] = {}
    for name, (layer, *others) in described.items():
        alike = (
            first
            for first in dict.fromkeys(kinds.values())
            if described[first][0].structure == layer.structure
            and described[first][1:] == (*others,)
            and compute_the_same(described[first][0].program, layer.program)
        )
        kinds[name] = next(alike, name)
    return kinds


def _said_by(trace: LossTrace, name: str) -> tuple[dict[LayerPath, ParamSharding], dict[LayerPath, Recipe]]:
    """What a layer says of its params and GEMMs, without its name."""
    declared = {
        path[1:]: replace(sharding, columns_of=sharding.columns_of and sharding.columns_of[1:])
        for path, sharding in trace.declared.items()
        if path[:1] == (name,)
    }
    return declared, {path[1:]: recipe for path, recipe in trace.gemms.items() if path[:1] == (name,)}


def _check_names(loss: LayeredLoss, params: PyTree) -> None:
    unknown = {*loss.layers} - {*params}
    if unknown:
        raise ValueError(
            f"the layers of a LayeredLoss must be names in the params, got {min(unknown)!r} among {loss.layers}, "
            f"and params of {sorted(params)}; name them as in the params"
        )
