"""The three products of a language model's head, in the dtype of its input or in FP8.

    logits[m, v] = x[m, h] · weight[v, h]ᵀ    dx[m, h] = dlogits[m, v] · weight
    dweight[v, h] = dlogitsᵀ · x, added up in float32

Where a `tensor` axis splits the vocabulary, a part of the input is this device's own rows, and its operand has the rows
of all devices (ops/collectives.py).

In FP8 the weight and the input are scaled by their own amaxes, of the whole tensor or by tile, so there is no state.
The gradient of the logits needs no amax: softmax minus one-hot is at most 1 in magnitude, and E5M2 reaches 2**-30 below
that. Its products use split accumulation: a row has one element near -1 beside tens of thousands near 1e-5, and fast
accumulation drops terms that are 2**-13 below a partial sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.recipe import Recipe, accumulation, check_recipe
from jax_fp8.core.shards import TensorParallel, largest_amax
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.explicit import einsum
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose
from jax_fp8.kernels.weight_gradient import after, weight_gradient
from jax_fp8.ops.capped import capped
from jax_fp8.ops.collectives import gather_pair, gather_rows, gathered_columns, reduce_rows
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.ops.passes import cast_weight, plain_linear

PLAIN_HEAD_SCOPE = "bfloat16_head"


Operand = TypeVar("Operand")


class Head(Protocol[Operand]):
    """The products that a loss by chunks needs."""

    def operand(self, x: jax.Array) -> Operand:
        """A part of the input (batch, seq, hidden) in the form that the products take."""
        ...

    def logits(self, x: Operand) -> jax.Array:
        """(batch, seq, vocab) of an operand."""
        ...

    def gradients(
        self, dlogits: jax.Array, x: Operand, total: jax.Array | None, bound: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The gradient of the input (batch, seq, hidden), and `total` plus the gradient of the weight.

        Args:
          dlogits: (batch, seq, vocab), with no magnitude above `bound`, f32[].
          total: f32[vocab, hidden], or None for zero.
        """
        ...


