"""What a step can say about its numbers beside the loss: how each tensor was cast to FP8, and the gradients by layer.

    passes ─measured, by maximum→ health of inputs and output gradients ┐
    params, scales → health of kernels                                         ├→ one vector, `Diagnostics`
    gradients → norms, counts of what is not finite                            ┘

A layer measures where it casts (ops/operands.py), and only in a step that was asked to diagnose: that is a program of
its own, which computes the same state, and looks at some rows of most activations once more.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.checks import describe
from jax_fp8.core.formats import INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED
from jax_fp8.core.health import STATISTICS, measure
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, names_of, shown
from jax_fp8.core.recipe import Recipe
from jax_fp8.grads.tape import Measurement
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import cast_reference
from jax_fp8.kernels.explicit import whole
from jax_fp8.ops.router import EXPERT_SHARES
from jax_fp8.ops.weights import kernels_of

TENSORS = {INPUT: "input", KERNEL: "kernel", OUTPUT_GRADIENT: "output_gradient"}
SHARES = ("saturated", "underflowed", "nonfinite")
OF_GRADIENT = ("norm", "nonfinite")
ROUTER = "router"  # its name in a layer of experts
HEALTH = len(OBSERVED), len(STATISTICS)  # the shape of what a pass records of a GEMM
NOTABLE_SATURATION = 1e-3  # share of a tensor: a scale that is a step late cuts off far less


@dataclass(frozen=True)
class ObservedGemm:
    """A GEMM whose casts are measured: its path, its recipe, and the dims along which `nn.scan` stacks it."""

    path: LayerPath
    recipe: Recipe
    stacked: tuple[int, ...] = ()

    @classmethod
    def of(cls, path: LayerPath, recipe: Recipe, params: Mapping) -> "ObservedGemm":
        return cls(path, recipe, kernels_of(path, params)[0].shape[:-2])

    @property
    def measured(self) -> Measurement:
        layers = (math.prod(self.stacked),) if self.stacked else ()
        return Measurement(self.path, CAST_STATISTICS, (*layers, *HEALTH), is_needed=False)


@dataclass(frozen=True)
class ObservedRouter:
    """A router that is asked for the share of tokens that each of its experts gets; `path` leads to its kernel."""

    path: LayerPath
    experts: int

    @property
    def measured(self) -> Measurement:
        return Measurement(self.path, EXPERT_SHARES, (self.experts,), is_needed=False)


Observations = tuple[ObservedGemm | ObservedRouter, ...]  # GEMMs first


def observe(recipes: Mapping[LayerPath, Recipe], params: Mapping) -> Observations:
    """These GEMMs, and the routers before those of experts that are not stacked."""
    gemms = [ObservedGemm.of(path, recipe, params) for path, recipe in recipes.items()]
    paths = dict.fromkeys((*path[:-1], ROUTER) for path in recipes if is_of_experts(path))
    kernels: dict[LayerPath, Any] = {path: at_path(params, (*path, "kernel")) for path in paths}
    routers = [ObservedRouter(path, kernel.shape[-1]) for path, kernel in kernels.items() if kernel.ndim == 2]
    return *gemms, *routers


def _routers(observed) -> list[ObservedRouter]:
    return [router for router in observed if isinstance(router, ObservedRouter)]


def observed_gemms(observed) -> list[ObservedGemm]:
    return [gemm for gemm in observed if isinstance(gemm, ObservedGemm)]


def _size(observed) -> int:
    return sum(math.prod(of.measured.shape) for of in observed)


@dataclass(frozen=True)
class Layout:
    """What stands where in the vector of `Diagnostics`: names of GEMMs, of each three tensors, of the layers that have
    gradients, and of those that have experts, with their number.
    """

    gemms: tuple[str, ...]
    layers: tuple[str, ...]
    routers: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, observed: Observations, params: Any) -> "Layout":
        gemms = tuple(name for gemm in observed_gemms(observed) for name in _numbered(shown(gemm.path), gemm.stacked))
        routers = tuple(("/".join(router.path[:-1]), router.experts) for router in _routers(observed))
        return cls(gemms, tuple(_gradients_by_layer(params, observed)), routers)

    @property
    def size(self) -> int:
        return self.first_share + sum(experts for _, experts in self.routers)

    @property
    def first_share(self) -> int:
        """Where the shares of experts begin."""
        return len(self.gemms) * len(TENSORS) * len(STATISTICS) + len(self.layers) * len(OF_GRADIENT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagnostics:
    """How the tensors of a step were cast, and its gradients by layer, as one array on the device; `rows()` reads it.

    Args:
      values: f32[size].
      layout: static.
    """

    values: jax.Array
    layout: Layout = field(metadata={"static": True})

    @classmethod
    def of(cls, observed: Observations, measured: jax.Array, params: Any, fp8_state: Mapping, gradients: Any):
        """What a step knows.

        Args:
          measured: by the passes: of inputs and output gradients, and of routers.
          params, fp8_state: those with which it computed.
          gradients: like the params.
        """
        gemms = observed_gemms(observed)
        health, shares = measured[: _size(gemms)].reshape(-1, *HEALTH), measured[_size(gemms) :]
        kernels = [_kernel_health(gemm, params, fp8_state).reshape(-1, len(STATISTICS)) for gemm in gemms]
        of_all = health
        if kernels:
            of_tensor = {
                **dict(zip(OBSERVED, jnp.moveaxis(health, 1, 0), strict=True)),
                KERNEL: jnp.concatenate(kernels),
            }
            of_all = jnp.stack([of_tensor[tensor] for tensor in TENSORS], axis=1)
        found = _gradients_by_layer(gradients, observed)
        norms = [jnp.stack(_of_gradients(leaves)) for leaves in found.values()]
        layout = Layout.of(observed, params)
        return cls(jnp.concatenate([of_all.reshape(-1), *norms, shares]), layout)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """The same in words that JSON knows; waits for the device. Numbers that are not finite are None.

        Returns:
          "tensors": of each GEMM in program order, three of them, a dict of "layer", "tensor" ("input", "kernel" or
            "output_gradient"), "amax", "scale", "headroom" (`fp8_max * scale / amax`: below 1 it was too large for its
            scale), "saturated", "underflowed", "nonfinite" (shares of its elements) and "error" (relative root mean
            square of what the cast changed). Where several microbatches, uses or devices had the tensor, the worst of
            them. What could not be measured, as under `jax.vmap`, is None.
          "gradients": by layer, the module that owns the params: "norm" of the finite elements, "nonfinite" their
            number.
          "experts", where there are any: by layer "fractions", the share of all tokens that each expert gets; of
            several microbatches the largest.
        """
        values = np.asarray(self.values, np.float64)
        count = len(self.layout.gemms) * len(TENSORS)
        tensors = values[: count * len(STATISTICS)].reshape(count, len(STATISTICS))
        names = [(layer, tensor) for layer in self.layout.gemms for tensor in TENSORS.values()]
        norms = values[count * len(STATISTICS) : self.layout.first_share].reshape(-1, len(OF_GRADIENT))
        ends = np.cumsum([experts for _, experts in self.layout.routers], dtype=int)
        shares = np.split(values[self.layout.first_share :], ends[:-1])
        experts = [
            {"layer": layer, "fractions": [_finite(share) for share in own]}
            for (layer, _), own in zip(self.layout.routers, shares, strict=False)
        ]
        return {
            "tensors": [_tensor_row(*name, row) for name, row in zip(names, tensors, strict=True)],
            "gradients": [
                {"layer": layer, "norm": _finite(norm), "nonfinite": int(count)}
                for layer, (norm, count) in zip(self.layout.layers, norms, strict=True)
            ],
            **({"experts": experts} if experts else {}),
        }


def find_fault(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str | None:
    """What stands out in `Diagnostics.rows()`, as a clause: where numbers that are not finite begin, in the order in
    which a step computes; else the tensor of which most was cut off; None if neither is there.
    """
    if not isinstance(rows, Mapping) or not {"tensors", "gradients"} <= set(rows):
        raise ValueError(f'rows must hold "tensors" and "gradients", got {describe(rows)}; pass diagnostics.rows()')
    tensors = rows["tensors"]
    of_gradients = [row for row in reversed(tensors) if row["tensor"] == TENSORS[OUTPUT_GRADIENT]]
    in_order = [row for row in tensors if row["tensor"] != TENSORS[OUTPUT_GRADIENT]] + of_gradients
    for row in in_order:
        if row["nonfinite"]:
            return f"{100 * row['nonfinite']:.3g} % of {_described(row)} is not finite"
    layers = [row["layer"] for row in rows["gradients"] if row["nonfinite"]]
    if layers:
        others = f", nor those of {len(layers) - 1} other layers" if len(layers) > 1 else ""
        return f"the gradients of {layers[0]} are not finite{others}"
    worst = max(tensors, key=lambda row: row["saturated"] or 0, default=None)
    if worst is None or (worst["saturated"] or 0) < NOTABLE_SATURATION:
        return None
    return f"{100 * worst['saturated']:.3g} % of {_described(worst)} is larger than its scale allows"


def _described(row) -> str:
    return f"the {row['tensor'].replace('_', ' ')} of {row['layer']}"


def _tensor_row(layer, tensor, values) -> dict[str, Any]:
    found = dict(zip(STATISTICS, values, strict=True))
    if not found["scale"]:  # nobody has measured it
        return {"layer": layer, "tensor": tensor, **dict.fromkeys(("amax", "scale", "headroom", *SHARES, "error"))}
    headroom = 1 / found["reach"] if found["reach"] else math.inf
    numbers = {"amax": found["amax"], "scale": found["scale"], "headroom": headroom}
    numbers |= {name: found[name] for name in (*SHARES, "error")}
    return {"layer": layer, "tensor": tensor, **{name: _finite(number) for name, number in numbers.items()}}


def _finite(number) -> float | None:
    return float(number) if math.isfinite(number) else None


def _kernel_health(gemm: ObservedGemm, params, fp8_state) -> jax.Array:
    """STATISTICS of its kernels, side by side, f32[*stacked, 7]; zeros where they are no arrays."""
    kernels = kernels_of(gemm.path, params)
    if any(is_fp8(kernel) for kernel in kernels):
        return jnp.zeros((*gemm.stacked, len(STATISTICS)), jnp.float32)
    state = at_path(fp8_state, gemm.path)
    scales = state["scale"] if gemm.recipe.has_state and state else jnp.ones((*gemm.stacked, 3), jnp.float32)

    def of_one(scales, *kernels):
        amax = functools.reduce(jnp.maximum, map(amax_reference, kernels))
        cast = gemm.recipe.cast(KERNEL, scales if gemm.recipe.has_state else None, lambda: amax)
        if cast.rule.tile is not None:  # of shards, tiles would be others
            kernels = tuple(whole(kernel) for kernel in kernels)
        return measure(lambda *rows: rows, kernels, cast_reference(jnp.concatenate(kernels, axis=1), cast), amax)

    for _ in gemm.stacked:
        of_one = jax.vmap(of_one)
    return of_one(scales, *kernels)


def _gradients_by_layer(tree: Any, observed: Observations) -> dict[str, list]:
    """The leaves of each layer, the module that owns them, in the order in which people count."""
    stacks = {gemm.path[0]: gemm.stacked for gemm in observed_gemms(observed) if gemm.path and gemm.stacked}
    found: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_fp8):
        names = names_of(path)
        stacked = stacks.get(names[0], ())
        if leaf.shape[: len(stacked)] != stacked:
            stacked = ()
        for number, name in enumerate(_numbered(names[:-1] or names, stacked)):
            found.setdefault(name, []).append((leaf, np.unravel_index(number, stacked) if stacked else ()))
    return dict(
        sorted(found.items(), key=lambda item: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", item[0])])
    )


def _of_gradients(leaves) -> tuple[jax.Array, jax.Array]:
    """Norm and number of elements that are not finite."""
    squares, count = jnp.float32(0), jnp.float32(0)
    for leaf, index in leaves:
        gradient = leaf[index].astype(jnp.float32)
        is_finite = jnp.isfinite(gradient)
        numbers = jnp.where(is_finite, gradient, 0) ** 2, (~is_finite).astype(jnp.float32)
        of_leaf = lax.reduce(numbers, (np.float32(0),) * 2, _add, range(gradient.ndim))  # one pass, not two
        squares, count = _add((squares, count), of_leaf)
    return jnp.sqrt(squares), count


def _add(one, other):
    return one[0] + other[0], one[1] + other[1]


def _numbered(path, stacked) -> Iterator[str]:
    """The name of each of the layers that are stacked here."""
    name = "/".join(map(str, path)) or "model"
    if not stacked:
        yield name
    for index in np.ndindex(*stacked) if stacked else ():
        yield f"{name}[{', '.join(map(str, index))}]"
