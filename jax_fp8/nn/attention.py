"""Self-attention: projections in FP8, the attention itself in `dtype` by JAX's own fused kernel (cuDNN on a GPU)."""

from typing import Any

import flax.linen as nn
import jax

from jax_fp8.core.shards import COLUMNS, ParamSharding
from jax_fp8.nn.checks import check_layer, check_told, layer_name
from jax_fp8.nn.fp8_attention import attend_in_fp8
from jax_fp8.nn.multi_head import (
    INPUT_DIMS,
    MultiHead,
    drop_weights,
    heads_of,
    implementation_of,
    multiply_out,
    normalize_heads,
    project,
)
from jax_fp8.ops.attention import as_heads, attention, own_heads, positions_in
from jax_fp8.ops.cached_attention import cached_attention
from jax_fp8.ops.rotary import ROTARY_BASE, RotaryScaling, check_rotary, rotate

KV_CACHE = "kv_cache"  # the collection with the `KeyValueCache` of every layer, there while a text is written
PROJECTIONS = ("query", "key", "value")


class SelfAttention(MultiHead, kw_only=True):
    """Multi-head self-attention with grouped queries, back to the width of `x`.

    Variables: `params/{query, key, value, out}`, each as of a Dense, and `params/norm` with `norm` ("layernorm" or
    "rmsnorm"), which normalizes the input first, in the same op as the projections. Queries, keys and values are one
    GEMM with the state `fp8/query+key+value`. The columns of `query` are its heads one after the other, those of `key`
    and `value` theirs, as are the rows of `out`: they can be split over devices by heads without moving any. With the
    collection `kv_cache/slots` it attends to what was read before, too: see ops/cached_attention.py.

    Args:
      causal: a position sees itself and what came before.
      rotary: rotary positions on queries and keys, with `rotary_base` and `rotary_scaling`: see ops/rotary.py.
      sliding_window: how many positions a position sees, the last of which is its own; None: all that `causal` allows.
      others: of every layer of attention; see `MultiHead` in nn/multi_head.py.
    """

    causal: bool = True
    rotary: bool = False
    rotary_base: float = ROTARY_BASE
    rotary_scaling: RotaryScaling | None = None
    sliding_window: int | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """(batch, seq, width) to (batch, seq, width).

        Args:
          x: (batch, seq, width), or (seq, width) of one sequence.
          segment_ids: int (batch, seq): positions with other numbers are other documents, which see nothing of one
            another, and have rotary positions of their own.
          lengths: int (batch,): what comes after so many positions is padding, which none sees; attention to it, and
            from it, is zeros. Not with `segment_ids`.
          deterministic: True drops nothing; None: the field says so.
        """
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim", "sliding_window"), INPUT_DIMS)
        x = x.astype(self.dtype)
        width = x.shape[-1]
        head_dim, kv_heads = heads_of(self, width)
        _check_positions(self, head_dim)
        widths = tuple(heads * head_dim for heads in (self.num_heads, kv_heads, kv_heads))
        of_queries = ParamSharding(COLUMNS, self.num_heads, "query heads", logical_name="heads")
        of_kv = ParamSharding(COLUMNS, kv_heads, "key and value heads", or_whole=True, logical_name="kv_heads")
        projections, x, tensor = project(self, PROJECTIONS, x, widths, (of_queries, of_kv, of_kv), self.norm)
        query, key, value = (as_heads(part, head_dim) for part in projections)
        query, key = normalize_heads(self, query, key)
        key, value = (own_heads(part, query.shape[-2] * kv_heads // self.num_heads, tensor) for part in (key, value))
        random = drop_weights(self, deterministic, tensor)
        attended = _attend(self, query, key, value, segment_ids, lengths, random)
        return multiply_out(self, attended, width, x, deterministic)


def _attend(module, query, key, value, segment_ids, lengths, random):
    """Attention of (batch, seq, heads, head_dim), and while a text is written to what was read before."""
    cache = module.get_variable(KV_CACHE, "slots")
    check_told(layer_name(module), segment_ids, lengths, query.shape[:-2])
    if module.rotary:
        positions = None if segment_ids is None else positions_in(segment_ids)
        positions = positions if cache is None else cache.positions
        query, key = (rotate(part, positions, module.rotary_base, module.rotary_scaling) for part in (query, key))
    options: dict[str, Any] = {"implementation": implementation_of(module), "window": module.sliding_window}
    if cache is None:
        options |= {"segment_ids": segment_ids, "lengths": lengths} | random
        if module.fp8_attention:
            return attend_in_fp8(module, query, key, value, causal=module.causal, **options)
        return attention(query, key, value, causal=module.causal, **options)
    attended, cache = cached_attention(query, key, value, cache, **options)
    module.put_variable(KV_CACHE, "slots", cache)
    return attended


def _check_positions(module, head_dim):
    layer = layer_name(module)
    if module.rotary and head_dim % 2:
        raise ValueError(
            f"{layer}: rotary positions turn pairs and need an even head_dim, got {head_dim}; "
            "change num_heads or head_dim"
        )
    check_rotary(module.rotary_base, module.rotary_scaling, f"{layer}: ")
    if module.sliding_window is not None and not module.causal:
        raise ValueError(
            f"{layer}: a sliding window is of what comes before a position, so attention must be causal, got "
            f"sliding_window={module.sliding_window} and causal=False; leave one of them out"
        )
