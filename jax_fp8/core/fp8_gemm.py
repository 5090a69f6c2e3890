"""One GEMM as an op sees it: its recipe, its scales, its weight where that is cast already, and the way out for amaxes.

layer ─Fp8Gemm→ op: casts by `Fp8Gemm.cast`, multiplies
                └ its backward hands the amaxes to `Fp8Gemm.record_backward` → `Record` → Refs
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.batching import shared_amaxes
from jax_fp8.core.cast import Cast
from jax_fp8.core.deferral import Deferral
from jax_fp8.core.formats import INPUT, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.health import measure
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.reach import note_rows
from jax_fp8.core.recipe import Recipe, accumulation
from jax_fp8.core.shards import largest_amax

OBSERVED = INPUT, OUTPUT_GRADIENT  # tensors that only a pass can measure; a kernel is also known outside of it
CAST_STATISTICS = "cast_statistics"  # the measurement f32[2, STATISTICS] of the casts of these two


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientSum:
    """Gradient accumulation in place: the wgrad GEMM itself computes `ref += weight * gradient`.

    Args:
      refs: Refs of f32[k, n_i], one for each of the kernels side by side; of experts f32[experts, k, n_i].
      weight: of this microbatch's gradient in the sum; static.
    """

    refs: tuple[jax.Ref, ...]
    weight: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AmaxCotangent:
    """The way out where a backward pass cannot write to a Ref: amaxes leave as the cotangent of a vector.

    Args:
      vector: (rows,), the rows of all GEMMs, in a dtype whose sums are maxima: so a layer that is used twice
        leaves the larger of its two amaxes.
      first_row: the first row of this GEMM; static.
    """

    vector: jax.Array
    first_row: int = field(metadata={"static": True})

    def with_amaxes(self, amaxes: jax.Array, slot: jax.Array | None) -> "AmaxCotangent":
        """The cotangent with the amaxes f32[3] in the rows of this GEMM, of stacked layers in those of `slot`."""
        first = self.first_row + (0 if slot is None else 3 * slot)
        row = jnp.arange(self.vector.size) - first
        is_own = (row >= 0) & (row < 3)
        cotangent = jnp.where(is_own, amaxes[jnp.clip(row, 0, 2)], 0)
        shared = lax.convert_element_type(self.vector, jnp.float32)
        return replace(self, vector=lax.convert_element_type(shared_amaxes(shared, cotangent), self.vector.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Record:
    """Where one GEMM writes amaxes, kernel gradients and measurements while gradients are taken.

    Args:
      amax_ref: Ref of f32[..., 3] that collects amaxes by maximum; None where there is no state.
      slot: this layer's row of a Ref that stacked layers share, else None.
      gradient: takes the kernel's gradient, which the backward then does not return; else None.
      cotangent: takes the amaxes of a backward in place of the Ref, else None.
      deferral: takes the operands of the wgrad GEMM, which the backward then does not run; else None.
      measured: the measurements that the caller asks for: by name a Ref of f32[..., *shape] that collects them by
        maximum.
      path: the path of the GEMM in the state, where the caller asks which rows a pass stages; static.
    """

    amax_ref: jax.Ref | None = None
    slot: jax.Array | None = None
    gradient: GradientSum | None = None
    cotangent: AmaxCotangent | None = None
    deferral: Deferral | None = None
    measured: dict[str, jax.Ref] = field(default_factory=dict)
    path: LayerPath | None = field(default=None, metadata={"static": True})

    def amaxes(self, amaxes: jax.Array) -> None:
        """Raise the first rows of the Ref to the amaxes f32[rows], once or several times; without a Ref, do nothing."""
        if self.amax_ref is None:
            return
        rows = slice(0, amaxes.shape[0])
        index = rows if self.slot is None else (self.slot, rows)
        self.amax_ref[index] = jnp.maximum(self.amax_ref[index], amaxes)

    def measure(self, name: str, numbers: jax.Array | None, *row: int) -> None:
        """Raise a measurement, or a row of it, to these numbers. Without a request for it, or numbers, do nothing."""
        if numbers is None or name not in self.measured:
            return
        ref, index = self.measured[name], (*row,) if self.slot is None else (self.slot, *row)
        ref[index or ...] = jnp.maximum(ref[index or ...], lax.stop_gradient(numbers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Gemm:
    """All that a layer tells a composite op about one of its GEMMs.

    Args:
      recipe: static.
      layer: the layer's path, for error messages; static.
      scales: f32[3] (input, kernel, output gradient) of the state; None for a recipe without state, and where every
        tensor is scaled by its own amax.
      record: takes the amaxes of the pass.
      weight: the kernel where it has been cast already, else None.
      is_recorded: whether the amax of the output gradient reaches the state; static.
      amax_axes: mesh axes that split the tensors, so that an amax is a maximum over them; static.
      unused: rows of the state for tensors that this GEMM does not have; static.
    """

    recipe: Recipe = field(metadata={"static": True})
    layer: str = field(metadata={"static": True})
    scales: jax.Array | None = None
    record: Record = Record()
    weight: Fp8Pair | None = None
    is_recorded: bool = field(default=True, metadata={"static": True})
    amax_axes: tuple[str, ...] = field(default=(), metadata={"static": True})
    unused: tuple[int, ...] = field(default=(), metadata={"static": True})

    def cast(self, tensor: int, measure: Callable[[], jax.Array]) -> Cast:
        """How INPUT, KERNEL or OUTPUT_GRADIENT is cast; `measure` finds its amax f32[], for a recipe that asks for it.

        An output gradient whose amax reaches no state is scaled by its own amax: its history would stay empty, and with
        the initial scale of 1 the gradient would vanish.
        """
        scales = self.scales
        if tensor == OUTPUT_GRADIENT and scales is not None and not self.is_recorded:
            _warn_unrecorded()
            scales = None
        return self.recipe.cast(tensor, scales, lambda: largest_amax(measure(), self.amax_axes))

    def accumulation(self, gemm: str) -> str:
        """How "fprop", "dgrad" or "wgrad" accumulates, as `matmul` takes it."""
        return accumulation(self.recipe, gemm)

    def observe(
        self, sources_of: Callable[..., Sequence[jax.Array]], tensors: Sequence[jax.Array], pair: Fp8Pair
    ) -> jax.Array | None:
        """How a tensor was cast, f32[STATISTICS], or None where the caller does not ask for it. The arguments are those
        of `measure`. Where the two orientations have different tiles, the result is the worse of both.
        """
        if CAST_STATISTICS not in self.record.measured:
            return None
        statistics = measure(sources_of, tensors, pair.rowwise, pair.amax)
        if pair.columnwise is None or pair.columnwise.T.granularity == pair.rowwise.granularity:
            return statistics
        return jnp.maximum(statistics, measure(sources_of, tensors, pair.columnwise.T, pair.amax))

    def record_forward(self, amaxes: jax.Array) -> None:
        """Record the amaxes f32[2] of a forward pass, where the record has no slot. The backward records them again: of
        a layer in a scan, in a branch or under `jax.vmap`, it alone does.
        """
        if self.record.slot is None:
            self._note_rows(amaxes.shape[0])
            self.record.amaxes(lax.stop_gradient(amaxes))

    def record_backward(self, amaxes: jax.Array) -> "Fp8Gemm | None":
        """Record the amaxes f32[3] of a backward pass.

        Returns:
          The cotangent of this value, as the backward of a `custom_vjp` returns it.
        """
        self._note_rows(amaxes.shape[0])
        if self.record.cotangent is None:
            self.record.amaxes(amaxes)
            return None
        cotangent = self.record.cotangent.with_amaxes(amaxes, self.record.slot)
        return replace(self, scales=None, record=Record(cotangent=cotangent, path=self.record.path), weight=None)

    def _note_rows(self, count: int) -> None:
        """Note that the first rows are staged, for `reached_rows`."""
        if self.record.amax_ref is not None or self.record.cotangent is not None:
            note_rows(self.record.path, [row for row in range(count) if row not in self.unused])

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.layer.rsplit("/", 1)[-1]


@functools.cache
def _warn_unrecorded() -> None:
    warnings.warn(
        "delayed scaling is differentiated without jax_fp8.value_and_grad, so output gradients are scaled by their own "
        "amax: right, but one more read of each; differentiate with jax_fp8.value_and_grad, in NNX with "
        "jax_fp8.nnx.value_and_grad, or train with jax_fp8.make_train_step",
        stacklevel=2,
    )
