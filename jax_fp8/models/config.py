"""The shape of a GPT, and known shapes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jax_fp8.core.checks import describe
from jax_fp8.models.checks import check_config
from jax_fp8.ops.rotary import ROTARY_BASE, RotaryScaling


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    Sizes are in elements; `mlp_hidden_size` None is four times `hidden_size`; `positions` is "learned" or "rotary".

    Args:
      rotary_base, rotary_scaling: of rotary positions; see ops/rotary.py.
      norm_epsilon: of all norms.
      head_dim: features of a head; None is `hidden_size / num_heads`.
      use_qkv_bias: of queries, keys and values; None is `use_bias`, which all other linear maps of a layer have.
      qk_norm: RMSNorm of each head of queries and keys.
      sliding_window: how many tokens a token sees, the last of which is itself; None: all before it.
      num_experts: MLPs of each layer, of which a token goes to `experts_per_token`; 0 is one MLP for all tokens.
        `mlp_hidden_size` is that of each. Experts have no biases. The other fields of experts are those of
        `LayerNormMoE`.
      dropout_rate: how much training drops of embeddings and of what attention and MLP add to them, as GPT-2's.
      attention_dropout_rate: how much of the weights of attention, which is XLA's then; as of `SelfAttention`.
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
        check_config(self)

    @classmethod
    def preset(cls, name: str, **overrides) -> "GPTConfig":
        """A known shape by name, with any field overridden."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **overrides)

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "GPTConfig":
        """Of what `dataclasses.asdict` made, also after it was JSON; fields that it lacks have their defaults."""
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


def _preset(layers, heads, width, vocab=50_304, seq=2048, **others):
    return GPTConfig(num_layers=layers, num_heads=heads, hidden_size=width, vocab_size=vocab, max_seq_len=seq, **others)


def _llama(layers, heads, width, mlp, **others):
    llama3 = {"vocab": 128_256, "seq": 8192, "num_kv_heads": 8, "rotary_base": 500_000.0, "norm_epsilon": 1e-5}
    shape = {"mlp_hidden_size": mlp, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary"}
    return _preset(layers, heads, width, **{"use_bias": False, "tie_embeddings": False, **shape, **llama3, **others})


def _qwen(layers, heads, width, mlp, kv_heads, vocab, seq, **others):
    qwen = {"rotary_base": 1e6, "norm_epsilon": 1e-6, "vocab": vocab, "seq": seq, "num_kv_heads": kv_heads}
    return _llama(layers, heads, width, mlp, **qwen, **others)


# GPT-2: https://openai.com/research/better-language-models; GPT-3: https://arxiv.org/abs/2005.14165, table 2.1; the one
# with a trillion: https://arxiv.org/abs/2104.04473, table 1, but with heads of 128, the most that cuDNN takes. Their
# vocabulary is padded to a multiple of 128. Llama 3: https://arxiv.org/abs/2407.21783, table 3, as it was before the
# texts became long: sequences of 8,192 tokens, no scaling. Llama 3.1, Llama 3.2, Qwen2.5 and Qwen3 are as in the
# config.json of their weights. So is Mixtral; the 0.02 that its load-balancing loss counts there is 0.00125 here, where
# each layer has one, and shares add up to 1 and not to the experts of a token.
PRESETS = {
    "tiny": _preset(4, 4, 128, vocab=256, seq=128),
    "tiny-llama": _llama(4, 4, 128, 384, vocab=256, seq=128, num_kv_heads=2),
    "tiny-moe": _llama(4, 4, 128, 256, vocab=256, seq=128, num_kv_heads=2, num_experts=4),
    "gpt2-124m": _preset(12, 12, 768, seq=1024),
    "gpt2-350m": _preset(24, 16, 1024, seq=1024),
    "gpt2-774m": _preset(36, 20, 1280, seq=1024),
    "gpt3-1.3b": _preset(24, 16, 2048),
    "gpt3-2.7b": _preset(32, 32, 2560),
    "gpt3-6.7b": _preset(32, 32, 4096),
    "gpt3-13b": _preset(40, 40, 5120),
    "gpt3-175b": _preset(96, 96, 12_288),
    "gpt-1t": _preset(128, 200, 25_600),
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
