"""The gradient of a 16-bit linear map's weight, added up in float32 in one buffer:
`total[n, k] + Σ dy[.., n] x[.., k]`.

XLA has this product too, but where it may choose a GEMM by timing it keeps every product of a sum until one pass adds
them all: eight parts of a GPT's head are then 3.3 GB. This one is cuBLASLt's, which adds to what is there;
the operands are read as they lie.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.kernels.dispatch import Split, dispatch, psum, split_axes
from jax_fp8.kernels.gemm import WORKSPACE_BYTES

TARGET = "jax_fp8_weight_gradient"


def weight_gradient(dy: jax.Array, x: jax.Array, total: jax.Array | None = None) -> jax.Array:
    """The gradient of a weight (n, k) whose product with `x` is `y`.

    Args:
      dy: (batch, seq, n), the gradient of the product.
      x: (batch, seq, k), in the dtype of `dy`.
      total: f32 (n, k), what it is added to. The result is written over it where it is donated or dead; None is zero.

    Returns:
      f32 (n, k).
    """
    if dy.ndim != 3 or x.ndim != 3 or dy.shape[:2] != x.shape[:2] or dy.dtype != x.dtype:
        raise ValueError(
            "weight_gradient needs dy (batch, seq, n) and x (batch, seq, k) of one dtype, "
            f"got {dy.dtype}{dy.shape} and {x.dtype}{x.shape}; reshape or cast them"
        )
    shape = (dy.shape[2], x.shape[2])
    if total is not None and (total.shape, total.dtype) != (shape, jnp.float32):
        raise ValueError(f"total must be float32{shape}, got {total.dtype}{total.shape}; cast or transpose it")
    operands, rule = ([], "") if total is None else ([total], ", n k")
    (gradient,) = dispatch(f"b s n, b s k{rule} -> n k", _kernel, _reference, dy, x, *operands)
    return gradient


def _kernel(dy: jax.Array, x: jax.Array, *total: jax.Array, split: Split):
    # Of shards the sum over devices must come before the sum over parts,
    # so that the compiler can make one of those of all parts.
    suits = dy.dtype != jnp.float32 and dy.size and not (dy.shape[2] % 8 or x.shape[2] % 8)
    if not suits or split_axes(split, "b", "s"):
        return _reference(dy, x, *total, split=split)
    rows = dy.shape[0] * dy.shape[1]
    gradient = jax.ShapeDtypeStruct((dy.shape[2], x.shape[2]), jnp.float32)
    call = jax.ffi.ffi_call(
        TARGET,
        (gradient, jax.ShapeDtypeStruct((WORKSPACE_BYTES,), jnp.uint8)),
        input_output_aliases={2: 0} if total else None,
    )
    return (call(dy.reshape(rows, -1), x.reshape(rows, -1), *total)[0],)


def _reference(dy: jax.Array, x: jax.Array, *total: jax.Array, split: Split):
    product = psum(jnp.einsum("bsn,bsk->nk", dy, x, preferred_element_type=jnp.float32), split, "b", "s")
    return (total[0] + product if total else product,)


def after(total: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`total` (n, k) and `dy` (m, n) or (batch, seq, n) again; what uses this `dy` runs when `total` is there.

    Without such an order a scheduler may leave the additions to a total for later, and keep the gradients of all parts
    until then. Of shards, whose sum over devices is to be one for all parts, it may.
    """
    dims, tokens = ("b s n", ("b", "s")) if dy.ndim == 3 else ("m n", ("m",))
    total, dy = dispatch(f"n k, {dims} -> n k, {dims}", partial(_in_order, tokens), _as_they_are, total, dy)
    return total, dy


def _as_they_are(*arrays: jax.Array, split: Split):
    return arrays


def _in_order(tokens: tuple[str, ...], total: jax.Array, dy: jax.Array, split: Split):
    return (total, dy) if split_axes(split, *tokens) else tuple(lax.optimization_barrier((total, dy)))
