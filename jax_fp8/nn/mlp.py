"""The MLP of a Transformer layer, norm included."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.kernels.activation import is_gated
from jax_fp8.nn.dense import NormVariables
from jax_fp8.nn.gemm import Gemm, declare_gemm
from jax_fp8.ops.norm_mlp import norm_mlp


class _GemmVariables(nn.Module):
    """A named scope for the variables of one of several GEMMs in an op."""

    recipe: Recipe | None
    use_bias: bool
    param_dtype: Dtype
    kernel_init: Initializer
    bias_init: Initializer

    @nn.compact
    def __call__(self, in_features: int, features: int) -> Gemm:
        return declare_gemm(self, in_features, features, self.recipe)


class LayerNormMLP(nn.Module):
    """`down(activation(up(norm(x))))` as one differentiable op, back to the width of `x`.

    Variables: `params/{norm, up, down}` and `fp8/{up, down}`. A gated activation ("swiglu", "geglu", "reglu") makes the kernel of `up`
    (in, 2 * hidden_features), the gate in its first half.

    Args:
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.
    """

    hidden_features: int
    activation: str = "gelu"
    norm: str = "layernorm"
    use_bias: bool = True
    epsilon: float = 1e-6
    recipe: Recipe | None = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    down_init: Initializer | None = None
    residual: bool = False
    recompute: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (..., in) -> (..., in)
        features = x.shape[-1]
        up_features = self.hidden_features * (2 if is_gated(self.activation) else 1)
        shared = (self.recipe, self.use_bias, self.param_dtype)
        norm = NormVariables(self.norm, self.param_dtype, name="norm")(features)
        up = _GemmVariables(*shared, self.kernel_init, self.bias_init, name="up")(features, up_features)
        down_init = self.down_init or self.kernel_init
        down = _GemmVariables(*shared, down_init, self.bias_init, name="down")(self.hidden_features, features)
        scalings = (up.scaling, down.scaling) if up.scaling and down.scaling else None
        parameters = norm, up.parameters, down.parameters
        options = {"residual": self.residual, "recompute": self.recompute}
        y, amaxes = norm_mlp(x, *parameters, scalings, self.activation, self.epsilon, self.dtype, **options)
        if amaxes is not None:
            up.stage(amaxes[0])
            down.stage(amaxes[1])
        return y
