"""The models that the benchmarks compare: shapes, variants of one model, and how a training step of each is made."""

import contextlib
import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from plain_gpt import PlainGPT, make_plain_step, plain_loss
from plain_llama import PlainLlama

import jax_fp8 as fp8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and the batch of one microbatch; a step of N microbatches trains on N times `batch_size` sequences.

    It is a GPT, or with `mlp_hidden_size` and `num_kv_heads` like Llama, or with `num_experts` like Mixtral: the plain
    model then has room for `capacity` times the tokens that an expert has on average.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    batch_size: int
    seq_len: int = 2048
    vocab_size: int = 50_304
    num_kv_heads: int | None = None
    mlp_hidden_size: int | None = None
    tied: bool = True
    num_experts: int = 0
    experts_per_token: int = 2
    capacity: float = 1.0

    def flops(self, num_params: int, tokens: int) -> float:
        """Model FLOPs of forward and backward: 6 a parameter and token, and causal attention (half of the square).

        Of an embedding apart from the head, rows are taken, and nothing is multiplied. Nor are the experts that a token
        does not go to.
        """
        multiplied = num_params - (0 if self.tied else self.vocab_size * self.hidden_size)
        if self.mlp_hidden_size is not None and self.num_experts:
            idle = self.num_experts - self.experts_per_token
            multiplied -= self.num_layers * idle * 3 * self.hidden_size * self.mlp_hidden_size
        return tokens * (6 * multiplied + 6 * self.num_layers * self.hidden_size * self.seq_len)

    @property
    def sizes(self) -> dict:
        """The arguments that plain models and `GPTConfig` have in common."""
        names = "vocab_size", "num_layers", "num_heads", "hidden_size"
        return {name: getattr(self, name) for name in names}

    @property
    def of_llama(self) -> dict:
        return {"num_kv_heads": self.num_kv_heads, "mlp_hidden_size": self.mlp_hidden_size}

    @property
    def config(self) -> fp8.GPTConfig:
        sizes = self.sizes | {"max_seq_len": self.seq_len}
        if self.mlp_hidden_size is None:
            return fp8.GPTConfig(**sizes)
        form = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "use_bias": False}
        experts = {"num_experts": self.num_experts, "experts_per_token": self.experts_per_token}
        return fp8.GPTConfig(**sizes, **self.of_llama, **form, **experts, tie_embeddings=self.tied)

    def plain(self, dot_general_cls: Callable | None) -> nn.Module:
        """The same model in plain Flax."""
        if self.mlp_hidden_size is None:
            return PlainGPT(**self.sizes, max_seq_len=self.seq_len, dot_general_cls=dot_general_cls)
        if not self.num_experts:
            return PlainLlama(**self.sizes, **self.of_llama, tied=self.tied, dot_general_cls=dot_general_cls)
        if dot_general_cls is not None:
            raise ValueError("Flax's own FP8 has no experts; compare with bf16")
        names = "num_experts", "experts_per_token", "capacity"
        experts = {name: getattr(self, name) for name in names}
        return PlainLlama(**self.sizes, **self.of_llama, tied=self.tied, experts=experts)


