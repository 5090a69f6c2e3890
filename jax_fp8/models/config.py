"""The shape of a GPT, and known shapes by name."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from jax_fp8.core.checks import describe
from jax_fp8.models.config_checks import LAYER_NUMBERS, check_fields
from jax_fp8.ops.rotary import ROTARY_BASE
from jax_fp8.ops.rotary_scaling import RotaryScaling, Scaling, scaling_from


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT; the fields are checked when it is made.

    Args:
      vocab_size: tokens of the vocabulary, padding included.
      num_layers: Transformer layers.
      num_heads: query heads of a layer.
      hidden_size: features of a token between layers.
      max_seq_len: tokens of the longest sequence.
      num_kv_heads: key and value heads, each shared by several queries; None is `num_heads`.
      mlp_hidden_size: hidden features of an MLP; None is four times `hidden_size`.
      norm: "layernorm" or "rmsnorm" (https://arxiv.org/abs/1910.07467).
      activation: of the MLPs, such as "gelu", or gated, such as "swiglu" (https://arxiv.org/abs/2002.05202).
      positions: "learned" or "rotary" (https://arxiv.org/abs/2104.09864).
      use_bias: of the linear maps of a layer.
      tie_embeddings: use the embedding as the table of the head, too.
      rotary_base, rotary_scaling: of rotary positions; see ops/rotary.py.
      norm_epsilon: of all norms.
      head_dim: features of a head; None is `hidden_size / num_heads`.
      use_qkv_bias: of queries, keys and values; None is `use_bias`, which all other linear maps of a layer have.
      qk_norm: RMSNorm of each head of queries and keys.
      sliding_window: how many tokens a token sees, itself last; None: all earlier ones.
      num_experts: MLPs of each layer, each with `mlp_hidden_size`; a token goes to `experts_per_token` of them. 0: one
        MLP for all tokens. Experts have no biases.
      experts_per_token, normalize_router_weights, router_aux_loss, router_z_loss: as in `LayerNormMoE`.
      router_scores, router_scale, router_correction_bias: as in `LayerNormMoE`.
      expert_groups, groups_per_token, group_score_experts: as in `LayerNormMoE`.
      shared_expert_features, gate_shared_expert, capacity_factor: as in `LayerNormMoE`.
      dense_layers: the numbers of the layers without experts, which have one MLP for all tokens.
      dense_hidden_size: hidden features of the MLP of these layers; None is `mlp_hidden_size`.
      dropout_rate: the fraction that training drops of the embeddings, and of each branch that attention and MLP add to
        the residual stream, as in GPT-2.
      attention_dropout_rate: the fraction of the softmax weights that training drops. It needs XLA's attention; see
        `SelfAttention`.
      windowed_layers: the numbers of the layers that `sliding_window` is for; None: all.
      unrotated_layers: the numbers of the layers without rotary positions.
      window_rotary_base: the `rotary_base` of layers with a window, which then have no `rotary_scaling`; None: as in
        other layers.
      rotary_fraction, qk_norm_over, attention_scale, attention_logit_cap: as in `SelfAttention`.
      norm_placement, zero_centered_scale, residual_multiplier: as in `SelfAttention`. `zero_centered_scale` is for the
        final norm, too.
      use_mlp_bias: of MLPs; None is `use_bias`.
      embedding_multiplier: of embeddings, rounded to the dtype of the model.
      logit_divisor: of the logits of the head.
      logit_cap: logits of the head are `cap * tanh(logits / cap)`; None leaves them.

    Raises:
      ValueError: if a size is not a positive integer, or another field has a value that is not listed here. Also if
        fields do not fit together, such as a `hidden_size` that `num_heads` does not divide.

    Example:
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=256, num_layers=2, num_heads=4, hidden_size=64)
      >>> config.features_of_head, config.kv_heads
      (16, 4)
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_seq_len: int = 1024
    num_kv_heads: int | None = None
    mlp_hidden_size: int | None = None
    norm: str = "layernorm"
    activation: str = "gelu"
    positions: str = "learned"
    use_bias: bool = True
    tie_embeddings: bool = True
    rotary_base: float = ROTARY_BASE
    rotary_scaling: Scaling | None = None
    norm_epsilon: float = 1e-6
    head_dim: int | None = None
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
    dense_layers: tuple[int, ...] = ()
    dense_hidden_size: int | None = None
    router_aux_loss: float = 0.01
    router_z_loss: float = 0.0
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    windowed_layers: tuple[int, ...] | None = None
    unrotated_layers: tuple[int, ...] = ()
    window_rotary_base: float | None = None
    rotary_fraction: float = 1.0
    qk_norm_over: str = "head"
    attention_scale: float | None = None
    attention_logit_cap: float | None = None
    norm_placement: str = "before"
    zero_centered_scale: bool = False
    residual_multiplier: float = 1.0
    use_mlp_bias: bool | None = None
    embedding_multiplier: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self):
        for name in LAYER_NUMBERS:
            if isinstance(getattr(self, name), list):  # as JSON has them
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(self)

    @classmethod
    def preset(cls, name: str, **overrides: object) -> "GPTConfig":
        """Make a known shape by its name, with any field overridden.

        Args:
          name: of the preset, such as "llama3-8b".
          **overrides: fields by name.

        Returns:
          The config.

        Raises:
          ValueError: if there is no such preset, or if the overridden fields do not fit.
          TypeError: if an override is no field.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(overrides) - known):
            raise TypeError(f"a preset takes fields of GPTConfig, {', '.join(sorted(known))}, got {', '.join(unknown)}")
        return replace(PRESETS[name], **overrides)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "GPTConfig":
        """Make a config from a dict of `dataclasses.asdict`, also after it was JSON.

        Missing fields have their defaults.

        Args:
          described: fields by name; `rotary_scaling` may be a dict of the fields of a scaling.

        Returns:
          The config.

        Raises:
          ValueError: if an entry is no field, or if the fields do not fit.
          TypeError: if a field without a default is missing.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(described, Mapping) or set(described) - known:
            arrived = (
                ", ".join(sorted(set(described) - known)) if isinstance(described, Mapping) else describe(described)
            )
            raise ValueError(f"a GPTConfig is made of its fields, {', '.join(sorted(known))}, got {arrived}")
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in needed if name not in described]:
            raise TypeError(f"a GPTConfig needs {', '.join(needed)}, got no {', '.join(missing)}; add what is missing")
        return cls(**{**described, "rotary_scaling": scaling_from(described.get("rotary_scaling"))})

    @property
    def features_of_head(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def layer_fields(self, index: int) -> dict[str, Any]:
        """The fields of a `TransformerBlock` in which layers differ.

        Args:
          index: the number of the layer, from 0.

        Returns:
          `sliding_window`, `rotary`, `rotary_base`, `rotary_scaling`, `num_experts` and `mlp_hidden_features` of this
          layer, by name.

        Example:
          >>> import jax_fp8 as fp8
          >>> config = fp8.GPTConfig.preset("tiny-llama", sliding_window=64, windowed_layers=(0, 2))
          >>> [config.layer_fields(index)["sliding_window"] for index in range(3)]
          [64, None, 64]
        """
        is_windowed = self.sliding_window is not None and index in (
            range(self.num_layers) if self.windowed_layers is None else self.windowed_layers
        )
        has_own_base = is_windowed and self.window_rotary_base is not None
        is_dense = index in self.dense_layers
        hidden = self.mlp_hidden_size or 4 * self.hidden_size
        return {
            "sliding_window": self.sliding_window if is_windowed else None,
            "rotary": self.positions == "rotary" and index not in self.unrotated_layers,
            "rotary_base": self.window_rotary_base if has_own_base else self.rotary_base,
            "rotary_scaling": None if has_own_base else self.rotary_scaling,
            "num_experts": 0 if is_dense else self.num_experts,
            "mlp_hidden_features": (self.dense_hidden_size or hidden) if is_dense else hidden,
        }

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


def _gpt(layers: int, heads: int, width: int, vocab: int = 50_304, seq: int = 2048) -> GPTConfig:
    return GPTConfig(num_layers=layers, num_heads=heads, hidden_size=width, vocab_size=vocab, max_seq_len=seq)


def _llama(
    layers: int,
    heads: int,
    width: int,
    mlp: int,
    kv_heads: int = 8,
    vocab: int = 128_256,
    seq: int = 8192,
    **overrides: object,
) -> GPTConfig:
    """The shape of Llama 3, and `overrides` of other fields."""
    llama3 = GPTConfig(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_size=width,
        mlp_hidden_size=mlp,
        vocab_size=vocab,
        max_seq_len=seq,
        norm="rmsnorm",
        norm_epsilon=1e-5,
        activation="swiglu",
        positions="rotary",
        rotary_base=500_000.0,
        use_bias=False,
        tie_embeddings=False,
    )
    return replace(llama3, **overrides)


def _qwen(
    layers: int, heads: int, width: int, mlp: int, kv_heads: int, vocab: int, seq: int, **overrides: object
) -> GPTConfig:
    qwen = {"rotary_base": 1e6, "norm_epsilon": 1e-6, **overrides}
    return _llama(layers, heads, width, mlp, kv_heads, vocab, seq, **qwen)


def _qwen3_moe(layers: int, heads: int, width: int, mlp: int) -> GPTConfig:
    """The shape of Qwen3 with 128 experts, of which a token goes to 8."""
    moe = {"num_experts": 128, "experts_per_token": 8, "router_aux_loss": 0.001 * 8 / layers}
    return _qwen(layers, heads, width, mlp, 4, vocab=151_936, seq=40_960, head_dim=128, qk_norm=True, **moe)


# GPT-2: https://openai.com/research/better-language-models; GPT-3: https://arxiv.org/abs/2005.14165, table 2.1; the one
# with a trillion: https://arxiv.org/abs/2104.04473, table 1, but with heads of 128, the most that cuDNN takes. Their
# vocabulary is padded to a multiple of 128. Llama 3: https://arxiv.org/abs/2407.21783, table 3, before its training on
# long sequences: 8,192 tokens, no scaling. Llama 3.1, Llama 3.2, Qwen2.5, Qwen3 and Mixtral are as in the config.json
# of their weights. Mixtral's coefficient of the load-balancing loss, 0.02 there, is 0.02 * 2 / 32 here: each layer has
# a loss of its own, and shares add up to 1 instead of to the experts of a token. Qwen3's is 0.001 in the same way.
# DeepSeek-V2-Lite (https://arxiv.org/abs/2405.04434, appendix B) is without its attention by latents: each of its 16
# heads has queries, keys and values of 128 features.
PRESETS = {
    "tiny": _gpt(4, 4, 128, vocab=256, seq=128),
    "tiny-llama": _llama(4, 4, 128, 384, kv_heads=2, vocab=256, seq=128),
    "tiny-moe": _llama(4, 4, 128, 256, kv_heads=2, vocab=256, seq=128, num_experts=4),
    "gpt2-124m": _gpt(12, 12, 768, seq=1024),
    "gpt2-350m": _gpt(24, 16, 1024, seq=1024),
    "gpt2-774m": _gpt(36, 20, 1280, seq=1024),
    "gpt3-1.3b": _gpt(24, 16, 2048),
    "gpt3-2.7b": _gpt(32, 32, 2560),
    "gpt3-6.7b": _gpt(32, 32, 4096),
    "gpt3-13b": _gpt(40, 40, 5120),
    "gpt3-175b": _gpt(96, 96, 12_288),
    "gpt-1t": _gpt(128, 200, 25_600),
    "llama3-8b": _llama(32, 32, 4096, 14_336),
    "llama3-70b": _llama(80, 64, 8192, 28_672),
    "llama3-405b": _llama(126, 128, 16_384, 53_248),
    "llama3.1-8b": _llama(32, 32, 4096, 14_336, seq=131_072, rotary_scaling=RotaryScaling(factor=8.0)),
    "llama3.2-1b": _llama(
        16, 32, 2048, 8192, seq=131_072, rotary_scaling=RotaryScaling(factor=32.0), tie_embeddings=True
    ),
    "mixtral-8x7b": _llama(
        32, 32, 4096, 14_336, vocab=32_000, seq=32_768, rotary_base=1e6, num_experts=8, router_aux_loss=0.02 * 2 / 32
    ),
    "qwen2.5-7b": _qwen(28, 28, 3584, 18_944, 4, vocab=152_064, seq=131_072, use_qkv_bias=True),
    "qwen3-0.6b": _qwen(
        28, 16, 1024, 3072, 8, vocab=151_936, seq=40_960, head_dim=128, qk_norm=True, tie_embeddings=True
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 32, 2048, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 64, 4096, 1536),
    "deepseek-v2-lite": _qwen(
        27,
        16,
        2048,
        1408,
        16,
        vocab=102_400,
        seq=4096,
        rotary_base=10_000.0,
        num_experts=64,
        experts_per_token=6,
        normalize_router_weights=False,
        router_aux_loss=0.001,
        shared_expert_features=2 * 1408,
        dense_layers=(0,),
        dense_hidden_size=10_944,
    ),
    "qwen3-8b": _qwen(36, 32, 4096, 12_288, 8, vocab=151_936, seq=40_960, qk_norm=True),
}
