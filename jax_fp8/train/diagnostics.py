"""Diagnostics of a step beside its loss: how each tensor was cast to FP8, and the gradients by layer.

    passes ─measurements, by maximum→ statistics of inputs and output gradients ┐
    params, scales → statistics of kernels                                      ├→ one vector, `Diagnostics`
    gradients → norms, counts of elements that are not finite                   ┘

A layer measures where it casts (ops/operands.py), and only in a step that diagnoses. Such a step is a program of its
own: it computes the same new state, and reads some rows of most activations once more.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_fp8.core.formats import INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED
from jax_fp8.core.health import STATISTICS, measure
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, names_of, shown
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.grads.tape import Measurement
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import cast_reference
from jax_fp8.kernels.explicit import whole
from jax_fp8.ops.router import EXPERT_USE, OF_ALL_EXPERTS
from jax_fp8.ops.weights import kernels_of

TENSORS = {INPUT: "input", KERNEL: "kernel", OUTPUT_GRADIENT: "output_gradient"}
SHARES = ("saturated", "underflowed", "nonfinite")
OF_GRADIENT = ("norm", "nonfinite")
ROUTER = "router"  # its name in a layer of experts
HEALTH = len(OBSERVED), len(STATISTICS)  # the shape of a pass's measurement of one GEMM

Row: TypeAlias = dict[str, Any]
"""One row of `Diagnostics.rows()`: names as strings, and numbers or None."""


@dataclass(frozen=True)
class ObservedGemm:
    """A GEMM whose casts are measured: its path, its recipe, and the dims along which `nn.scan` stacks it."""

    path: LayerPath
    recipe: Recipe
    stacked: tuple[int, ...] = ()

    @classmethod
    def from_params(cls, path: LayerPath, recipe: Recipe, params: Mapping) -> "ObservedGemm":
        return cls(path, recipe, jax.eval_shape(functools.partial(kernels_of, path), params)[0].shape[:-2])

    @property
    def measurement(self) -> Measurement:
        layers = (math.prod(self.stacked),) if self.stacked else ()
        return Measurement(self.path, CAST_STATISTICS, (*layers, *HEALTH), is_needed=False)


@dataclass(frozen=True)
class ObservedRouter:
    """A router that measures how its experts are used; `path` leads to its kernel."""

    path: LayerPath
    experts: int

    @property
    def measurement(self) -> Measurement:
        return Measurement(self.path, EXPERT_USE, (self.experts + len(OF_ALL_EXPERTS),), is_needed=False)


Observations = tuple[ObservedGemm | ObservedRouter, ...]  # GEMMs first


def observe(recipes: Mapping[LayerPath, Recipe], params: Mapping) -> Observations:
    """What a step observes: these GEMMs, and the routers of those of experts. A router that `nn.scan` stacks is left
    out.
    """
    gemms = [ObservedGemm.from_params(path, recipe, params) for path, recipe in recipes.items()]
    paths = dict.fromkeys((*path[:-1], ROUTER) for path in recipes if is_of_experts(path))
    kernels: dict[LayerPath, jax.Array] = {path: at_path(params, (*path, "kernel")) for path in paths}
    routers = [ObservedRouter(path, kernel.shape[-1]) for path, kernel in kernels.items() if kernel.ndim == 2]
    return *gemms, *routers


def _routers(observed: Observations) -> list[ObservedRouter]:
    return [router for router in observed if isinstance(router, ObservedRouter)]


def observed_gemms(observed: Observations) -> list[ObservedGemm]:
    return [gemm for gemm in observed if isinstance(gemm, ObservedGemm)]


def _size(gemms: Sequence[ObservedGemm]) -> int:
    return sum(math.prod(gemm.measurement.shape) for gemm in gemms)


@dataclass(frozen=True)
class Layout:
    """The order of the numbers in the vector of `Diagnostics`: STATISTICS of the three tensors of each GEMM, norm and
    count of each layer's gradients, and for each router a share for each expert and OF_ALL_EXPERTS.

    Args:
      gemms: their names.
      layers: names of the layers that have gradients.
      routers: names of the layers that have experts, and how many.
    """

    gemms: tuple[str, ...]
    layers: tuple[str, ...]
    routers: tuple[tuple[str, int], ...] = ()

    @classmethod
    def for_observations(cls, observed: Observations, params: PyTree) -> "Layout":
        gemms = tuple(name for gemm in observed_gemms(observed) for name in _numbered(shown(gemm.path), gemm.stacked))
        routers = tuple(("/".join(router.path[:-1]), router.experts) for router in _routers(observed))
        return cls(gemms, tuple(_gradients_by_layer(params, observed)), routers)

    @property
    def size(self) -> int:
        return self.first_share + sum(experts + len(OF_ALL_EXPERTS) for _, experts in self.routers)

    @property
    def first_share(self) -> int:
        """Where the numbers of routers begin."""
        return len(self.gemms) * len(TENSORS) * len(STATISTICS) + len(self.layers) * len(OF_GRADIENT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagnostics:
    """How the tensors of a step were cast, and its gradients by layer, as one array on the device; `rows()` reads it.

    `step(state, batch, diagnose=True)` and `step.diagnose(state, batch)` return it.

    Args:
      values: f32[size].
      layout: what each number means; static.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, tx = fp8.Dense(16, recipe=fp8.CurrentScaling()), fp8.fused_adamw(1e-3)
      >>> step = fp8.make_train_step(lambda variables, x: jnp.mean(layer.apply(variables, x)), tx, layer.recipe)
      >>> state = step.init_state(layer.init, jax.random.key(0), jnp.ones((16, 16)))
      >>> rows = step.diagnose(state, jnp.ones((16, 16))).rows()
      >>> [row["tensor"] for row in rows["tensors"]], rows["tensors"][0]["amax"]
      (['input', 'kernel', 'output_gradient'], 1.0)
    """

    values: jax.Array
    layout: Layout = field(metadata={"static": True})

    @classmethod
    def from_step(
        cls,
        observed: Observations,
        measured: jax.Array,
        params: PyTree,
        fp8_state: Mapping,
        gradients: PyTree,
    ) -> "Diagnostics":
        """Make the diagnostics of a step.

        Args:
          observed: the GEMMs and routers that the step measured.
          measured: by its passes: statistics of inputs and output gradients, then the use of experts.
          params, fp8_state: before the step.
          gradients: like the params.

        Returns:
          The diagnostics.
        """
        gemms = observed_gemms(observed)
        health, of_routers = measured[: _size(gemms)].reshape(-1, *HEALTH), measured[_size(gemms) :]
        kernels = [_kernel_health(gemm, params, fp8_state).reshape(-1, len(STATISTICS)) for gemm in gemms]
        tensors = health
        if kernels:
            by_tensor = {
                **dict(zip(OBSERVED, jnp.moveaxis(health, 1, 0), strict=True)),
                KERNEL: jnp.concatenate(kernels),
            }
            tensors = jnp.stack([by_tensor[tensor] for tensor in TENSORS], axis=1)
        by_layer = _gradients_by_layer(gradients, observed)
        norms = [jnp.stack(_norm_and_nonfinite(leaves)) for leaves in by_layer.values()]
        layout = Layout.for_observations(observed, params)
        return cls(jnp.concatenate([tensors.reshape(-1), *norms, of_routers]), layout)

    def rows(self) -> dict[str, list[Row]]:
        """Read the diagnostics as dicts for JSON; waits for the device. Numbers that are not finite are None.

        Returns:
          Lists of rows, each a dict, under these names.

          "tensors": three rows for each GEMM, in program order: "layer", "tensor" ("input", "kernel" or
            "output_gradient"), "amax", "scale", "headroom" (`fp8_max * scale / amax`; below 1 the tensor was too large
            for its scale), "saturated", "underflowed", "nonfinite" (shares of its elements) and "error" (relative root
            mean square error of the cast). Several microbatches, uses or devices of a tensor make one row, with the
            worst number of each kind. Numbers that could not be measured, as under `jax.vmap`, are None.
          "gradients": one row for each layer, the module that owns the params: "norm" of the finite elements, and
            "nonfinite", how many elements are not.
          "experts", where there are any: one row for each layer, with "fractions", the share of all tokens that the
            router sends to each expert; "dropped", the share of the choices of tokens that a capacity dropped; and
            "entropy" of the router's scores, the mean over tokens, 1 where all experts are alike. Each is the largest
            over microbatches.
        """
        values = np.asarray(self.values, np.float64)
        count = len(self.layout.gemms) * len(TENSORS)
        tensors = values[: count * len(STATISTICS)].reshape(count, len(STATISTICS))
        names = [(layer, tensor) for layer in self.layout.gemms for tensor in TENSORS.values()]
        norms = values[count * len(STATISTICS) : self.layout.first_share].reshape(-1, len(OF_GRADIENT))
        experts, first = [], self.layout.first_share
        for layer, count in self.layout.routers:
            end = first + count + len(OF_ALL_EXPERTS)
            numbers = [_finite(number) for number in values[first:end]]
            of_all = dict(zip(OF_ALL_EXPERTS, numbers[count:], strict=True))
            experts.append({"layer": layer, "fractions": numbers[:count], **of_all})
            first = end
        return {
            "tensors": [_tensor_row(*name, row) for name, row in zip(names, tensors, strict=True)],
            "gradients": [
                {"layer": layer, "norm": _finite(norm), "nonfinite": int(count)}
                for layer, (norm, count) in zip(self.layout.layers, norms, strict=True)
            ],
            **({"experts": experts} if experts else {}),
        }


def _tensor_row(layer: str, tensor: str, values: np.ndarray) -> Row:
    statistics = dict(zip(STATISTICS, values, strict=True))
    if not statistics["scale"]:  # the statistics of a tensor that no layer measured are zeros
        return {"layer": layer, "tensor": tensor, **dict.fromkeys(("amax", "scale", "headroom", *SHARES, "error"))}
    headroom = 1 / statistics["reach"] if statistics["reach"] else math.inf
    numbers = {"amax": statistics["amax"], "scale": statistics["scale"], "headroom": headroom}
    numbers |= {name: statistics[name] for name in (*SHARES, "error")}
    return {"layer": layer, "tensor": tensor, **{name: _finite(number) for name, number in numbers.items()}}


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _kernel_health(gemm: ObservedGemm, params: PyTree, fp8_state: Mapping) -> jax.Array:
    """STATISTICS of a GEMM's kernels, side by side, f32[*stacked, 7]; zeros of kernels that are FP8 arrays already."""
    kernels = kernels_of(gemm.path, params)
    if any(is_fp8(kernel) for kernel in kernels):
        return jnp.zeros((*gemm.stacked, len(STATISTICS)), jnp.float32)
    state = at_path(fp8_state, gemm.path)
    scales = state["scale"] if gemm.recipe.has_state and state else jnp.ones((*gemm.stacked, 3), jnp.float32)

    def statistics(scales: jax.Array, *kernels: jax.Array) -> jax.Array:
        amax = functools.reduce(jnp.maximum, map(amax_reference, kernels))
        cast = gemm.recipe.cast(KERNEL, scales if gemm.recipe.has_state else None, lambda: amax)
        if cast.rule.tile is not None:  # a shard may end in the middle of a tile, so tiles are those of whole kernels
            kernels = tuple(whole(kernel) for kernel in kernels)
        return measure(lambda *rows: rows, kernels, cast_reference(jnp.concatenate(kernels, axis=1), cast), amax)

    for _ in gemm.stacked:
        statistics = jax.vmap(statistics)
    return statistics(scales, *kernels)


