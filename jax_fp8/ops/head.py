"""The three products of a language model's head, in the dtype of its input or in FP8.

    logits[m, v] = x[m, h] · weight[v, h]ᵀ    dx[m, h] = dlogits[m, v] · weight
    dweight[v, h] = dlogitsᵀ · x, added up in float32

Where the vocabulary is split over a `tensor` axis, a part of the input is this device's own rows, and what comes of
it has the rows of all devices (see ops/collectives.py).

In FP8 the weight and the input are scaled by their own amaxes, measured once or by tile, so there is no state. The
gradient of the logits needs no measuring: a softmax differs from one-hot by at most 1, and E5M2 reaches 2**-30 below
that. Its products do not accumulate fast: a row of it has one element near -1 beside tens of thousands near 1e-5,
and fast accumulation drops what is 2**-13 below a partial sum.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
from jax_fp8.ops.collectives import gather_pair, gather_rows, gathered_columns, reduce_rows
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.ops.passes import cast_weight, plain_linear

PLAIN_HEAD_SCOPE = "bfloat16_head"


class Head(Protocol):
    """What a loss by chunks asks of a head."""

    def operand(self, x: jax.Array) -> Any:
        """A part of the input (batch, seq, hidden), as the products want it."""
        ...

    def logits(self, x: Any) -> jax.Array:
        """(batch, seq, vocab) of an operand."""
        ...

    def gradients(
        self, dlogits: jax.Array, x: Any, total: jax.Array | None, bound: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The gradient of the input (batch, seq, hidden), and `total` f32 (vocab, hidden), or zero,
        with that of the weight added.

        No element of `dlogits` (batch, seq, vocab) is larger than `bound` f32[].
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

    def gradients(self, dlogits: jax.Array, x: jax.Array, total: jax.Array | None, bound: jax.Array):
        with jax.named_scope(PLAIN_HEAD_SCOPE):
            total, dlogits = after(weight_gradient(dlogits, x, total), dlogits)
            return _of_own_rows(einsum("b s v, v h -> b s h", dlogits, self.weight), self.tensor), total


def _of_all_rows(leading, tensor, rows) -> jax.Array:
    return rows.reshape(*tensor.all_rows(leading), -1)


def _of_own_rows(partial_sums, tensor) -> jax.Array:
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
    dtype: Any
    tensor: TensorParallel | None = None

    def operand(self, x: jax.Array) -> Fp8Operand:
        if self.tensor is None or not self.tensor.sequence:
            return Fp8Operand(quantize_transpose(as_matrix(x), self.input_cast), x.shape[:-1])
        rows = gather_pair(quantize_rowwise(as_matrix(x), self.input_cast), self.tensor)
        return Fp8Operand(rows, self.tensor.all_rows(x.shape[:-1]))

    def logits(self, x: Fp8Operand) -> jax.Array:
        how = {"dtype": self.dtype, "accumulation": accumulation(self.recipe, "fprop")}
        return matmul(x.rows.rowwise, self.weight.rowwise, **how).reshape(*x.leading, -1)

    def gradients(self, dlogits: jax.Array, x: Fp8Operand, total: jax.Array | None, bound: jax.Array):
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
    """The head of a `weight` (vocab, hidden), for all parts of `x` (batch, seq, hidden).

    Args:
      tensor: the axis that splits the vocabulary, or None.
      amax_axes: those over which x or weight are in parts.
    """
    if recipe is None:
        return PlainHead(weight.astype(x.dtype), tensor)
    input_cast = recipe.cast(INPUT, None, lambda: largest_amax(amax(x), amax_axes))

    def cast_of(measure):
        return recipe.cast(KERNEL, None, lambda: largest_amax(measure(), amax_axes))

    return Fp8Head(cast_weight(weight, cast_of), input_cast, recipe, x.dtype, tensor)


def compute_logits(
    x: jax.Array,
    weight: jax.Array,
    recipe: Recipe | None,
    tensor: TensorParallel | None = None,
    amax_axes: tuple[str, ...] = (),
) -> jax.Array:
    """The logits (batch, seq, vocab) of `x` (batch, seq, hidden) and `weight` (vocab, hidden), differentiable;
    `tensor` and `amax_axes` as in `make_head`: the logits are those of the whole vocabulary.
    """
    if recipe is None and tensor is None:
        return PlainHead(weight.astype(x.dtype)).logits(x)
    parameters = LinearParameters(weight.T, None)
    if recipe is None:
        return gathered_columns(plain_linear(x, parameters, x.dtype, tensor=tensor, split_dim="columns"), tensor)
    check_head(x.size // x.shape[-1], weight.shape[0], weight.shape[1], recipe)
    gemm = Fp8Gemm(recipe, "head", amax_axes=amax_axes)
    return gathered_columns(linear(x, parameters, gemm, x.dtype, tensor=tensor, split_dim="columns")[0], tensor)


def check_head(tokens: int, vocab: int, hidden: int, recipe: Any) -> None:
    """Raise unless the head can be computed by this recipe, in parts of so many tokens."""
    check_recipe(recipe)
    if recipe is None:
        return
    if recipe.has_state:
        raise ValueError(
            f"the head needs CurrentScaling(), BlockScaling() or None, got {recipe!r}; "
            "it keeps no amax history, whatever the layers do"
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
