"""What the pieces of a `LayeredLoss` say before a pipeline runs them, and which of its layers compute the same.

    first, each layer, last ─traced→ how params may be split, which GEMMs are in FP8   (as train/layers.py of a loss)
                                     for each layer the first one of its kind
                                     └→ the loss with one layer of each kind

A model has many layers, as a rule of one kind. So each is traced once, and whatever else is to be found out by tracing
is found out of the short loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath
from jax_fp8.parallel.runner import check_returns_what_it_takes
from jax_fp8.train.alike import compute_the_same
from jax_fp8.train.layers import Layers

Found = TypeVar("Found")


@dataclass(frozen=True)
class Pieces:
    """A loss by its layers.

    Args:
      loss: the whole one.
      layers: what all of its layers say, and what is before and after them.
      kinds: for each layer the first one that is like it: of the same variables it computes the same, with the same
        recipes.
    """

    loss: LayeredLoss
    layers: Layers
    kinds: Mapping[str, str]

    @classmethod
    def of(cls, loss: LayeredLoss, variables: Mapping, microbatch: Any) -> "Pieces":
        """Of arrays, or of their shapes."""
        _check_names(loss, variables["params"])
        traced: dict[str, Any] = {}

        def run(variables, microbatch):
            x = loss.first(variables, microbatch)
            for name in loss.layers:
                own = of_layer(variables, name)
                program, y = jax.make_jaxpr(_of_name(loss, name), return_shape=True)(own, x)
                check_returns_what_it_takes(x, y)
                traced[name] = program, jax.tree.structure({key: tree[name] for key, tree in own.items()})
            return loss.last(variables, x, microbatch)

        layers = Layers.of(run, variables, microbatch)
        described = {name: (*traced[name], *_said_by(layers, name)) for name in loss.layers}
        return cls(loss, layers, _kinds(described))

    @cached_property
    def short_loss(self) -> LayeredLoss:
        """With one layer of each kind."""
        return replace(self.loss, layers=tuple(dict.fromkeys(self.kinds.values())), whole=None)

    def short(self, tree: Mapping) -> dict:
        """A collection, or a tree like it, of the short loss."""
        return {name: entry for name, entry in tree.items() if self.kinds.get(name, name) == name}

    def of_all(self, found: Mapping[LayerPath, Found]) -> dict[LayerPath, Found]:
        """What was found of the GEMMs of the short loss, of those of the whole one."""
        short = {gemm: (*(self.kinds.get(name, name) for name in gemm[:1]), *gemm[1:]) for gemm in self.layers.gemms}
        return {gemm: found[of_kind] for gemm, of_kind in short.items() if of_kind in found}


def _of_name(loss, name) -> Callable:
    return lambda own, x: loss.layer(own, x, name)


def _kinds(described: Mapping[str, tuple]) -> dict[str, str]:
    """For each layer the first one like it."""
    kinds: dict[str, str] = {}
    for name, (program, *others) in described.items():
        first = dict.fromkeys(kinds.values())
        alike = (of for of in first if described[of][1:] == (*others,) and compute_the_same(described[of][0], program))
        kinds[name] = next(alike, name)
    return kinds


def _said_by(layers: Layers, name: str) -> tuple[dict, dict]:
    """What a layer says of its params and GEMMs, without its name."""
    declared = {
        path[1:]: replace(of, columns_of=of.columns_of and of.columns_of[1:])
        for path, of in layers.declared.items()
        if path[:1] == (name,)
    }
    return declared, {path[1:]: recipe for path, recipe in layers.gemms.items() if path[:1] == (name,)}


def _check_names(loss, params):
    unknown = {*loss.layers} - {*params}
    if unknown:
        raise ValueError(
            f"the layers of a LayeredLoss must be names in the params, got {min(unknown)!r} among {loss.layers}, "
            f"and params of {sorted(params)}; name them as in the params"
        )
