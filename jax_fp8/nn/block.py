"""One Transformer layer."""

from typing import Literal

import flax.linen as nn
import jax
from flax.typing import Initializer

from jax_fp8.core.checks import check_integer
from jax_fp8.nn.attention import SelfAttention
from jax_fp8.nn.checks import check_layer, layer_name
from jax_fp8.nn.gemm import Fp8Module, shared_fields
from jax_fp8.nn.mlp import LayerNormMLP
from jax_fp8.nn.moe import LayerNormMoE
from jax_fp8.nn.multi_head import INPUT_DIMS
from jax_fp8.ops.rotary import ROTARY_BASE, RotaryScaling


class TransformerBlock(Fp8Module):
    """Pre-norm layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Variables: `attention/{norm, query, key, value, out}` and `mlp/{norm, up, down}`, with a gated activation `mlp/gate`
    too. `residual_init` initializes the two kernels that write into the residual stream; None is `kernel_init`.
    `recompute` keeps less for the backward, which computes norms and casts again (see `LayerNormMLP`). With
    `num_experts` the MLP is a `LayerNormMoE` of so many experts. The other fields are those of `SelfAttention`,
    `LayerNormMLP` and `LayerNormMoE`.
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
    residual_init: Initializer | None = None
    head_dim: int | None = None
    rotary_base: float = ROTARY_BASE
    rotary_scaling: RotaryScaling | None = None
    use_qkv_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 2
    normalize_router_weights: bool = True
    router_aux_loss: float = 0.01
    router_z_loss: float = 0.0
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    fp8_attention: bool = False
    deterministic: bool | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """(batch, seq, width) to (batch, seq, width); the other arguments are those of `SelfAttention`."""
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim", "mlp_hidden_features"), INPUT_DIMS)
        check_integer(f"{layer_name(self)}: num_experts", self.num_experts, least=0)
        attention = SelfAttention(
            **shared_fields(self, SelfAttention),
            implementation=self.attention_implementation,
            out_init=self.residual_init,
            residual=True,
            name="attention",
        )
        mlp = LayerNormMoE if self.num_experts else LayerNormMLP
        mlp = mlp(
            hidden_features=self.mlp_hidden_features,
            **shared_fields(self, mlp),
            down_init=self.residual_init,
            residual=True,
            name="mlp",
        )
        padding = {"lengths": lengths} if self.num_experts else {}
        return mlp(attention(x, segment_ids, lengths, deterministic), deterministic, **padding)
