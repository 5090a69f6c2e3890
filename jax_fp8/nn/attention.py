"""Self-attention: projections in FP8, the attention itself in `dtype` by JAX's own fused kernel (cuDNN on a GPU)."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer
from jax import lax

from jax_fp8.core.shards import DIM_OF, current_tensor, parts_of
from jax_fp8.nn.checks import check_is_split, check_layer, layer_name
from jax_fp8.nn.dense import Dense, NormVariables
from jax_fp8.nn.gemm import Fp8Module, TensorSplit, declare_gemm_of, shared_fields
from jax_fp8.nn.names import named
from jax_fp8.ops.attention import as_heads, attention, own_heads
from jax_fp8.ops.cached_attention import cached_attention
from jax_fp8.ops.linear import linear
from jax_fp8.ops.norm_linear import norm_linear

ROTARY_BASE = 10_000.0
KV_CACHE = "kv_cache"  # the collection with the `KeyValueCache` of every layer, there while a text is written
PROJECTIONS = ("query", "key", "value")
INPUT_DIMS = (2, 3)  # (batch, seq, width), and (seq, width) of one sequence


class SelfAttention(Fp8Module):
    """Multi-head self-attention with grouped queries, back to the width of `x`.

    Variables: `params/{query, key, value, out}`, each as of a Dense, and `params/norm` with `norm` ("layernorm" or
    "rmsnorm"), which normalizes the input first, in the same op as the projections. Queries, keys and values are one
    GEMM with the state `fp8/query+key+value`. The columns of `query` are its heads one after the other, those of `key`
    and `value` theirs, as are the rows of `out`: they can be split over devices by heads without moving any. With the
    collection `kv_cache/slots` it attends to what was read before, too: see ops/cached_attention.py.

    Args:
      num_heads: query heads; must divide the width of `x`, unless `head_dim` says how wide one is.
      num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` queries; None is `num_heads`.
      norm: normalize the input first; None takes `x` as it is.
      causal: a position sees itself and what came before.
      rotary: rotary positions (https://arxiv.org/abs/2104.09864) on queries and keys.
      implementation: "cudnn", "xla", or None: cuDNN where the default backend is a GPU and `dtype` has 16 bits, as
        cuDNN wants it.
      out_init: initializer of the kernel of `out`; None is `kernel_init`.
      residual: return `x + out(...)`, added by the last GEMM, and its gradient by the norm's backward.
      head_dim: features of a head; None is the width of `x` divided by `num_heads`.
      recompute: normalize again in the backward, and quantize again what cuDNN's attention keeps anyway;
        see `LayerNormDense` and `Dense`.
    """

    num_heads: int
    num_kv_heads: int | None = None
    norm: str | None = None
    causal: bool = True
    rotary: bool = False
    use_bias: bool = True
    epsilon: float = 1e-6
    implementation: Literal["cudnn", "xla"] | None = None
    out_init: Initializer | None = None
    residual: bool = False
    head_dim: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, seq, width) -> (batch, seq, width)
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim"), INPUT_DIMS)
        x = x.astype(self.dtype)
        width = x.shape[-1]
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        _check_heads(self, width, kv_heads)
        head_dim = self.head_dim or width // self.num_heads
        widths = tuple(heads * head_dim for heads in (self.num_heads, kv_heads, kv_heads))
        projections, x, tensor = _project(self, x, widths, head_dim)
        query, key, value = (as_heads(part, head_dim) for part in projections)
        key, value = (own_heads(part, query.shape[-2] * kv_heads // self.num_heads, tensor) for part in (key, value))
        has_cudnn = jax.default_backend() == "gpu" and jnp.dtype(self.dtype).itemsize == 2
        implementation = self.implementation or ("cudnn" if has_cudnn else "xla")
        attended = _attend(self, query, key, value, implementation)
        fields = shared_fields(self, Dense) | {
            "kernel_init": named(self.out_init or self.kernel_init, ("heads", "residual"), self.logical_axes),
            "recompute": self.recompute
            and implementation == "cudnn",  # whose backward keeps its result; XLA's does not
        }
        out = Dense(width, **fields, tensor_split="rows", name="out")
        return out(attended.reshape(*attended.shape[:-2], -1), x if self.residual else None)


def _project(module, x, widths, head_dim):
    """Queries, keys and values, each (batch, seq, heads * head_dim); `x`, for the residual branch; and over which axis
    heads are split in a step on shards, or None.
    """
    norm = (
        None if module.norm is None else NormVariables(**shared_fields(module, NormVariables), name="norm")(x.shape[-1])
    )
    query = *module.path, "query", "kernel"
    heads, kv_heads = (n // head_dim for n in widths[:2])
    of_kv = TensorSplit("columns", kv_heads, "key and value heads", or_whole=True, axis="kv_heads")
    splits = TensorSplit("columns", heads, "query heads", axis="heads"), of_kv, of_kv
    gemm = declare_gemm_of(module, PROJECTIONS, x.shape[-1], widths, splits)
    check_is_split("/".join(query), parts_of(query, DIM_OF["columns"]), current_tensor())
    if norm is None:
        options = {"tensor": gemm.tensor, "side": gemm.side}
        projections, amaxes = linear(x, gemm.parameters, gemm.fp8, module.dtype, **options)
    else:
        options = {"return_input": module.residual, "recompute": module.recompute, "tensor": gemm.tensor}
        out, amaxes = norm_linear(x, norm, gemm.parameters, gemm.fp8, module.epsilon, module.dtype, **options)
        projections, x = out if module.residual else (out, x)
    gemm.stage(amaxes)
    return projections, x, gemm.tensor


def _attend(module, query, key, value, implementation):
    """Attention of (batch, seq, heads, head_dim), and while a text is written to what was read before."""
    cache = module.get_variable(KV_CACHE, "slots")
    if module.rotary:
        query, key = (rotate(part, None if cache is None else cache.positions) for part in (query, key))
    if cache is None:
        return attention(query, key, value, causal=module.causal, implementation=implementation)
    attended, cache = cached_attention(query, key, value, cache, implementation=implementation)
    module.put_variable(KV_CACHE, "slots", cache)
    return attended


def rotate(x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Rotate pairs (i, i + head_dim / 2) of (batch, seq, heads, head_dim) by position times base^(-2i / head_dim);
    positions are i32[batch, seq], or None: 0, 1, ...
    """
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(x.shape[-3]) if positions is None else positions
    angle = positions.astype(jnp.float32)[..., None, None] * lax.broadcast_to_rank(frequency, positions.ndim + 2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (lax.broadcast_to_rank(wave(angle), x.ndim) for wave in (jnp.cos, jnp.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _check_heads(module, width, kv_heads):
    layer, heads = layer_name(module), module.num_heads
    if module.head_dim is None and width % heads:
        raise ValueError(
            f"{layer}: num_heads must divide the width, got num_heads={heads} and width {width}; change one of them"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{layer}: num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}; "
            "change one of them"
        )
    head_dim = module.head_dim or width // heads
    if module.rotary and head_dim % 2:
        raise ValueError(
            f"{layer}: rotary positions turn pairs and need an even head_dim, got {head_dim}; "
            "change num_heads or head_dim"
        )
    if module.implementation not in (None, "cudnn", "xla"):
        raise ValueError(f'{layer}: implementation must be "cudnn", "xla" or None, got {module.implementation!r}')
    if module.implementation == "cudnn" and jnp.dtype(module.dtype).itemsize != 2:
        raise ValueError(
            f"{layer}: cuDNN's attention needs a dtype of 16 bits, got {jnp.dtype(module.dtype)}; "
            'use bfloat16, or implementation="xla"'
        )
