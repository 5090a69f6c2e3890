"""One Transformer layer."""

from typing import Any, Literal

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
from jax_fp8.ops.rotary import ROTARY_BASE
from jax_fp8.ops.rotary_scaling import Scaling


class TransformerBlock(Fp8Module):
    """A pre-norm Transformer layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Variables: `attention/{norm, query, key, value, out}` and `mlp/{norm, up, down}`, with a gated activation `mlp/gate`
    too.

    Args:
      num_heads: query heads.
      mlp_hidden_features: of the MLP, or of each expert.
      residual_init: initializer of the two kernels that write into the residual stream; None is `kernel_init`.
      recompute: keep less for the backward, which computes norms and casts again: see `LayerNormMLP`.
      num_experts: 0 is a `LayerNormMLP`; otherwise the MLP is a `LayerNormMoE` of so many experts.
      attention_implementation: as `implementation` in `SelfAttention`.
      num_kv_heads, head_dim, use_qkv_bias, qk_norm, attention_dropout_rate, fp8_attention: as in `SelfAttention`.
      causal, sliding_window, rotary, rotary_base, rotary_scaling: as in `SelfAttention`.
      use_mlp_bias: of the MLP; None is `use_bias`.
      rotary_fraction, qk_norm_over, attention_scale, attention_logit_cap: as in `SelfAttention`.
      norm_placement, zero_centered_scale, residual_multiplier: as in `SelfAttention` and `LayerNormMLP`. With experts
        only zero_centered_scale may be set.
      norm, activation, use_bias, epsilon, dropout_rate, deterministic: as in `SelfAttention` and `LayerNormMLP`.
      experts_per_token, normalize_router_weights, router_aux_loss, router_z_loss: as in `LayerNormMoE`.
      router_scores, router_scale, router_correction_bias: as in `LayerNormMoE`.
      expert_groups, groups_per_token, group_score_experts: as in `LayerNormMoE`.
      shared_expert_features, gate_shared_expert, capacity_factor: as in `LayerNormMoE`.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.TransformerBlock(num_heads=2, mlp_hidden_features=64), jnp.ones((2, 8, 32))
      >>> variables = jax.jit(layer.init)(jax.random.key(0), x)
      >>> jax.jit(layer.apply)(variables, x).shape
      (2, 8, 32)
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
    rotary_scaling: Scaling | None = None
    use_qkv_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 2
    normalize_router_weights: bool = True
    router_scores: str = "softmax"
    router_scale: float = 1.0
    router_correction_bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_score_experts: int = 2
    shared_expert_features: int = 0
    gate_shared_expert: bool = False
    capacity_factor: float | None = None
    router_aux_loss: float = 0.01
    router_z_loss: float = 0.0
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    fp8_attention: bool = False
    deterministic: bool | None = None
    use_mlp_bias: bool | None = None
    rotary_fraction: float = 1.0
    qk_norm_over: str = "head"
    attention_scale: float | None = None
    attention_logit_cap: float | None = None
    norm_placement: str = "before"
    zero_centered_scale: bool = False
    residual_multiplier: float = 1.0

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Compute the layer.

        Args:
          x: (batch, seq, width), or (seq, width) of one sequence.
          segment_ids, lengths, deterministic: as in `SelfAttention`. With experts, padding by `lengths` goes to no
            expert.

        Returns:
          (batch, seq, width) in `dtype`, or without batch as `x`.

        Raises:
          ValueError: as in `SelfAttention`, `LayerNormMLP` and `LayerNormMoE`.
        """
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim", "mlp_hidden_features"), INPUT_DIMS)
        check_integer(f"{layer_name(self)}: num_experts", self.num_experts, least=0)
        if self.num_experts and (self.norm_placement != "before" or self.residual_multiplier != 1):
            raise ValueError(
                f'{layer_name(self)}: experts need norm_placement="before" and residual_multiplier=1, got '
                f"{self.norm_placement!r} and {self.residual_multiplier}; leave these out, or use num_experts=0"
            )
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
            **self._fields_of_mlp(mlp),
            down_init=self.residual_init,
            residual=True,
            name="mlp",
        )
        padding = {"lengths": lengths} if self.num_experts else {}
        return mlp(attention(x, segment_ids, lengths, deterministic), deterministic, **padding)

    def _fields_of_mlp(self, mlp: type[nn.Module]) -> dict[str, Any]:
        fields = shared_fields(self, mlp)
        if "use_bias" in fields and self.use_mlp_bias is not None:
            fields["use_bias"] = self.use_mlp_bias
        return fields
