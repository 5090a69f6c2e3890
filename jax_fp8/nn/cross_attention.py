"""Cross-attention: queries of one sequence, keys and values of another, as a decoder reads what an encoder made."""

from functools import partial

import flax.linen as nn
import jax

from jax_fp8.core.shards import COLUMNS, ParamSharding
from jax_fp8.nn.checks import check_context, check_layer, check_told, layer_name
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
from jax_fp8.ops.attention import as_heads, attention


class CrossAttention(MultiHead, kw_only=True):
    """Multi-head attention of `x` to `context`, another sequence of another length and width, with grouped queries;
    back to the width of `x`. Each position of `x` sees all of `context`.

    Variables: `params/{query, key, value, out}`, each as of a Dense, and `params/norm` with `norm` ("layernorm" or
    "rmsnorm"), which normalizes `x` first, in the same op as the queries; `context` is taken as it is. Queries are one
    GEMM with the state `fp8/query`, keys and values another, `fp8/key+value`. Over `tensor` heads are split, as those
    of `SelfAttention`; the number of key and value heads must be a multiple of its devices.

    Args: those of every layer of attention; see `MultiHead` in nn/multi_head.py.
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
        """(batch, seq, width) to (batch, seq, width).

        Args:
          x: (batch, seq, width), or (seq, width) of one sequence.
          context: (batch, context_seq, context_width), or without batch.
          segment_ids, context_segment_ids: int (batch, seq) and (batch, context_seq), both or none: a position of `x`
            sees those with the same number. One that sees nothing has zeros for what it attends to.
          lengths, context_lengths: int (batch,), each or none: what comes after so many positions is padding. None sees
            that of `context`, and that of `x` has zeros for what it attends to. Not with segment_ids.
          deterministic: as of `SelfAttention`.
        """
        check_layer(self, x, ("num_heads", "num_kv_heads", "head_dim"), INPUT_DIMS)
        check_context(self, x, context)
        for of, told in (("x", (segment_ids, lengths)), ("context", (context_segment_ids, context_lengths))):
            check_told(f"{layer_name(self)}, {of}", *told, (x if of == "x" else context).shape[:-1])
        if (segment_ids is None) != (context_segment_ids is None):
            raise ValueError(
                f"{layer_name(self)}: segment_ids must number the documents of x and of context, got those of one; "
                "pass both, or none"
            )
        x, context = x.astype(self.dtype), context.astype(self.dtype)
        width = x.shape[-1]
        head_dim, kv_heads = heads_of(self, width)
        of_queries = ParamSharding(COLUMNS, self.num_heads, "query heads", logical_name="heads")
        of_kv = ParamSharding(COLUMNS, kv_heads, "key and value heads", logical_name="kv_heads")
        (query,), x, tensor = project(self, ("query",), x, (self.num_heads * head_dim,), (of_queries,), self.norm)
        widths = (kv_heads * head_dim,) * 2
        (key, value), _, _ = project(self, ("key", "value"), context, widths, (of_kv, of_kv), None)
        query, key, value = (as_heads(part, head_dim) for part in (query, key, value))
        query, key = normalize_heads(self, query, key)
        attend = partial(attend_in_fp8, self) if self.fp8_attention else attention
        attended = attend(
            query,
            key,
            value,
            causal=False,
            implementation=implementation_of(self),
            segment_ids=segment_ids,
            lengths=lengths,
            key_segment_ids=context_segment_ids,
            key_lengths=context_lengths,
            **drop_weights(self, deterministic, tensor),
        )
        return multiply_out(self, attended, width, x, deterministic)