LayerLeaf = tuple[
    jax.Array, tuple[int | np.intp, ...]
]  # a leaf and the index of one layer in it, () unless layers are stacked


def _gradients_by_layer(tree: PyTree, observed: Observations) -> dict[str, list[LayerLeaf]]:
    """The leaves of each layer, the module that owns them; layer_10 comes after layer_9."""
    stacks = {gemm.path[0]: gemm.stacked for gemm in observed_gemms(observed) if gemm.path and gemm.stacked}
    by_layer: dict[str, list[LayerLeaf]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_fp8):
        names = names_of(path)
        stacked = stacks.get(names[0], ())
        if leaf.shape[: len(stacked)] != stacked:
            stacked = ()
        for number, name in enumerate(_numbered(names[:-1] or names, stacked)):
            by_layer.setdefault(name, []).append((leaf, np.unravel_index(number, stacked) if stacked else ()))
    return dict(
        sorted(by_layer.items(), key=lambda item: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", item[0])])
    )


def _norm_and_nonfinite(leaves: Sequence[LayerLeaf]) -> tuple[jax.Array, jax.Array]:
    """The norm of the finite elements, and how many elements are not finite."""
    squares, count = jnp.float32(0), jnp.float32(0)
    for leaf, index in leaves:
        gradient = leaf[index].astype(jnp.float32)
        is_finite = jnp.isfinite(gradient)
        numbers = jnp.where(is_finite, gradient, 0) ** 2, (~is_finite).astype(jnp.float32)
        of_leaf = lax.reduce(numbers, (np.float32(0),) * 2, _add, range(gradient.ndim))  # one pass over it, not two
        squares, count = _add((squares, count), of_leaf)
    return jnp.sqrt(squares), count


def _add(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return one[0] + other[0], one[1] + other[1]


def _numbered(path: LayerPath, stacked: tuple[int, ...]) -> Iterator[str]:
    """The name of a layer, or of each of the layers that are stacked there: "block[0]", "block[1]"."""
    name = "/".join(map(str, path)) or "model"
    if not stacked:
        yield name
    for index in np.ndindex(*stacked) if stacked else ():
        yield f"{name}[{', '.join(map(str, index))}]"
