"""One Transformer layer."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.nn.attention import SelfAttention
from jax_fp8.nn.mlp import LayerNormMLP


class TransformerBlock(nn.Module):
    """Pre-norm layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Variables: `attention/{qkv, out}` and `mlp/{norm, up, down}`. `residual_init` initializes the two kernels that write into the residual
    stream; None is `kernel_init`. `recompute` keeps less for the backward: of what a GEMM wants, norms and casts are computed again
    (see `LayerNormMLP`). The other fields are those of `SelfAttention` and `LayerNormMLP`.
    """

    num_heads: int
    mlp_hidden_features: int
    num_kv_heads: int | None = None
    norm: str = "layernorm"
    activation: str = "gelu"
    causal: bool = True
    rotary: bool = False
    use_bias: bool = True
    epsilon: float = 1e-6
    attention_implementation: Literal["cudnn", "xla"] | None = None
    recipe: Recipe | None = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    residual_init: Initializer | None = None
    recompute: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, seq, width) -> (batch, seq, width)
        shared = {
            name: getattr(self, name)
            for name in (
                "norm",
                "use_bias",
                "epsilon",
                "recipe",
                "dtype",
                "param_dtype",
                "kernel_init",
                "bias_init",
                "recompute",
            )
        }
        x = SelfAttention(
            self.num_heads,
            self.num_kv_heads,
            causal=self.causal,
            rotary=self.rotary,
            implementation=self.attention_implementation,
            out_init=self.residual_init,
            residual=True,
            **shared,
            name="attention",
        )(x.astype(self.dtype))
        return LayerNormMLP(
            self.mlp_hidden_features,
            self.activation,
            down_init=self.residual_init,
            residual=True,
            **shared,
            name="mlp",
        )(x)
