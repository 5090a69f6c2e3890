"""A GPT: embeddings, a stack of Transformer layers, a final norm, and a head, in bfloat16 unless FP8 is asked for.

    tokens (batch, seq) → embedding + positions → layers → norm → logits (batch, seq, vocab)

The head stays out of FP8 by default: it is where the noise costs most and, but for small models, speed gains least.
`head_recipe` decides.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax import lax

from jax_fp8.core.checkpoint_names import offload_policy
from jax_fp8.core.ids import as_ids
from jax_fp8.core.paths import joined_name
from jax_fp8.core.promotion import implicit_promotion
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe
from jax_fp8.core.shards import ROWS, ParamSharding, current_amax_axes, current_tensor, declare_sharding, parts_of
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.explicit import whole
from jax_fp8.models.batch import without_padding
from jax_fp8.models.checks import check_call
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.remat import Remat
from jax_fp8.nn.attention import PROJECTIONS
from jax_fp8.nn.block import TransformerBlock
from jax_fp8.nn.checks import check_is_split
from jax_fp8.nn.dropout import drop
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.nn.names import named
from jax_fp8.ops.attention import positions_in
from jax_fp8.ops.cross_entropy import linear_cross_entropy
from jax_fp8.ops.embedding import embed, position_rows
from jax_fp8.ops.head import compute_logits


class _WholeParams:
    """A Linen norm with all of its parameters on every device, where an Explicit mesh splits them."""

    logical_axes: bool = False

    @nn.nowrap
    def param(self, name: str, init: Callable, *args, **kwargs) -> jax.Array:
        declare_sharding((*self.path, name), ParamSharding())  # type: ignore[attr-defined]
        init = named(init, ("norm",), self.logical_axes)
        return whole(super().param(name, init, *args, **kwargs))  # type: ignore[misc]


class _LayerNorm(_WholeParams, nn.LayerNorm):
    logical_axes: bool = False


class _RMSNorm(_WholeParams, nn.RMSNorm):
    logical_axes: bool = False


class GPT(nn.Module):
    """Map tokens (batch, seq), integers of any dtype, to logits (batch, seq, vocab_size) in `dtype`, or with labels to
    their loss, without the logits of a whole batch. The logits after what is no token of the vocabulary are NaN.

    Variables: `params/{embedding, positions, layer_0, ..., final_norm}`, `head` where embeddings are not tied, and
    under delayed scaling `fp8/layer_i/...`. `recipe=None` trains the same parameters in plain `dtype`; `head_recipe`,
    CurrentScaling() or BlockScaling(), computes the head in FP8 too. `remat` says what layers keep for the backward:
    "none", "norms" (as `recompute=True` does), "full" or "offload:N", see models/remat.py and docs/memory.md. See
    `TransformerBlock` for `attention_implementation` and `fp8_attention`. With `logical_axes` `init` returns params
    with the names of their dims: see nn/names.py. `segment_ids`, int (batch, seq), number the documents of a
    sequence: none sees another, and positions begin anew in each. `lengths`, int (batch,), say where the padding of a
    sequence begins. `deterministic=False` drops what the config says, by the random stream "dropout".
    """

    config: GPTConfig
    recipe: Recipe | None = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    head_recipe: CurrentScaling | BlockScaling | None = None
    recompute: bool = False
    remat: str = "none"
    logical_axes: bool = False
    attention_implementation: Literal["cudnn", "xla"] | None = None
    fp8_attention: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        labels: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        mask_total: jax.Array | None = None,
        z_loss: float = 0.0,
        segment_ids: jax.Array | None = None,
        lengths: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        check_call(self, tokens, labels, mask, z_loss, segment_ids, lengths)
        tokens, lengths = as_ids(tokens), None if lengths is None else as_ids(lengths)
        tokens = without_padding(tokens, self.config.vocab_size, segment_ids, lengths)
        embedding = self._table("embedding")
        x = self._embed(embedding, tokens, None if segment_ids is None else positions_in(segment_ids))
        if self.config.dropout_rate and not deterministic:
            x = drop(self, x, self.config.dropout_rate)
        for index in range(self.config.num_layers):
            x = self._layer(index, deterministic=deterministic)(x, segment_ids, lengths)
        return self._head(embedding, x, labels, mask=mask, mask_total=mask_total, z_loss=z_loss)

    def _embed(self, embedding, tokens, numbers=None):
        """Rows of tokens, which are in the positions `numbers` (batch, seq), or None: 0, 1, ..."""
        config, tensor = self.config, current_tensor()
        x = embed(embedding, tokens, tensor, self.dtype)  # gradients of a token are added up in float32
        if config.positions == "learned":
            init = named(nn.initializers.normal(0.02), ("positions", "residual"), self.logical_axes)
            declare_sharding((*self.path, "positions"), ParamSharding())
            positions = self.param("positions", init, (config.max_seq_len, config.hidden_size), self.param_dtype)
            positions = whole(positions)
            rows = position_rows(positions, tokens.shape, tensor, numbers)
            x = x.astype(jnp.float32) + lax.broadcast_to_rank(rows.astype(jnp.float32), x.ndim)
        return x.astype(self.dtype)

    def _head(self, embedding, x, labels, **options):
        """Logits, or with labels their loss; `embedding` counts where it is tied."""
        x, tensor = self._normalize(x), current_tensor()
        table = embedding if self.config.tie_embeddings else self._table("head")
        if labels is None:
            return compute_logits(x, table, self.head_recipe, tensor, current_amax_axes())
        return linear_cross_entropy(x, table, labels, recipe=self.head_recipe, tensor=tensor, **options)

    def _normalize(self, x):
        norm = _LayerNorm if self.config.norm == "layernorm" else _RMSNorm
        with implicit_promotion():
            fields = {"dtype": self.dtype, "param_dtype": self.param_dtype, "logical_axes": self.logical_axes}
            return norm(**fields, epsilon=self.config.norm_epsilon, name="final_norm")(x)

    def _table(self, name):
        """A row for every token: (vocab, hidden), of which each device of a step on shards may have its part."""
        path, vocab = (*self.path, name), self.config.vocab_size
        splits_rows = name == "embedding"
        declare_sharding(path, ParamSharding(ROWS, vocab, "tokens of the vocabulary", splits_rows=splits_rows))
        parts, tensor = parts_of(path, ROWS), current_tensor()
        check_is_split("/".join(path), parts, tensor)
        shape = vocab // parts, self.config.hidden_size
        init = named(nn.initializers.normal(0.02), ("vocab", "residual"), self.logical_axes)
        return self.param(name, init, shape, self.param_dtype)

    def _layer(self, index, alone=False, deterministic=True):
        """A layer of the whole; or alone, for a caller who sees to it that what leaves for the host stays there."""
        config = self.config
        remat = Remat.parse(self.remat, config.num_layers)
        kind = remat.of_layer(index)
        block = TransformerBlock
        if kind in ("full", "offload"):
            policy = offload_policy(remat.names) if kind == "offload" else None
            block = nn.remat(block, policy=policy, prevent_cse=kind == "full" or not alone)
        return block(
            **shared_fields(config, TransformerBlock),
            mlp_hidden_features=config.mlp_hidden_size or 4 * config.hidden_size,
            rotary=config.positions == "rotary",
            epsilon=config.norm_epsilon,
            deterministic=deterministic,
            recipe=self.recipe,
            recompute=self.recompute or kind == "norms",
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            logical_axes=self.logical_axes,
            attention_implementation=self.attention_implementation,
            fp8_attention=self.fp8_attention,
            kernel_init=nn.initializers.normal(0.02),
            residual_init=nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5),  # GPT-2's
            name=f"layer_{index}",
        )


def from_fused_layout(variables: Mapping, config: GPTConfig) -> dict:
    """Variables of a `GPT` in this library's older layout, in today's; those of today come back as they are.

    Until version 0.1 queries, keys and values were one kernel `attention/qkv/kernel` (hidden_size, columns), all query
    heads, then all key heads, then all value heads, its norm `attention/qkv/norm`; and a gated MLP had one
    `mlp/up/kernel`, the gate in its first half. The same function converts what has the structure of params, as the
    moments of an optimizer: pass it as `{"params": mu}`.

    Args:
      variables: "params", and "fp8" where there is one, of the older layout. Weight caches are left out:
        cast them again.
      config: the model's.

    Returns:
      The variables for `GPT(config).apply`; arrays are cut, and no number changes.
    """
    widths = [heads * config.features_of_head for heads in (config.num_heads, *[config.kv_heads] * 2)]
    gated = is_gated(config.activation)
    params, fp8 = dict(variables["params"]), dict(variables.get("fp8", {}))
    for name in [name for name in params if name.startswith("layer_")]:
        attention, mlp = dict(params[name]["attention"]), dict(params[name]["mlp"])
        if "qkv" in attention:
            qkv = dict(attention.pop("qkv"))
            attention["norm"] = qkv.pop("norm")
            attention |= _cut(qkv, PROJECTIONS, widths)
        if gated and "gate" not in mlp:
            mlp |= _cut(mlp["up"], ("gate", "up"), [mlp["up"]["kernel"].shape[-1] // 2] * 2)
        params[name] = {"attention": attention, "mlp": mlp}
        if name in fp8:
            renamed = {"qkv": joined_name(PROJECTIONS), **({"up": joined_name(("gate", "up"))} if gated else {})}
            fp8[name] = {
                part: {renamed.get(gemm, gemm): state for gemm, state in gemms.items()}
                for part, gemms in fp8[name].items()
            }
    others = {name: tree for name, tree in variables.items() if name not in ("params", "fp8", "fp8_cache")}
    return {**others, "params": params, **({"fp8": fp8} if fp8 else {})}


def _cut(linear: Mapping, names: tuple[str, ...], widths: list[int]) -> dict[str, dict]:
    """Kernel and bias of a linear map as those of several, by columns."""
    ends = np.cumsum(widths)[:-1]
    leaves = {leaf: jnp.split(array, ends, axis=-1) for leaf, array in linear.items()}
    return {name: {leaf: pieces[i] for leaf, pieces in leaves.items()} for i, name in enumerate(names)}
