"""Loaded params as variables with weights frozen in FP8 (core/frozen.py).

    params ─kernels of one GEMM at a time→ device ─cast→ fp8_frozen        the rest ─as it is→ params

A device holds the kernels of one GEMM in their own dtype for the moment of their cast, and no others.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, kernel_paths, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.reader import gemms_of
from jax_fp8.ops.weights import frozen_weight


def frozen_variables(config: GPTConfig, params: Mapping, recipe: Recipe) -> dict[str, PyTree]:
    """The variables of params, best in the host's memory, with the kernels of each GEMM cast by `recipe` on the default
    device. Kernels of experts stay params.
    """
    left: dict[str, PyTree] = dict(params)
    frozen: dict[str, PyTree] = {}
    for gemm in gemms_of(config):
        if is_of_experts(gemm):
            continue
        kernels = [at_path(params, path) for path in kernel_paths(gemm)]
        dims, arrays = zip(*map(_put, kernels), strict=True)
        put_at_path(frozen, gemm, {"kernel": _freeze(recipe, dims, arrays)})
        for path in kernel_paths(gemm):
            left = _without(left, path)
    return {"params": left, FROZEN: frozen}


def _put(kernel: np.ndarray | jax.Array) -> tuple[str, jax.Array]:
    """A kernel (k, n) on the device, behind its dims; or its transpose, if the file has that, to copy it in order."""
    if isinstance(kernel, np.ndarray) and kernel.T.flags.c_contiguous:
        return "n k", jnp.asarray(kernel.T)
    return "k n", jnp.asarray(kernel)


@partial(jax.jit, static_argnums=(0, 1))
def _freeze(recipe: Recipe, dims: tuple[str, ...], arrays: tuple[jax.Array, ...]) -> Fp8Pair:
    kernels = [array.T if own == "n k" else array for own, array in zip(dims, arrays, strict=True)]
    return frozen_weight(recipe, tuple(kernels))


def _without(tree: Mapping, path: LayerPath) -> dict[str, PyTree]:
    name, *rest = path
    if not rest:
        return {key: child for key, child in tree.items() if key != name}
    return {**tree, name: _without(tree[name], tuple(rest))}
