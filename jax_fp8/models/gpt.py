"""A GPT: embeddings, a stack of Transformer layers in FP8, a final norm, and a head.

    tokens (batch, seq) → embedding + positions → layers → norm → logits (batch, seq, vocab)

The head stays in bfloat16 by default: there the noise of FP8 costs most and, except in small models, its speed gains
least. `head_recipe` computes it in FP8.
"""

from collections.abc import Mapping
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype, Initializer
from jax import lax

from jax_fp8.core.checkpoint_names import offload_policy
from jax_fp8.core.ids import as_ids
from jax_fp8.core.lora import Lora
from jax_fp8.core.paths import joined_name
from jax_fp8.core.promotion import implicit_promotion
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling
from jax_fp8.core.recipe_rules import RecipeOrRules, as_field
from jax_fp8.core.shards import ROWS, ParamSharding, current_amax_axes, current_tensor, declare_sharding, parts_of
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.explicit import whole
from jax_fp8.models.batch import without_padding
from jax_fp8.models.checks import check_call, check_config
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
from jax_fp8.ops.head import compute_logits, finished_logits


class _WholeParams:
    """A Linen norm that reads its parameters in full, also where an Explicit mesh splits them."""

    logical_axes: bool = False

    @nn.nowrap
    def param(self, name: str, init: Initializer, *args: object, **kwargs: object) -> jax.Array:
        declare_sharding((*self.path, name), ParamSharding())  # type: ignore[attr-defined]
        init = named(init, ("norm",), self.logical_axes)
        return whole(super().param(name, init, *args, **kwargs))  # type: ignore[misc]


class _LayerNorm(_WholeParams, nn.LayerNorm):
    logical_axes: bool = False


class _RMSNorm(_WholeParams, nn.RMSNorm):
    logical_axes: bool = False


class _ZeroCenteredRMSNorm(_RMSNorm):
    """An RMSNorm whose parameter is its scale minus 1."""

    @nn.nowrap
    def param(self, name: str, init: Initializer, *args: object, **kwargs: object) -> jax.Array:
        return 1 + super().param(name, nn.initializers.zeros_init(), *args, **kwargs).astype(jnp.float32)


