"""Casts of the tensors of a GEMM: the input in the forward pass, the output gradient in the backward.

    x ─cast→ FP8 ─gather→ rows of all devices        dy ─cast→ FP8, column sums ─gather→ rows of all devices

Statistics of casts (core/health.py) are measured here, where a tensor and its values in FP8 are both at hand: on this
device's own rows, before the gather.
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
from jax_fp8.kernels import few_rows_gemm
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.few_rows import FewRows, is_alone
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
    """The input (m, k) of a GEMM in FP8, its cast, and the statistics f32[STATISTICS] of the cast, or None."""

    pair: Fp8Pair
    cast: Cast
    health: jax.Array | None = None

    @classmethod
    def from_cast(
        cls,
        source_of: Callable[..., jax.Array],
        tensors: Sequence[jax.Array],
        pair: Fp8Pair,
        cast: Cast,
        gemm: Fp8Gemm,
    ) -> "GemmInput":
        """Measured, if statistics are asked for: `pair` is the cast of `source_of(*tensors)`, each row of which depends
        on the same row of the tensors alone.
        """
        return cls(pair, cast, gemm.observe(lambda *rows: (source_of(*rows),), tensors, pair))

    def gathered(self, tensor: TensorParallel | None, keep: bool = True) -> "GemmInput":
        """With the rows of all devices; see `gather_pair`."""
        return replace(self, pair=gather_pair(self.pair, tensor, keep))


def few_rows(rows: FewRows, gemm: Fp8Gemm, measure: Callable[[], jax.Array]) -> GemmInput | None:
    """Rows as an input that the GEMM's kernel prepares, for a pass without a backward; None where it does not.
    `measure()` is their amax: what a caller does not use is not computed.
    """
    fits = rows.fits(few_rows_gemm.KERNEL_ROWS) and is_alone()
    if not fits or gemm.amax_axes or CAST_STATISTICS in gemm.record.measured:
        return None
    assert rows.cast is not None, "an FP8 GEMM casts"
    return GemmInput(Fp8Pair(rows, None, measure()), rows.cast)


def quantize_input(x: jax.Array, gemm: Fp8Gemm, keep: bool, forward_only: bool = False) -> GemmInput:
    """An input (m, k), with `keep` in both orientations. With `forward_only` its cast may be left to the GEMM."""
    measure = partial(amax, x)
    cast = gemm.cast(INPUT, measure)
    if forward_only and (found := few_rows(FewRows(x, cast), gemm, measure)) is not None:
        return found
    pair = (quantize_transpose if keep else quantize_rowwise)(x, cast)
    return GemmInput.from_cast(lambda rows: rows, (x,), pair, cast, gemm)


def observe_gradient(
    sources_of: Callable[..., Sequence[jax.Array]], tensors: Sequence[jax.Array], pair: Fp8Pair, gemm: Fp8Gemm
) -> None:
    """Record the statistics of an output gradient's cast, if they are asked for; arguments as in `measure`."""
    gemm.record.measure(CAST_STATISTICS, gemm.observe(sources_of, tensors, pair), OBSERVED.index(OUTPUT_GRADIENT))


def quantize_gradient(
    dy: Matrices,
    parameters_like: LinearParameters,
    gemm: Fp8Gemm,
    tensor: TensorParallel | None = None,
    keep: bool = True,
) -> tuple[Fp8Pair, jax.Array | None]:
    """The FP8 values of an output gradient (m, n), or of its parts side by side, and the bias gradient f32[n] from the
    same pass, or None without a bias.

    Args:
      tensor: where the GEMM's result is the output of a split layer. With sequence parallelism `dy` has this device's
        own rows, and the bias gradient is their sum. The pair has the rows of all devices.
      keep: whether both orientations are needed. Without a bias False leaves the transpose out.
    """
    cast = gemm.cast(OUTPUT_GRADIENT, partial(amax, *as_tuple(dy)))
    needs_rows_alone = not keep or (tensor is not None and tensor.sequence) or parameters_like.is_frozen
    if parameters_like.bias is not None:
        pair, sums = quantize_transpose_sums(dy, cast)
    elif needs_rows_alone and len(as_tuple(dy)) == 1:
        (own,) = as_tuple(dy)
        pair, sums = quantize_rowwise(own, cast), None
    else:
        pair, sums = quantize_transpose(dy, cast), None
    observe_gradient(lambda *rows: rows, as_tuple(dy), pair, gemm)
    return gather_pair(pair, tensor, keep), sums
