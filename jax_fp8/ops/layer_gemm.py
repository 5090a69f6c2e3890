"""From a layer, of any library, to the `Fp8Gemm` that a composite op takes beside the parameters: how to quantize.

recipe, scales, recorder, cached weight ─layer_gemm→ Fp8Gemm ─linear, norm_linear, norm_mlp→ result
"""

import math

import jax
import jax.numpy as jnp

from jax_fp8.core.checks import describe
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm, Record
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.recorder import Recorder, note_recipe
from jax_fp8.core.shards import TensorParallel, current_amax_axes
from jax_fp8.core.state import check_dtype, initial_state
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.quantize import Matrices, as_tuple
from jax_fp8.ops.parameters import LinearParameters


def layer_gemm(
    layer: str,
    recipe: Recipe,
    parameters: LinearParameters,
    scales: jax.Array | None = None,
    recorder: Recorder | None = None,
    weight: Fp8Pair | None = None,
) -> Fp8Gemm:
    """How the composite ops quantize the GEMM of a layer.

    Args:
      layer: its path, for messages.
      scales: f32[3] of its state; None for a recipe without state.
      recorder: the recorder that `value_and_grad` put beside the state; None outside of it.
      weight: the kernel in FP8, from a weight cache, or frozen.
    """
    check_dtype(layer, scale=scales)
    note_recipe(layer, recipe)
    record = Record()
    if recorder is not None:
        record = recorder.record
        scales = None if recorder.from_current else scales
    if weight is not None:
        _check_weight(layer, recipe, parameters, weight)
    return Fp8Gemm(recipe, layer, scales, record, weight, recorder is not None, current_amax_axes())


def first_state(recipe: DelayedScaling, kernels: Matrices) -> dict[str, jax.Array]:
    """The state of a GEMM before its first pass, from its kernels (k, n_i) side by side; () for a GEMM without one."""
    amaxes = [amax_reference(kernel) for kernel in as_tuple(kernels)] or [jnp.float32(0)]
    return initial_state(recipe, jnp.max(jnp.stack(amaxes)))


def check_multiples_of_16(
    layer: str, rows: int, columns: tuple[int, ...], tensor: TensorParallel | None = None
) -> None:
    """Raise unless an FP8 GEMM can take kernels (rows, columns_i) side by side."""
    of_each = "" if tensor is None else f" on each device of {tensor.axis}={tensor.size}"
    for side, size in [("in", rows), *(("out", width) for width in columns)]:
        if size % 16:
            raise ValueError(
                f"{layer}: FP8 needs {side} features divisible by 16{of_each}, got {size}; "
                "pad them, or leave this layer in bfloat16 with recipe=None"
            )


def _check_weight(layer: str, recipe: Recipe, parameters: LinearParameters, cached: Fp8Pair) -> None:
    shape = as_tuple(parameters.kernel)[0].shape[0], sum(parameters.widths)
    dtype = recipe.fp8_format.forward
    if parameters.is_frozen:
        check_frozen(layer, parameters, cached, dtype)
        return
    *experts, k, n = cached.rowwise.shape  # of experts in the one form or the other
    found = (math.prod(experts) * k, n), cached.columnwise.shape, cached.rowwise.dtype
    if found != (shape, (*experts, n, k), dtype):
        raise ValueError(
            f"{layer}: the weight cache must hold {jnp.dtype(dtype).name} of shape {shape} and its transpose, "
            f"got {cached.rowwise.dtype} of shapes {cached.rowwise.shape} and {cached.columnwise.shape}; "
            "make it with cast_weights from these variables"
        )


def check_frozen(layer: str, parameters: LinearParameters, weight: Fp8Pair, dtype: jax.typing.DTypeLike = E4M3) -> None:
    """Raise unless `weight` is a frozen weight of kernels with the shapes in `parameters`."""
    transposed: PyTree = weight.columnwise
    apart, rows = isinstance(transposed, tuple), as_tuple(parameters.kernel)[0].shape[0]
    parts, widths = (transposed, parameters.widths) if apart else ((transposed,), (sum(parameters.widths),))
    for part, width in zip(parts, widths, strict=True):
        _check_transpose(layer, (width, rows), dtype, part)


def _check_transpose(layer: str, shape: tuple[int, int], dtype: jax.typing.DTypeLike, found: Fp8Array) -> None:
    if not isinstance(found, Fp8Array) or (found.shape, found.dtype) != (shape, dtype):
        arrived = f"{found.dtype} of shape {found.shape}" if isinstance(found, Fp8Array) else describe(found)
        raise ValueError(
            f"{layer}: a frozen weight must be {jnp.dtype(dtype).name} of shape {shape}, got {arrived}; make it "
            "with freeze_kernels from the params and the recipe of this model"
        )