@dataclass(frozen=True)
class PlainHead:
    """Products in one dtype; `weight` (vocab, hidden)."""

    weight: jax.Array
    tensor: TensorParallel | None = None

    def operand(self, x: jax.Array) -> jax.Array:
        return _of_all_rows(x.shape[:-1], self.tensor, gather_rows(as_matrix(x), self.tensor)) if self.tensor else x

    def logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope(PLAIN_HEAD_SCOPE):
            return einsum("b s h, v h -> b s v", x, self.weight)

    def gradients(
        self, dlogits: jax.Array, x: jax.Array, total: jax.Array | None, bound: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope(PLAIN_HEAD_SCOPE):
            total, dlogits = after(weight_gradient(dlogits, x, total), dlogits)
            return _of_own_rows(einsum("b s v, v h -> b s h", dlogits, self.weight), self.tensor), total


def _of_all_rows(leading: tuple[int, ...], tensor: TensorParallel, rows: jax.Array) -> jax.Array:
    return rows.reshape(*tensor.all_rows(leading), -1)


def _of_own_rows(partial_sums: jax.Array, tensor: TensorParallel | None) -> jax.Array:
    """The sum (batch, seq, hidden) over the devices, of their own rows with sequence parallelism."""
    if tensor is None:
        return partial_sums
    rows = reduce_rows(as_matrix(partial_sums), tensor)
    return rows.reshape(*tensor.own_rows(partial_sums.shape[:-1]), -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Operand:
    """A part of the input (batch, seq, hidden), as rows (m, hidden) in FP8."""

    rows: Fp8Pair
    leading: tuple[int, ...] = field(metadata={"static": True})


@dataclass(frozen=True)
class Fp8Head:
    """Products in FP8 with results in `dtype`; the weight (vocab, hidden), and how the input is cast."""

    weight: Fp8Pair
    input_cast: Cast
    recipe: Recipe
    dtype: jax.typing.DTypeLike
    tensor: TensorParallel | None = None

    def operand(self, x: jax.Array) -> Fp8Operand:
        if self.tensor is None or not self.tensor.sequence:
            return Fp8Operand(quantize_transpose(as_matrix(x), self.input_cast), x.shape[:-1])
        rows = gather_pair(quantize_rowwise(as_matrix(x), self.input_cast), self.tensor)
        return Fp8Operand(rows, self.tensor.all_rows(x.shape[:-1]))

    def logits(self, x: Fp8Operand) -> jax.Array:
        how = accumulation(self.recipe, "fprop")
        return matmul(x.rows.rowwise, self.weight.rowwise, dtype=self.dtype, accumulation=how).reshape(*x.leading, -1)

    def gradients(
        self, dlogits: jax.Array, x: Fp8Operand, total: jax.Array | None, bound: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        cast = self.recipe.cast(OUTPUT_GRADIENT, None, lambda: bound)
        quantized = quantize_transpose(as_matrix(dlogits), cast)
        total = matmul(quantized.columnwise, x.rows.columnwise, c=total, dtype=jnp.float32, accumulation="split")
        total, values = after(total, quantized.rowwise.values)
        dx = matmul(
            replace(quantized.rowwise, values=values), self.weight.columnwise, dtype=self.dtype, accumulation="split"
        )
        return _of_own_rows(dx.reshape(*x.leading, -1), self.tensor), total


def make_head(
    x: jax.Array,
    weight: jax.Array,
    recipe: Recipe | None,
    tensor: TensorParallel | None = None,
    amax_axes: tuple[str, ...] = (),
) -> Head:
    """The head with a `weight` (vocab, hidden), for all parts of `x` (batch, seq, hidden).

    Args:
      tensor: the axis that splits the vocabulary, or None.
      amax_axes: mesh axes that split x or weight, over which an amax is a maximum.
    """
    if recipe is None:
        return PlainHead(weight.astype(x.dtype), tensor)
    input_cast = recipe.cast(INPUT, None, lambda: largest_amax(amax(x), amax_axes))

    def cast_of(measure: Callable[[], jax.Array]) -> Cast:
        return recipe.cast(KERNEL, None, lambda: largest_amax(measure(), amax_axes))

    return Fp8Head(cast_weight(weight, cast_of), input_cast, recipe, x.dtype, tensor)


def compute_logits(
    x: jax.Array,
    weight: jax.Array,
    recipe: Recipe | None,
    tensor: TensorParallel | None = None,
    amax_axes: tuple[str, ...] = (),
) -> jax.Array:
    """The logits (batch, seq, vocab) of `x` (batch, seq, hidden) and `weight` (vocab, hidden), differentiable, always
    of the whole vocabulary. `tensor` and `amax_axes` as in `make_head`.
    """
    if recipe is None and tensor is None:
        return PlainHead(weight.astype(x.dtype)).logits(x)
    parameters = LinearParameters(weight.T, None)
    if recipe is None:
        return gathered_columns(plain_linear(x, parameters, x.dtype, tensor=tensor, split_dim="columns"), tensor)
    check_head(x.size // x.shape[-1], weight.shape[0], weight.shape[1], recipe)
    gemm = Fp8Gemm(recipe, "head", amax_axes=amax_axes)
    return gathered_columns(linear(x, parameters, gemm, x.dtype, tensor=tensor, split_dim="columns")[0], tensor)


def finished_logits(logits: jax.Array, divisor: float = 1.0, cap: float | None = None) -> jax.Array:
    """Logits divided, and between -cap and cap, as `cap * tanh(logits / cap)`; computed in float32 and rounded once."""
    if divisor == 1 and cap is None:
        return logits
    return capped(logits.astype(jnp.float32) / divisor, cap).astype(logits.dtype)


def unfinished_gradient(dlogits: jax.Array, logits: jax.Array, divisor: float, cap: float | None) -> jax.Array:
    """The gradient of `logits`, from that of `finished_logits(logits)`. The slope of the cap comes from the logits
    before it: near the cap, the rounded result no longer has it.
    """
    if divisor == 1 and cap is None:
        return dlogits
    slope = 1.0 if cap is None else 1 - jnp.square(jnp.tanh(logits.astype(jnp.float32) / (divisor * cap)))
    return (dlogits.astype(jnp.float32) * (slope / divisor)).astype(dlogits.dtype)


def check_head(tokens: int, vocab: int, hidden: int, recipe: Recipe | None) -> None:
    """Raise unless this recipe can compute the head in chunks of `tokens` tokens."""
    check_recipe(recipe)
    if recipe is None:
        return
    if recipe.has_state:
        raise ValueError(
            f"the head needs CurrentScaling(), BlockScaling() or None, got {recipe!r}; "
            "a head keeps no amax history, whatever recipe the layers have"
        )
    if not {"dgrad", "wgrad"} <= set(recipe.split_accumulator):
        raise ValueError(
            'the head needs "dgrad" and "wgrad" in split_accumulator, '
            f"got {recipe.split_accumulator}; fast accumulation loses most of its small gradients: leave the default"
        )
    for name, size in (("tokens in a chunk", tokens), ("vocabulary", vocab), ("hidden size", hidden)):
        if size % 16:
            raise ValueError(
                f"an FP8 head needs {name} divisible by 16, got {size}; "
                "pad, or leave the head in bfloat16 (recipe None)"
            )
