"""The input of a product of few rows before it is normalized and cast: the call of the product does both.

    x ─normalize, round to bfloat16, cast→ a ─product→ d        in one call: csrc/few_rows_gemm.cu

On GPUs of compute capability 9.0 a kernel prepares up to 64 rows, and the product begins while it runs: its first
weights are on their way by the time the rows are there. Elsewhere every block of the product's kernel prepares all rows
again, up to 8 of them. Only a pass without a backward may do so: nothing is kept of `a`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import Cast, CastRule
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.extension import compiled_for
from jax_fp8.kernels.gemm_parts import Tiles
from jax_fp8.kernels.norm import NormParameters, normalize

# The most rows that the kernel prepares: in each of its blocks, and in one before, of which norms have a largest k. As
# in csrc/device/few_rows_gemm_plan.cuh.
PREPARED_ROWS, WARPGROUP_ROWS, NORMALIZED_DEPTH = 8, 64, 16384
# Shared memory of a block in bytes: on GPUs for data centers, and on others. Of it the smallest ring of weights, bias
# and c, and what a tail is rounded up by.
LARGE, SMALL, OTHERS = 227 * 1024, 99 * 1024, 25 * 1024
_weights_are_split = jax.make_user_context(default_value=False)


def for_devices(count: int, function: Callable) -> Callable:
    """A function that is traced for so many devices, which may split the weights. A product with norm, gates or parts
    would gather its weight for every token, so for several devices none is made.
    """

    def traced(*arrays: PyTree) -> PyTree:
        with _weights_are_split(count > 1):
            return function(*arrays)

    return traced


def device_count(arrays: PyTree) -> int:
    """How many devices may split these arrays, traced ones too. What is in a `jax.shard_map` is split already."""

    def count(array: jax.Array) -> int:
        mesh = jax.typeof(array).sharding.mesh
        return math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)

    return max(map(count, jax.tree.leaves(arrays)), default=1)


def is_alone() -> bool:
    """Whether no devices split the weights, as far as the context says."""
    return not _weights_are_split.value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FewRows:
    """Rows (m, k) of a GEMM's input as they are before.

    Args:
      x: (m, k) in bfloat16.
      cast: to E4M3 with one scale that is known; None multiplies in bfloat16.
      norm: of the rows, before the cast; None: none.
      epsilon: of the norm; static.
    """

    x: jax.Array
    cast: Cast | None
    norm: NormParameters | None = None
    epsilon: float = field(default=0.0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def scale(self) -> jax.Array:
        """Of the cast, f32[]."""
        return jnp.float32(1) if self.cast is None else scale_of(self.cast)

    def fits(self, most_rows: int) -> bool:
        """Whether the kernel can prepare these rows."""
        (m, k), rule = self.x.shape, self.cast and self.cast.rule
        is_known = rule is None or (rule.dtype == E4M3 and rule.tile is None and rule.formula is None)
        if rule is not None and has_warpgroups() and (self.norm is None or k <= NORMALIZED_DEPTH):
            return is_known and self.x.dtype == jnp.bfloat16 and m <= min(most_rows, WARPGROUP_ROWS)
        # The rows in bfloat16 and as they are multiplied; and scale and bias of a norm in float32.
        needed = m * k * (4 if rule is None else 3) + 8 * k * (self.norm is not None) + OTHERS
        is_few = m <= min(most_rows, PREPARED_ROWS) and needed <= shared_bytes()
        return is_known and self.x.dtype == jnp.bfloat16 and is_few


def shared_bytes() -> int:
    """The shared memory of a block on this machine's GPU."""
    return LARGE if _compute_capability() in ("9.0", "10.0", "10.3") else SMALL


def has_warpgroups() -> bool:
    """Whether warpgroups multiply E4M3 on this machine's GPU (csrc/device/few_rows_gemm_warpgroups.cuh): a build for 90
    alone, without the "a", has no code for them.
    """
    return _compute_capability() == "9.0" and compiled_for("90a")


def _compute_capability() -> str:
    """Of this machine's GPU; where there is none, of an H100."""
    return getattr(jax.devices()[0], "compute_capability", "9.0")


def scale_of(cast: Cast) -> jax.Array:
    """The scale f32[] of a cast with a known one."""
    return cast.rule.scale(cast.source[cast.rule.row] if cast.source.ndim else cast.source)


def prepare_reference(
    x: jax.Array, scale: jax.Array | None, norm: NormParameters | None, epsilon: float
) -> Fp8Array | jax.Array:
    """The rows as they are multiplied: in E4M3 by the scale, without one in the dtype of `x`."""
    if norm is not None:
        x = normalize(x, norm, epsilon, x.dtype)[0]
    return x if scale is None else Fp8Array(quantize_reference(x, E4M3, scale), scale)


@dataclass(frozen=True)
class Around:
    """What is around a product, and which operands it has. `norm`, `activation`: or ""."""

    dtype: np.dtype
    has_bias: bool
    has_c: bool
    tiles: Tiles
    norm: str
    epsilon: float
    cast: CastRule | None
    activation: str
    widths: tuple[int, ...]

    @property
    def gated(self) -> bool:
        return self.activation != "" and is_gated(self.activation)

    @property
    def part_starts(self) -> tuple[int, int]:
        """Where the second and the third part begin; 0 without one."""
        second, third = (*accumulate(self.widths[:-1]), 0, 0)[:2]
        return second, third
