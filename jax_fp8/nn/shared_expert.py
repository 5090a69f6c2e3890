"""The expert of a mixture that all tokens go to, as in DeepSeek's and Qwen's models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

from jax_fp8.kernels.norm import NormParameters
from jax_fp8.kernels.vma import match_vma
from jax_fp8.nn.gemm import Fp8Module
from jax_fp8.nn.mlp import declare_mlp, multiply_mlp
from jax_fp8.nn.router import RouterVariables
from jax_fp8.ops.router import router_logits


class SharedExpert(Fp8Module):
    """An MLP that every token of a `LayerNormMoE` goes to, `down(activation(up(norm(x))))`, without biases.

    Variables: `params/{up, down}`, with a gated activation `gate` too. With `gate_shared_expert` also
    `params/router/kernel` f32 (in, 1), and the result is multiplied by the sigmoid of `norm(x) · kernel`, as in Qwen2's
    mixtures.

    Args:
      shared_expert_features: hidden features.
      activation, epsilon, down_init, gate_shared_expert: as in `LayerNormMoE`.
    """

    shared_expert_features: int
    activation: str
    epsilon: float
    down_init: Initializer | None
    gate_shared_expert: bool
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, norm: NormParameters, normalized: jax.Array, residual: bool) -> jax.Array:
        """Compute the expert.

        Args:
          x: (tokens, features), which its first GEMM normalizes itself.
          normalized: `norm(x)`, which the weights are computed from.
          residual: add `x`.
        """
        up, down = declare_mlp(self, x.shape[-1], self.shared_expert_features)
        if not self.gate_shared_expert:
            return multiply_mlp(self, x, norm, up, down, residual)
        router = RouterVariables(self.kernel_init, self.logical_axes, name="router")
        kernel = router(x.shape[-1], experts=1).kernel
        weight = jax.nn.sigmoid(router_logits(*match_vma(normalized, kernel.astype(jnp.float32))))
        y = weight * multiply_mlp(self, x, norm, up, down, False).astype(jnp.float32)
        return (y + x.astype(jnp.float32) if residual else y).astype(self.dtype)
