"""Self-attention: projections in FP8, the attention itself in `dtype` by JAX's own fused kernel (cuDNN on a GPU)."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.nn.dense import Dense, LayerNormDense

ROTARY_BASE = 10_000.0


class SelfAttention(nn.Module):
    """Multi-head self-attention with grouped queries, back to the width of `x`.

    Variables: `qkv`, one Dense whose columns are all query heads, then all key heads, then all value heads; and `out`, a Dense. With
    `norm` ("layernorm" or "rmsnorm") the input is normalized first, in the same op as the projection.

    Args:
      num_heads: query heads; must divide the width of `x`.
      num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` queries; None is `num_heads`.
      norm: normalize the input first; None takes `x` as it is.
      causal: a position sees itself and what came before.
      rotary: rotary positions (https://arxiv.org/abs/2104.09864) on queries and keys.
      implementation: "cudnn", "xla", or None: cuDNN where the default backend is a GPU.
      out_init: initializer of the kernel of `out`; None is `kernel_init`.
      residual: return `x + out(...)`, added by the last GEMM, and its gradient by the norm's backward.
      recompute: normalize again in the backward, and quantize again what cuDNN's attention keeps anyway; see `LayerNormDense` and `Dense`.
    """

    num_heads: int
    num_kv_heads: int | None = None
    norm: str | None = None
    causal: bool = True
    rotary: bool = False
    use_bias: bool = True
    epsilon: float = 1e-6
    implementation: Literal["cudnn", "xla"] | None = None
    recipe: Recipe | None = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    out_init: Initializer | None = None
    residual: bool = False
    recompute: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, seq, width) -> (batch, seq, width)
        width = x.shape[-1]
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        _check_heads(width, self.num_heads, kv_heads)
        head_dim = width // self.num_heads
        settings = {
            "use_bias": self.use_bias,
            "recipe": self.recipe,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "bias_init": self.bias_init,
        }
        parts = tuple(heads * head_dim for heads in (self.num_heads, kv_heads, kv_heads))
        options = {"kernel_init": self.kernel_init, "parts": parts, **settings, "name": "qkv"}
        if self.norm is None:
            qkv = Dense(sum(parts), **options)(x)
        else:
            options |= {"epsilon": self.epsilon, "return_input": self.residual, "recompute": self.recompute}
            project = LayerNormDense(sum(parts), self.norm, **options)
            qkv, x = project(x) if self.residual else (project(x), x)
        query, key, value = (part.reshape(*x.shape[:-1], -1, head_dim) for part in qkv)  # (batch, seq, heads, head_dim)
        if self.rotary:
            query, key = rotate(query), rotate(key)
        implementation = self.implementation or ("cudnn" if jax.default_backend() == "gpu" else "xla")
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=self.causal, implementation=implementation)
        out = Dense(
            width,
            kernel_init=self.out_init or self.kernel_init,
            recompute=self.recompute and implementation == "cudnn",  # whose backward keeps its result; XLA's does not
            **settings,
            name="out",
        )
        return out(attended.reshape(x.shape), x if self.residual else None)


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + head_dim / 2) of (batch, seq, heads, head_dim) by position times base^(-2i / head_dim)."""
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[-3], dtype=jnp.float32)[:, None, None] * frequency  # (seq, 1, head_dim / 2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _check_heads(width, heads, kv_heads):
    if width % heads:
        raise ValueError(
            f"num_heads must divide the width, got num_heads={heads} and width {width}; change one of them"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}; change one of them"
        )
