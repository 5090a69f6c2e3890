"""The tensors that a layer hands to its GEMMs, cast: its input in the forward pass, its output gradient in the
backward.

    x ─cast→ FP8 ─gather→ rows of all devices        dy ─cast→ FP8, column sums ─gather→ rows of all devices

Whoever asks how the casts went (core/health.py) is told here, where a tensor and its values in FP8 stand side by side:
of this device's own rows, before they are gathered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.fp8_gemm import CAST_STATISTICS, OBSERVED, Fp8Gemm
from jax_fp8.core.shards import TensorParallel
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.quantize import (
    Matrices,
    as_tuple,
    quantize_rowwise,
    quantize_transpose,
    quantize_transpose_sums,
)
from jax_fp8.ops.collectives import gather_pair
from jax_fp8.ops.parameters import LinearParameters


@dataclass(frozen=True)
class GemmInput:
    """The input (m, k) of a GEMM in FP8: how it was cast, and how that went, f32[STATISTICS], if anybody asks."""

    pair: Fp8Pair
    cast: Cast
    health: jax.Array | None = None

    @classmethod
    def of(
        cls, source_of: Callable[[jax.Array], jax.Array], x: jax.Array, pair: Fp8Pair, cast: Cast, gemm: Fp8Gemm
    ) -> "GemmInput":
        """What was cast is `source_of(x)`, row by row."""
        return cls(pair, cast, gemm.observe(lambda rows: (source_of(rows),), (x,), pair))

    def gathered(self, tensor: TensorParallel | None, keep: bool = True) -> "GemmInput":
        """With the rows of all devices, as `gather_pair` has it."""
        return replace(self, pair=gather_pair(self.pair, tensor, keep))


def quantize_input(x: jax.Array, gemm: Fp8Gemm, keep: bool) -> GemmInput:
    """An input (m, k), with `keep` in both orientations."""
    cast = gemm.cast(INPUT, partial(amax, x))
    pair = (quantize_transpose if keep else quantize_rowwise)(x, cast)
    return GemmInput.of(lambda rows: rows, x, pair, cast, gemm)


def observe_gradient(
    sources_of: Callable[..., Sequence[jax.Array]], tensors: Sequence[jax.Array], pair: Fp8Pair, gemm: Fp8Gemm
) -> None:
    """Record how an output gradient was cast, if anybody asks; arguments as `measure` has them."""
    gemm.record.measure(CAST_STATISTICS, gemm.observe(sources_of, tensors, pair), OBSERVED.index(OUTPUT_GRADIENT))


def quantize_gradient(
    dy: Matrices, parameters_like: LinearParameters, gemm: Fp8Gemm, tensor: TensorParallel | None = None
) -> tuple[Fp8Pair, jax.Array | None]:
    """An output gradient (m, n), or its parts, and the bias gradient f32[n] from the same pass,
    where there is a bias.

    Args:
      tensor: of a GEMM whose result leaves a split layer; with sequence parallelism `dy` are this device's own rows,
        and so is the bias gradient their sum. The pair has the rows of all.
    """
    cast = gemm.cast(OUTPUT_GRADIENT, partial(amax, *as_tuple(dy)))
    has_own_rows = tensor is not None and tensor.sequence
    if parameters_like.bias is not None:
        pair, sums = quantize_transpose_sums(dy, cast)
    elif has_own_rows:
        (own,) = as_tuple(dy)
        pair, sums = quantize_rowwise(own, cast), None
    else:
        pair, sums = quantize_transpose(dy, cast), None
    observe_gradient(lambda *rows: rows, as_tuple(dy), pair, gemm)
    return gather_pair(pair, tensor), sums