class GPT(nn.Module):
    """A GPT: embeddings, a stack of `TransformerBlock`, a final norm, and a head in `dtype`.

    Variables: `params/{embedding, positions, layer_0, ..., final_norm}`, `head` where embeddings are not tied, and
    under delayed scaling `fp8/layer_i/...`.

    Args:
      config: the shape of the model.
      recipe: of the layers; None trains the same parameters in plain `dtype`. Rules such as `{"layer_0/.*": None,
        ".*": DelayedScaling()}` give each layer a recipe by its path.
      dtype: of activations and logits: bfloat16, float16 or float32.
      param_dtype: of the parameters, one of these too.
      head_recipe: CurrentScaling() or BlockScaling() computes the head in FP8 too.
      recompute: normalize and quantize again in the backward of every layer, as in `TransformerBlock`.
      remat: what layers keep for the backward: "none", "norms" (as `recompute=True`), "full" or "offload:N". See
        models/remat.py.
      logical_axes: `init` returns params with the names of their dims: see nn/names.py.
      attention_implementation, fp8_attention: as in `TransformerBlock`.
      lora: adapters of the layers' linear maps; embeddings and head have none.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=8)
      >>> model, tokens = fp8.GPT(config), jnp.ones((2, 8), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens)
      >>> logits = jax.jit(model.apply)(variables, tokens)
      >>> logits.shape, logits.dtype.name
      ((2, 8, 32), 'bfloat16')
    """

    config: GPTConfig
    recipe: RecipeOrRules = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    head_recipe: CurrentScaling | BlockScaling | None = None
    recompute: bool = False
    remat: str = "none"
    logical_axes: bool = False
    attention_implementation: Literal["cudnn", "xla"] | None = None
    fp8_attention: bool = False
    lora: Lora | None = None

    def __post_init__(self):
        as_field(self)
        super().__post_init__()

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
        """Compute logits or, with labels, their loss, which never holds the logits of a whole batch.

        Args:
          tokens: integers (batch, seq). The logits after a number outside of the vocabulary are NaN.
          labels: integers (batch, seq), the token that follows each; None asks for logits.
          mask: bool or weights (batch, seq), which labels count; None: all.
          mask_total: f32[batch], by which the weighted sum of all tokens is divided, the same number beside each row;
            None: the sum of `mask`.
          z_loss: adds `z_loss lse²`; see `linear_cross_entropy`.
          segment_ids: int (batch, seq), the document of each token. Documents do not see each other, and positions
            begin anew in each.
          lengths: int (batch,): the padding of a sequence begins there.
          deterministic: False turns on the dropout of the config, by the random stream "dropout".

        Returns:
          Logits (batch, seq, vocab_size) in `dtype`; with `labels` their mean cross-entropy in nats, f32[].

        Raises:
          ValueError: if a field of the model is not valid, an array has another shape or dtype, a sequence is longer
            than `max_seq_len`, or `mask` or `z_loss` comes without `labels`.
        """
        check_config(self.config, self.dtype, self.param_dtype)
        check_call(self.config, tokens, labels, mask, z_loss, segment_ids, lengths)
        tokens, lengths = as_ids(tokens), None if lengths is None else as_ids(lengths)
        tokens = without_padding(tokens, self.config.vocab_size, segment_ids, lengths)
        embedding = self._table("embedding")
        x = self._embed(embedding, tokens, None if segment_ids is None else positions_in(segment_ids))
        if self.config.dropout_rate and not deterministic:
            x = drop(self, x, self.config.dropout_rate)
        for index in range(self.config.num_layers):
            x = self._layer(index, deterministic=deterministic)(x, segment_ids, lengths)
        return self._head(embedding, x, labels, mask, mask_total, z_loss)

    def _embed(self, embedding: jax.Array, tokens: jax.Array, numbers: jax.Array | None = None) -> jax.Array:
        """Embeddings of tokens at the positions `numbers` (batch, seq); None: 0, 1, ..."""
        config, tensor = self.config, current_tensor()
        x = embed(embedding, tokens, tensor, self.dtype)  # its backward adds the gradients of a token in float32
        if config.embedding_multiplier != 1:
            x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
        if config.positions == "learned":
            init = named(nn.initializers.normal(0.02), ("positions", "residual"), self.logical_axes)
            declare_sharding((*self.path, "positions"), ParamSharding())
            positions = self.param("positions", init, (config.max_seq_len, config.hidden_size), self.param_dtype)
            positions = whole(positions)
            rows = position_rows(positions, tokens.shape, tensor, numbers)
            x = x.astype(jnp.float32) + lax.broadcast_to_rank(rows.astype(jnp.float32), x.ndim)
        return x.astype(self.dtype)

    def _head(
        self,
        embedding: jax.Array | None,
        x: jax.Array,
        labels: jax.Array | None,
        mask: jax.Array | None,
        mask_total: jax.Array | None,
        z_loss: float,
    ) -> jax.Array:
        """Logits, or with labels their loss. `embedding` is the table of the head where embeddings are tied."""
        x, tensor = self._normalize(x), current_tensor()
        config = self.config
        table = embedding if config.tie_embeddings and embedding is not None else self._table("head")
        if labels is None:
            logits = compute_logits(x, table, self.head_recipe, tensor, current_amax_axes())
            return finished_logits(logits, config.logit_divisor, config.logit_cap)
        return linear_cross_entropy(
            x,
            table,
            labels,
            mask=mask,
            mask_total=mask_total,
            z_loss=z_loss,
            recipe=self.head_recipe,
            tensor=tensor,
            divisor=config.logit_divisor,
            cap=config.logit_cap,
        )

    def _normalize(self, x: jax.Array) -> jax.Array:
        norm = _LayerNorm if self.config.norm == "layernorm" else _RMSNorm
        norm = _ZeroCenteredRMSNorm if self.config.zero_centered_scale else norm
        with implicit_promotion():
            return norm(
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                logical_axes=self.logical_axes,
                epsilon=self.config.norm_epsilon,
                name="final_norm",
            )(x)

    def _table(self, name: str) -> jax.Array:
        """A table (vocab, hidden) with a row for each token. In a step on shards each device may have a part of it."""
        path, vocab = (*self.path, name), self.config.vocab_size
        splits_rows = name == "embedding"
        declare_sharding(path, ParamSharding(ROWS, vocab, "tokens of the vocabulary", splits_rows=splits_rows))
        parts, tensor = parts_of(path, ROWS), current_tensor()
        check_is_split("/".join(path), parts, tensor)
        shape = vocab // parts, self.config.hidden_size
        init = named(nn.initializers.normal(0.02), ("vocab", "residual"), self.logical_axes)
        return self.param(name, init, shape, self.param_dtype)

    def _layer(self, index: int, alone: bool = False, deterministic: bool = True) -> TransformerBlock:
        """The layer with this number.

        `alone`: the caller differentiates it by itself, and keeps offloaded residuals on the host. Then it needs no
        barrier against common subexpression elimination.
        """
        config = self.config
        remat = Remat.parse(self.remat, config.num_layers)
        kind = remat.kind_for(index)
        block = TransformerBlock
        if kind in ("full", "offload"):
            policy = offload_policy(remat.names) if kind == "offload" else None
            block = nn.remat(block, policy=policy, prevent_cse=kind == "full" or not alone)
        return block(
            **(shared_fields(config, TransformerBlock) | config.layer_fields(index)),
            epsilon=config.norm_epsilon,
            deterministic=deterministic,
            recipe=self.recipe,
            recompute=self.recompute or kind == "norms",
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            logical_axes=self.logical_axes,
            attention_implementation=self.attention_implementation,
            fp8_attention=self.fp8_attention,
            lora=self.lora,
            kernel_init=nn.initializers.normal(0.02),
            residual_init=nn.initializers.normal(0.02 / (2 * config.num_layers) ** 0.5),  # GPT-2's
            name=f"layer_{index}",
        )


def from_fused_layout(variables: Variables, config: GPTConfig) -> dict[str, PyTree]:
    """Convert variables of a `GPT` from this library's older layout. Variables in the current layout do not change.

    Until version 0.1 queries, keys and values were one kernel `attention/qkv/kernel` (hidden_size, columns): all query
    heads, then all key heads, then all value heads. Its norm was `attention/qkv/norm`. A gated MLP had one
    `mlp/up/kernel`, with the gate in its first half. Trees with the structure of params, such as the moments of an
    optimizer, are converted in the same way: pass `{"params": mu}`.

    Args:
      variables: "params", and "fp8" where there is one, in the older layout. Weight caches are left out:
        cast them again.
      config: of the model.

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


def _cut(linear: Mapping[str, jax.Array], names: tuple[str, ...], widths: list[int]) -> dict[str, PyTree]:
    """Cut kernel and bias of a linear map by columns into those of several maps."""
    ends = np.cumsum(widths)[:-1]
    leaves = {leaf: jnp.split(array, ends, axis=-1) for leaf, array in linear.items()}
    return {name: {leaf: pieces[i] for leaf, pieces in leaves.items()} for i, name in enumerate(names)}
