"""The shape of a GPT, and known shapes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.norm import check_norm
from jax_fp8.nn.dropout import is_rate
from jax_fp8.ops.rotary import ROTARY_BASE, RotaryScaling, check_rotary

DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate")


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
      dropout_rate: the fraction that training drops of the embeddings, and of each branch that attention and MLP add to
        the residual stream, as in GPT-2.
      attention_dropout_rate: the fraction of the softmax weights that training drops. It needs XLA's attention; see
        `SelfAttention`.

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
    rotary_scaling: RotaryScaling | None = None
    norm_epsilon: float = 1e-6
    head_dim: int | None = None
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

    def __post_init__(self):
        _check(self)

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
        return replace(PRESETS[name], **overrides)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "GPTConfig":
        """Make a config from a dict of `dataclasses.asdict`, also after it was JSON.

        Missing fields have their defaults.

        Args:
          described: fields by name; `rotary_scaling` may be a dict of the fields of a `RotaryScaling`.

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
        scaling = described.get("rotary_scaling")
        return cls(
            **{**described, "rotary_scaling": RotaryScaling(**scaling) if isinstance(scaling, dict) else scaling}
        )

    @property
    def features_of_head(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


def _check(config: GPTConfig) -> None:
    """Raise unless the fields of a config fit together."""
    for name in ("vocab_size", "num_heads", "hidden_size", "max_seq_len"):
        check_integer(name, getattr(config, name))
    check_integer("num_layers", config.num_layers, least=0)
    for name in ("num_kv_heads", "mlp_hidden_size", "head_dim", "sliding_window"):
        if getattr(config, name) is not None:
            check_integer(name, getattr(config, name))
    for name in ("use_bias", "tie_embeddings", "qk_norm", "normalize_router_weights"):
        check_bool(name, getattr(config, name))
    if config.use_qkv_bias is not None:
        check_bool("use_qkv_bias", config.use_qkv_bias)
    check_number("norm_epsilon", config.norm_epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
    for name in DROPOUT_RATES:
        check_number(name, getattr(config, name), "of at least 0 and below 1", is_rate)
    check_rotary(config.rotary_base, config.rotary_scaling)
    if config.positions not in ("learned", "rotary"):
        raise ValueError(f'positions must be "learned" or "rotary", got {config.positions!r}')
    check_norm(config.norm)
    is_gated(config.activation)
    _check_experts(config)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.hidden_size
    if config.head_dim is None and width % heads:
        raise ValueError(
            f"num_heads must divide hidden_size, got num_heads={heads} and hidden_size={width}; change one of them, or "
            "give head_dim"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}")
    if config.positions == "rotary" and config.features_of_head % 2:
        raise ValueError(
            "rotary positions rotate pairs and need an even head_dim, which is hidden_size / num_heads if it is None, "
            f"got {config.features_of_head}; change one of them"
        )
    if config.positions != "rotary" and (config.rotary_scaling is not None or config.rotary_base != ROTARY_BASE):
        raise ValueError(
            f"rotary_base and rotary_scaling are for rotary positions, got them with positions={config.positions!r}; "
            "leave them out"
        )


def _check_experts(config: GPTConfig) -> None:
    check_integer("num_experts", config.num_experts, least=0)
    check_integer("experts_per_token", config.experts_per_token)
    for name in ("router_aux_loss", "router_z_loss"):
        check_number(name, getattr(config, name), "that is not negative", lambda weight: weight >= 0)
    if config.num_experts and config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token must be at most num_experts, got {config.experts_per_token} of {config.num_experts}; "
            "change one of them"
        )


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


# GPT-2: https://openai.com/research/better-language-models; GPT-3: https://arxiv.org/abs/2005.14165, table 2.1; the one
# with a trillion: https://arxiv.org/abs/2104.04473, table 1, but with heads of 128, the most that cuDNN takes. Their
# vocabulary is padded to a multiple of 128. Llama 3: https://arxiv.org/abs/2407.21783, table 3, before its training on
# long sequences: 8,192 tokens, no scaling. Llama 3.1, Llama 3.2, Qwen2.5, Qwen3 and Mixtral are as in the config.json
# of their weights. Mixtral's coefficient of the load-balancing loss, 0.02 there, is 0.02 * 2 / 32 here: each layer has
# a loss of its own, and shares add up to 1 instead of to the experts of a token.
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
    "qwen3-8b": _qwen(36, 32, 4096, 12_288, 8, vocab=151_936, seq=40_960, qk_norm=True),
}
