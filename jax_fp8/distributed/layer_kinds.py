"""What a pipeline must know of a `LayeredLoss` before it runs: the parts of the loss, and which layers are of one kind.

    first, each layer, last ─traced→ how params may be split, which GEMMs are in FP8   (see grads/loss_trace.py)
                                     for each layer the first one of its kind
                                     └→ the loss with one layer of each kind

A model has many layers, usually of one kind. Each is traced once. Everything else is traced on a loss with one layer of
each kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.recorder import listed_gemms
from jax_fp8.grads.loss_trace import LossTrace, changed_kernels, shapes_of, traced
from jax_fp8.jaxprs.jaxpr_equality import compute_the_same
from jax_fp8.parallel.runner import check_returns_what_it_takes

Found = TypeVar("Found")


@dataclass(frozen=True)
class LayerKinds:
    """A loss by its layers.

    Args:
      loss: the whole one.
      trace: what all of its layers say, and what is before and after them.
      first: the GEMMs before the layers.
      kinds: for each layer the first one that is like it: of the same variables it computes the same, with the same
        recipes.
    """

    loss: LayeredLoss
    trace: LossTrace
    first: tuple[LayerPath, ...]
    kinds: Mapping[str, str]

    @classmethod
    def of(cls, loss: LayeredLoss, variables: Mapping, microbatch: Any) -> "LayerKinds":
        """Of arrays, or of their shapes."""
        _check_names(loss, variables["params"])
        programs: dict[str, ClosedJaxpr] = {}
        structures: dict[str, Any] = {}
        first: list[LayerPath] = []
        changed: list[LayerPath] = []

        def run(variables: Mapping, microbatch: Any) -> Any:
            x = loss.first(variables, microbatch)
            first.extend(listed_gemms())
            for name in loss.layers:
                own = of_layer(variables, name)
                programs[name], y = jax.make_jaxpr(_of_name(loss, name), return_shape=True)(own, x)
                check_returns_what_it_takes(x, y)
                structures[name] = jax.tree.structure({key: tree[name] for key, tree in own.items()})
                own_gemms = [gemm for gemm in listed_gemms() if gemm[:1] == (name,)]
                changed.extend(changed_kernels(programs[name], own_gemms, own, x))
            return loss.last(variables, x, microbatch)

        _, trace = traced(run, *shapes_of((variables, microbatch)))
        trace = replace(trace, changed=(*trace.changed, *changed))
        described = {name: (programs[name], structures[name], *_said_by(trace, name)) for name in loss.layers}
        return cls(loss, trace, tuple(first), _kinds(described))

    @cached_property
    def short_loss(self) -> LayeredLoss:
        """With one layer of each kind."""
        return replace(self.loss, layers=tuple(dict.fromkeys(self.kinds.values())), whole=None)

    def short(self, tree: Mapping) -> dict:
        """A collection, or a tree like it, of the short loss."""
        return {name: entry for name, entry in tree.items() if self.kinds.get(name, name) == name}

    def of_all(self, found: Mapping[LayerPath, Found]) -> dict[LayerPath, Found]:
        """What was found of the GEMMs of the short loss, of those of the whole one."""
        short = {gemm: (*(self.kinds.get(name, name) for name in gemm[:1]), *gemm[1:]) for gemm in self.trace.gemms}
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


def _said_by(trace: LossTrace, name: str) -> tuple[dict, dict]:
    """What a layer says of its params and GEMMs, without its name."""
    declared = {
        path[1:]: replace(of, columns_of=of.columns_of and of.columns_of[1:])
        for path, of in trace.declared.items()
        if path[:1] == (name,)
    }
    return declared, {path[1:]: recipe for path, recipe in trace.gemms.items() if path[:1] == (name,)}


def _check_names(loss, params):
    unknown = {*loss.layers} - {*params}
    if unknown:
        raise ValueError(
            f"the layers of a LayeredLoss must be names in the params, got {min(unknown)!r} among {loss.layers}, "
            f"and params of {sorted(params)}; name them as in the params"
        )