def _llama(num_layers, hidden_size, mlp_hidden_size, batch_size, seq_len, vocab_size=128_256, heads=32, tied=False):
    return Shape(num_layers, hidden_size, heads, batch_size, seq_len, vocab_size, heads // 4, mlp_hidden_size, tied)


# Llama 3 8B (https://arxiv.org/abs/2407.21783, table 3), and eight of its layers; Llama 3.2 1B, by its model card.
# Eight layers with experts half as wide and half as large as Mixtral's: 3.0 billion params, of which a token uses 0.9.
SHAPES = {
    "1.3b": Shape(num_layers=24, hidden_size=2048, num_heads=16, batch_size=8),
    "4096": Shape(num_layers=8, hidden_size=4096, num_heads=32, batch_size=4),
    "llama_8192": _llama(8, 4096, 14_336, batch_size=1, seq_len=8192),
    "llama_2048": _llama(8, 4096, 14_336, batch_size=4, seq_len=2048),
    "llama_1b": _llama(16, 2048, 8192, batch_size=8, seq_len=2048, tied=True),
    "llama3_8b": _llama(32, 4096, 14_336, batch_size=1, seq_len=8192),
    "moe_8x": Shape(8, 2048, 16, 8, 2048, 32_000, num_kv_heads=4, mlp_hidden_size=7168, tied=False, num_experts=8),
    "tiny": Shape(num_layers=1, hidden_size=64, num_heads=4, batch_size=2, seq_len=32, vocab_size=256),
    "tiny_llama": _llama(1, 64, 96, batch_size=2, seq_len=32, vocab_size=256, heads=4),
    "tiny_moe": Shape(1, 128, 4, 2, 64, 256, num_kv_heads=2, mlp_hidden_size=128, tied=False, num_experts=4),
}

PLAIN_DOTS = {"bf16": None, "flax_direct": nn.Fp8DirectDotGeneralOp}
FAST = {"split_accumulator": ()}  # fast accumulation in all GEMMs of layers, as Transformer Engine's in JAX
MODELS = {
    "ours_bf16": {"recipe": None},
    "delayed": {"recipe": fp8.DelayedScaling()},
    "current": {"recipe": fp8.CurrentScaling()},
    "block": {"recipe": fp8.BlockScaling()},
    "block_1d1d": {"recipe": fp8.BlockScaling(wgrad="1d1d")},
    "block_head": {"recipe": fp8.BlockScaling(), "head_recipe": fp8.BlockScaling()},
    "delayed_fast": {"recipe": fp8.DelayedScaling(**FAST)},
    "current_fast": {"recipe": fp8.CurrentScaling(**FAST)},
    "delayed_fast_tuned": {"recipe": fp8.DelayedScaling(**FAST)},
    "delayed_fast_head": {"recipe": fp8.DelayedScaling(**FAST), "head_recipe": fp8.CurrentScaling()},
    "delayed_fast_head_tuned": {"recipe": fp8.DelayedScaling(**FAST), "head_recipe": fp8.CurrentScaling()},
    "current_fast_head": {"recipe": fp8.CurrentScaling(**FAST), "head_recipe": fp8.CurrentScaling()},
    "delayed_recompute": {"recipe": fp8.DelayedScaling(), "recompute": True},
}
MODELS |= {f"{name}_cached": MODELS[name] for name in ("block_head", "delayed_fast_head")}
# For models that fill the GPU: 8 bytes a param with its moments, and no norm's result is kept.
SMALL = {"param_dtype": jnp.bfloat16, "remat": "norms"}
MODELS |= {f"{name}_small": MODELS[name] | SMALL for name in ("ours_bf16", "delayed_fast_head", "current_fast_head")}
MODELS["delayed_fast_head_tuned_bf16"] = MODELS["delayed_fast_head_tuned"] | {"param_dtype": jnp.bfloat16}
VARIANTS = {
    "bf16": "plain Flax, bfloat16",
    "flax_direct": "plain Flax, `Fp8DirectDotGeneralOp`",
    "ours_bf16": "jax_fp8, `recipe=None`",
    "delayed": "jax_fp8, `DelayedScaling`",
    "current": "jax_fp8, `CurrentScaling`",
    "block": "jax_fp8, `BlockScaling`",
    "block_1d1d": 'jax_fp8, `BlockScaling(wgrad="1d1d")`',
    "block_head": "jax_fp8, `BlockScaling`, head in FP8",
    "block_head_cached": "jax_fp8, `BlockScaling`, head in FP8, weights in FP8 in the state",
    "delayed_fast": "jax_fp8, `DelayedScaling`, fast accumulation",
    "current_fast": "jax_fp8, `CurrentScaling`, fast accumulation",
    "delayed_fast_tuned": "jax_fp8, `DelayedScaling`, fast accumulation, tuned GEMMs",
    "delayed_fast_head": "jax_fp8, `DelayedScaling`, fast accumulation, head in FP8",
    "delayed_fast_head_cached": (
        "jax_fp8, `DelayedScaling`, fast accumulation, head in FP8, weights in FP8 in the state"
    ),
    "delayed_fast_head_tuned": "jax_fp8, `DelayedScaling`, fast accumulation, head in FP8, tuned GEMMs",
    "delayed_fast_head_tuned_bf16": (
        "jax_fp8, `DelayedScaling`, fast accumulation, head in FP8, tuned GEMMs, bfloat16 params with remainders"
    ),
    "current_fast_head": "jax_fp8, `CurrentScaling`, fast accumulation, head in FP8",
    "delayed_recompute": "jax_fp8, `DelayedScaling`, `recompute`",
}
VARIANTS |= {
    f"{name}_small": f'{VARIANTS[name]}, `remat="norms"`, bfloat16 params with remainders and bfloat16 moments'
    for name in ("ours_bf16", "delayed_fast_head", "current_fast_head")
}
TUNED = ("delayed_fast_tuned", "delayed_fast_head_tuned", "delayed_fast_head_tuned_bf16")
COMMON_VARIANTS = ["bf16", "flax_direct", "ours_bf16", "delayed", "current"]


def gemms_of(variant: str) -> contextlib.AbstractContextManager:
    """The context in which a variant is traced: with this machine's table of tuned GEMMs, which must be there,
    or cuBLASLt's own choices.
    """
    return fp8.tuned_gemms(fp8.GemmTable.load() if variant in TUNED else None)


def build(variant: str, shape: Shape, microbatches: int, tokens: jax.Array) -> tuple[Callable, object, int]:
    """`(step, state, number of parameters)` of one variant; `step(state, tokens)` gives `(state, {"loss"})`."""
    plain = variant in PLAIN_DOTS
    if plain:
        model = shape.plain(PLAIN_DOTS[variant])
        tx = optax.adamw(1e-4, weight_decay=0.1)
    else:
        model = fp8.GPT(shape.config, **MODELS[variant])
        # Of float32 params nothing is kept apart; of bfloat16 params the 16 bits that they lack.
        moments = jnp.bfloat16 if variant.endswith("_small") else jnp.float32
        tx = fp8.fused_adamw(1e-4, weight_decay=0.1, master_dtype="remainder", mu_dtype=moments, nu_dtype=moments)
    variables = jax.jit(model.init)(jax.random.key(1), tokens[: shape.batch_size, :-1])
    num_params = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    if plain:
        state = (dict(variables), tx.init(variables["params"]))
        return make_plain_step(plain_loss(model), tx, microbatches), state, num_params
    recipe = MODELS[variant]["recipe"]
    if variant.endswith("_cached"):
        inputs = tokens[: shape.batch_size, :-1]
        cast = jax.jit(lambda variables: fp8.cast_weights(variables, recipe, forward=lambda v: model.apply(v, inputs)))
        variables = dict(variables) | {"fp8_cache": cast(variables)}
    state = fp8.TrainState.create(variables=variables, tx=tx)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches=microbatches)
    return step, state, num_params
