"""The shape of a GPT, and known shapes by name."""

from dataclasses import dataclass, replace

from jax_fp8.models.checks import check_config


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    Sizes are in elements; `mlp_hidden_size` None is four times `hidden_size`; `positions` is "learned" or "rotary".
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

    def __post_init__(self):
        check_config(self)

    @classmethod
    def preset(cls, name: str, **overrides) -> "GPTConfig":
        """A known shape by name, with any field overridden."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **overrides)


def _preset(layers, heads, width, vocab=50_304, seq=2048, **others):
    return GPTConfig(num_layers=layers, num_heads=heads, hidden_size=width, vocab_size=vocab, max_seq_len=seq, **others)


def _llama3(layers, heads, width, mlp):
    return _preset(
        layers,
        heads,
        width,
        vocab=128_256,
        seq=8192,
        num_kv_heads=8,
        mlp_hidden_size=mlp,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        use_bias=False,
        tie_embeddings=False,
    )


# GPT-2: https://openai.com/research/better-language-models; GPT-3: https://arxiv.org/abs/2005.14165, table 2.1; the one
# with a trillion: https://arxiv.org/abs/2104.04473, table 1, but with heads of 128, the most that cuDNN takes. Their
# vocabulary is padded to a multiple of 128. Llama 3: https://arxiv.org/abs/2407.21783, table 3, but for its rotary
# base.
PRESETS = {
    "tiny": _preset(4, 4, 128, vocab=256, seq=128),
    "gpt2-124m": _preset(12, 12, 768, seq=1024),
    "gpt2-350m": _preset(24, 16, 1024, seq=1024),
    "gpt2-774m": _preset(36, 20, 1280, seq=1024),
    "gpt3-1.3b": _preset(24, 16, 2048),
    "gpt3-2.7b": _preset(32, 32, 2560),
    "gpt3-6.7b": _preset(32, 32, 4096),
    "gpt3-13b": _preset(40, 40, 5120),
    "gpt3-175b": _preset(96, 96, 12_288),
    "gpt-1t": _preset(128, 200, 25_600),
    "llama3-8b": _llama3(32, 32, 4096, 14_336),
    "llama3-70b": _llama3(80, 64, 8192, 28_672),
    "llama3-405b": _llama3(126, 128, 16_384, 53_248),
}
