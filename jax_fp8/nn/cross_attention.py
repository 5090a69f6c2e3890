"""Cross-attention: queries come from one sequence, keys and values from another, as a decoder reads its encoder."""

from functools import partial

import flax.linen as nn
import jax

from jax_fp8.core.shards import COLUMNS, ParamSharding
from jax_fp8.nn.branch import norm_before
from jax_fp8.nn.checks import check_context, check_layer, check_padding, layer_name
from jax_fp8.nn.fp8_attention import attend_in_fp8
from jax_fp8.nn.multi_head import (
    INPUT_DIMS,
    MultiHead,
    as_normalized_heads,
    check_multi_head,
    choose_implementation,
    head_sizes,
    multiply_out,
    project,
    weight_dropout,
)
from jax_fp8.ops.attention import as_heads, attention


class CrossAttention(MultiHead, kw_only=True):
    """Multi-head attention of `x` to `context`, a sequence of its own length and width, with grouped queries.

    Each position of `x` sees all of `context`; the result is as wide as `x`.

    Variables: `params/{query, key, value, out}`, each like a Dense. With `norm` ("layernorm" or "rmsnorm") also
    `params/norm`, which normalizes `x` first, in the same op as the queries; `context` is not normalized. Queries are
    one GEMM with the state `fp8/query`, keys and values another, `fp8/key+value`. The axis `tensor` splits heads, as in
    `SelfAttention`; the number of key and value heads must be a multiple of its devices.

    Args:
      num_heads, num_kv_heads, head_dim, qk_norm, implementation, fp8_attention: as in `SelfAttention`.
      norm, epsilon, use_bias, use_qkv_bias, out_init, residual, recompute: as in `SelfAttention`.
      dropout_rate, attention_dropout_rate, deterministic: as in `SelfAttention`.
      qk_norm_over, attention_scale, attention_logit_cap: as in `SelfAttention`.
      norm_placement, zero_centered_scale, residual_multiplier: as in `SelfAttention`.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x, context = fp8.CrossAttention(num_heads=2), jnp.ones((2, 8, 32)), jnp.ones((2, 16, 48))
      >>> variables = jax.jit(layer.init)(jax.random.key(0), x, context)
      >>> jax.jit(layer.apply)(variables, x, context).shape
      (2, 8, 32)
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        segment_ids: jax.Array | None = None,
        context_segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        context_lengths: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Attend to the positions of another sequence.

        Args:
          x: (batch, seq, width), or (seq, width) of one sequence.
          context: (batch, context_seq, context_width), or without batch.
          segment_ids, context_segment_ids: int (batch, seq) and (batch, context_seq), both or none: a position of `x`
            sees the positions of `context` with its number. The attention of one that sees nothing is zeros.
          lengths, context_lengths: int (batch,), each on its own: positions from there on are padding. No position
            sees padding of `context`, and the attention of padding of `x` is zeros. Not with segment_ids.
          deterministic: as in `SelfAttention`.

        Returns:
          (batch, seq, width) in `dtype`, or without batch as `x`.

        Raises:
          ValueError: as in `SelfAttention`; also if `context` does not fit `x`, or one of the segment_ids comes alone.
        """
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim"), INPUT_DIMS)
        check_multi_head(self)
        check_context(self, x, context)
        check_padding(f"{layer_name(self)}, x", segment_ids, lengths, x.shape[:-1])
        check_padding(f"{layer_name(self)}, context", context_segment_ids, context_lengths, context.shape[:-1])
        if (segment_ids is None) != (context_segment_ids is None):
            raise ValueError(
                f"{layer_name(self)}: segment_ids and context_segment_ids belong together, got one of them; "
                "pass both, or none"
            )
        x, context = x.astype(self.dtype), context.astype(self.dtype)
        width = x.shape[-1]
        head_dim, kv_heads = head_sizes(self, width)
        by_heads = ParamSharding(COLUMNS, self.num_heads, "query heads", logical_name="heads")
        by_kv_heads = ParamSharding(COLUMNS, kv_heads, "key and value heads", logical_name="kv_heads")
        (query,), x, tensor = project(self, ("query",), x, (self.num_heads * head_dim,), (by_heads,), norm_before(self))
        widths = (kv_heads * head_dim,) * 2
        (key, value), _, _ = project(self, ("key", "value"), context, widths, (by_kv_heads,) * 2, None)
        query, key = as_normalized_heads(self, query, key, head_dim)
        value = as_heads(value, head_dim)
        dropout = weight_dropout(self, deterministic, tensor)
        attend = partial(attend_in_fp8, self) if self.fp8_attention else attention
        attended = attend(
            query,
            key,
            value,
            causal=False,
            implementation=choose_implementation(self),
            segment_ids=segment_ids,
            lengths=lengths,
            key_segment_ids=context_segment_ids,
            key_lengths=context_lengths,
            dropout_rate=dropout.rate,
            dropout_key=dropout.key,
            scale=self.attention_scale,
            logit_cap=self.attention_logit_cap,
        )
        return multiply_out(self, attended, width, x, deterministic)
