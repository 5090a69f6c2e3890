"""Self-attention: projections in FP8, the attention itself in `dtype` by JAX's own fused kernel (cuDNN on a GPU)."""

from functools import partial

import flax.linen as nn
import jax

from jax_fp8.core.shards import COLUMNS, ParamSharding
from jax_fp8.nn.branch import norm_before
from jax_fp8.nn.checks import check_layer, check_padding, layer_name
from jax_fp8.nn.fp8_attention import attend_in_fp8
from jax_fp8.nn.multi_head import (
    INPUT_DIMS,
    MultiHead,
    WeightDropout,
    as_normalized_heads,
    check_multi_head,
    choose_implementation,
    head_sizes,
    multiply_out,
    project,
    weight_dropout,
)
from jax_fp8.ops.attention import as_heads, attention, own_heads, positions_in
from jax_fp8.ops.cached_attention import attend_token, cached_attention, reads_token_by_kernel
from jax_fp8.ops.rotary import ROTARY_BASE, check_rotary, rotary_waves, rotate, rotated_features
from jax_fp8.ops.rotary_scaling import Scaling

KV_CACHE = "kv_cache"  # the collection with the `KeyValueCache` of every layer; it exists only during generation
PROJECTIONS = ("query", "key", "value")


class SelfAttention(MultiHead, kw_only=True):
    """Multi-head self-attention with grouped queries, its projections in FP8; the result is as wide as `x`.

    Variables: `params/{query, key, value, out}`, each like a Dense. With `norm` ("layernorm" or "rmsnorm") also
    `params/norm`, which normalizes the input first, in the same op as the projections. Queries, keys and values are one
    GEMM with the state `fp8/query+key+value`. Each of `query`, `key` and `value` has its heads one after the other as
    columns, and `out` as rows. So devices can split them by heads, and no column moves. With the collection
    `kv_cache/slots` it also attends to the cached keys and values of earlier positions: see ops/cached_attention.py.

    Args:
      causal: a position sees itself and earlier positions only.
      rotary: rotary positions on queries and keys (https://arxiv.org/abs/2104.09864), with `rotary_base` and
        `rotary_scaling`.
      rotary_base: the frequency of pair i is `rotary_base ** (-2 i / head_dim)`, in radians a token.
      rotary_scaling: lowers frequencies, for longer sequences; None leaves them.
      rotary_fraction: the part of a head's features that rotates, its first ones.
      sliding_window: how many positions a position sees, its own last; None: all that `causal` allows.
      num_heads: query heads; must divide the width of `x`, unless `head_dim` is set.
      num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` queries; None is `num_heads`.
      norm: normalize `x` first, by "layernorm" or "rmsnorm"; None leaves it out.
      use_bias: add biases to the products.
      epsilon: of the norm, and of `qk_norm`.
      implementation: "cudnn", "xla", or None: cuDNN where the default backend is a GPU and `dtype` has the 16 bits that
        cuDNN needs.
      out_init: initializer of the kernel of `out`; None is `kernel_init`.
      residual: return `x + out(...)`, added by the last GEMM, and its gradient by the norm's backward.
      head_dim: features of a head; None is the width of `x` divided by `num_heads`.
      use_qkv_bias: of queries, keys and values; None is `use_bias`, which `out` has.
      qk_norm: RMSNorm of each head of the queries and of the keys (https://arxiv.org/abs/2505.09388), before rotary
        positions, with `params/{query_norm, key_norm}/scale` (head_dim,).
      dropout_rate: the fraction of `out(...)` that is dropped, by the random stream "dropout". The residual is then
        added afterwards, in a pass of its own: see ops/dropout.py.
      attention_dropout_rate: the fraction of the softmax weights that is dropped, by the same stream. Flax's own
        attention calls this `dropout_rate`. XLA's attention can do it, cuDNN's refuses: see ops/dropped_attention.py.
      fp8_attention: attend in FP8, with `DelayedScaling`, heads of 128 features and sequences of a multiple of 128
        tokens, without windows, padding or documents: see ops/fp8_attention.py. `generate` attends in `dtype`.
      qk_norm_over: "head", or "all": RMSNorm of all heads of a token together, as in OLMo 2, with a scale for each
        feature of all heads. The mesh axis `tensor` cannot split those.
      attention_scale: of the products of queries and keys; None: `head_dim ** -0.5`.
      attention_logit_cap: attention logits are `cap * tanh(logits / cap)`, as in Gemma 2. cuDNN cannot do this, so
        XLA's attention is used, which is slower on a GPU.
      norm_placement: "before" normalizes `x`; "after" normalizes `out(...)` instead, with `params/post_norm`, before
        the residual is added; "both".
      zero_centered_scale: the params of norms are scales minus 1, as in Gemma.
      residual_multiplier: of `out(...)`, before the residual is added.
      deterministic: True turns dropout off. With a rate, either this field or the argument must be set.
      recompute: in the backward, normalize again, and quantize again the result of cuDNN's attention, which cuDNN keeps
        in `dtype` anyway; see `LayerNormDense` and `Dense`.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.SelfAttention(num_heads=2, norm="rmsnorm", rotary=True), jnp.ones((2, 8, 32))
      >>> variables = jax.jit(layer.init)(jax.random.key(0), x)
      >>> jax.jit(layer.apply)(variables, x).shape
      (2, 8, 32)
    """

    causal: bool = True
    rotary: bool = False
    rotary_base: float = ROTARY_BASE
    rotary_scaling: Scaling | None = None
    sliding_window: int | None = None
    rotary_fraction: float = 1.0

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Attend to the positions of the same sequence.

        Args:
          x: (batch, seq, width), or (seq, width) of one sequence.
          segment_ids: int (batch, seq), the number of each position's document. Documents do not see each other, and
            each has rotary positions of its own.
          lengths: int (batch,): positions from there on are padding. No position sees padding, and the attention of
            padding is zeros. Not with `segment_ids`.
          deterministic: True turns dropout off; None leaves the choice to the field of this name.

        Returns:
          (batch, seq, width) in `dtype`, or without batch as `x`.

        Raises:
          ValueError: if a field is not valid, fields or sizes do not fit together, sizes are not multiples of 16 with a
            recipe, or an array has another shape or dtype; or if a layer with dropout has `deterministic` twice, or not
            at all.
        """
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim", "sliding_window"), INPUT_DIMS)
        check_multi_head(self)
        x = x.astype(self.dtype)
        width = x.shape[-1]
        head_dim, kv_heads = head_sizes(self, width)
        _check_positions(self, head_dim)
        widths = tuple(heads * head_dim for heads in (self.num_heads, kv_heads, kv_heads))
        by_heads = ParamSharding(COLUMNS, self.num_heads, "query heads", logical_name="heads")
        by_kv_heads = ParamSharding(COLUMNS, kv_heads, "key and value heads", or_whole=True, logical_name="kv_heads")
        shardings = by_heads, by_kv_heads, by_kv_heads
        projections, x, tensor = project(self, PROJECTIONS, x, widths, shardings, norm_before(self))
        query, key, value = projections
        query, key = as_normalized_heads(self, query, key, head_dim)
        value = as_heads(value, head_dim)
        key, value = (own_heads(part, query.shape[-2] * kv_heads // self.num_heads, tensor) for part in (key, value))
        dropout = weight_dropout(self, deterministic, tensor)
        attended = _attend(self, query, key, value, segment_ids, lengths, dropout)
        return multiply_out(self, attended, width, x, deterministic)


def _attend(
    module: SelfAttention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    lengths: jax.Array | None,
    dropout: WeightDropout,
) -> jax.Array:
    """Attention of (batch, seq, heads, head_dim), during generation also to the cached keys and values."""
    cache = module.get_variable(KV_CACHE, "slots")
    check_padding(layer_name(module), segment_ids, lengths, query.shape[:-2])
    rotary = module.rotary_base, module.rotary_scaling, module.rotary_fraction
    if cache is not None and reads_token_by_kernel(query, cache):
        attended, cache = attend_token(
            query,
            key,
            value,
            cache,
            rotary=rotary_waves(cache.positions, query.shape[-1], *rotary) if module.rotary else None,
            window=module.sliding_window,
            scale=module.attention_scale,
            logit_cap=module.attention_logit_cap,
        )
        module.put_variable(KV_CACHE, "slots", cache)
        return attended
    if module.rotary:
        positions = None if segment_ids is None else positions_in(segment_ids)
        positions = positions if cache is None else cache.positions
        query, key = (rotate(part, positions, *rotary) for part in (query, key))
    implementation, window = choose_implementation(module), module.sliding_window
    if cache is None:
        attend = partial(attend_in_fp8, module) if module.fp8_attention else attention
        return attend(
            query,
            key,
            value,
            causal=module.causal,
            implementation=implementation,
            window=window,
            segment_ids=segment_ids,
            lengths=lengths,
            dropout_rate=dropout.rate,
            dropout_key=dropout.key,
            scale=module.attention_scale,
            logit_cap=module.attention_logit_cap,
        )
    attended, cache = cached_attention(
        query,
        key,
        value,
        cache,
        implementation=implementation,
        window=window,
        scale=module.attention_scale,
        logit_cap=module.attention_logit_cap,
    )
    module.put_variable(KV_CACHE, "slots", cache)
    return attended


def _check_positions(module: SelfAttention, head_dim: int) -> None:
    layer = layer_name(module)
    fraction = "" if module.rotary_fraction == 1 else f" with rotary_fraction={module.rotary_fraction}"
    if module.rotary and rotated_features(head_dim, module.rotary_fraction) % 2:
        raise ValueError(
            f"{layer}: rotary positions rotate pairs of features and need an even head_dim, got {head_dim}{fraction}; "
            "change num_heads or head_dim"
        )
    check_rotary(module.rotary_base, module.rotary_scaling, module.rotary_fraction, f"{layer}: ")
    if module.sliding_window is not None and not module.causal:
        raise ValueError(
            f"{layer}: a sliding window reaches back from a position, so attention must be causal, got "
            f"sliding_window={module.sliding_window} and causal=False; leave one of them out"
        )
