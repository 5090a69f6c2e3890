"""Frozen weights: kernels that a model reads in FP8 and never trains, one byte each.

    params/<layer>/kernel ─freeze_kernels→ fp8_frozen/<gemm>/kernel, an `Fp8Pair` with the transpose (n, k) alone

The kernels of a GEMM with several are side by side in one array. A mesh axis `tensor` splits each kernel by itself, so
there they are kept apart: `fp8_frozen/<layer>/kernel`, all with the scale and the amax of the whole.

A frozen GEMM has no kernel among the params. So it has no gradient, no master and no moments, and its backward runs no
wgrad GEMM. The forward reads the transpose as it is stored. The backward transposes it once more, for dgrad.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names
from jax_fp8.core.types import Variables

FROZEN = "fp8_frozen"  # the collection


@jax.tree_util.register_static
@dataclass(frozen=True)
class FrozenKernel:
    """Stands among the parameters of a GEMM for a kernel (k, n) whose weight is frozen. It has a shape and no array, so
    it is its own cotangent.
    """

    shape: tuple[int, int]

    @property
    def columns_over(self) -> tuple[str, ...]:
        """As `ParamInfo.columns_over`: no mesh axis splits a frozen weight."""
        return ()


def frozen_weight(collection: Mapping, gemm: LayerPath) -> Fp8Pair | None:
    """The frozen weight of a GEMM, or None if it is not frozen. Of kernels that are kept apart, `columnwise` is a tuple
    of their transposes (n_i, k).
    """
    whole = at_path(collection, (*gemm, "kernel"))
    if whole is not None:
        return whole
    parts = [at_path(collection, kernel) for kernel in kernel_paths(gemm)]
    if not parts or any(part is None for part in parts):
        return None
    return Fp8Pair(None, tuple(part.columnwise for part in parts), parts[0].amax)


def is_frozen(variables: Variables, gemm: LayerPath) -> bool:
    """Whether the weight of a GEMM is frozen in these variables."""
    return frozen_weight(variables.get(FROZEN, {}), gemm) is not None


def frozen_kernels(collection: Mapping) -> dict[LayerPath, Fp8Pair]:
    """The kernels that are frozen in an array of their own, by their paths among the params."""
    found: dict[LayerPath, Fp8Pair] = {}

    def note(path: LayerPath, pair: Fp8Pair) -> None:
        if kernel_paths(path[:-1]) == (path,):
            found[path] = pair

    map_with_names(note, collection, is_leaf=lambda node: isinstance(node, Fp8Pair))
    return found
