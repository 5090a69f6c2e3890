"""The models that the benchmarks compare: shapes, variants of a model, and how the training step of each is made.

The name of a variant is the recipe, and then options: `delayed_fast_head` is DelayedScaling with fast accumulation and
the head in FP8. Plain Flax has no options.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

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
        """The arguments that plain models and `GPTConfig` share."""
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
# Four layers with the experts of Qwen3-30B-A3B: 2.6 billion params, of which a token uses 0.3.
SHAPES = {
    "1.3b": Shape(num_layers=24, hidden_size=2048, num_heads=16, batch_size=8),
    "350m": Shape(num_layers=24, hidden_size=1024, num_heads=16, batch_size=8, seq_len=1024),
    "4096": Shape(num_layers=8, hidden_size=4096, num_heads=32, batch_size=4),
    "llama_8192": _llama(8, 4096, 14_336, batch_size=1, seq_len=8192),
    "llama_2048": _llama(8, 4096, 14_336, batch_size=4, seq_len=2048),
    "llama_1b": _llama(16, 2048, 8192, batch_size=8, seq_len=2048, tied=True),
    "llama_16384": _llama(8, 4096, 14_336, batch_size=1, seq_len=16_384),
    "llama3_8b": _llama(32, 4096, 14_336, batch_size=1, seq_len=8192),
    "moe_8x": Shape(8, 2048, 16, 8, 2048, 32_000, num_kv_heads=4, mlp_hidden_size=7168, tied=False, num_experts=8),
    "moe_128x": Shape(
        4,
        2048,
        16,
        4,
        4096,
        32_000,
        num_kv_heads=4,
        mlp_hidden_size=768,
        tied=False,
        num_experts=128,
        experts_per_token=8,
    ),
    "tiny": Shape(num_layers=1, hidden_size=64, num_heads=4, batch_size=2, seq_len=32, vocab_size=256),
    "tiny_llama": _llama(1, 64, 96, batch_size=2, seq_len=32, vocab_size=256, heads=4),
    "tiny_moe": Shape(1, 128, 4, 2, 64, 256, num_kv_heads=2, mlp_hidden_size=128, tied=False, num_experts=4),
}

PLAIN = {"bf16": "bfloat16", "flax_direct": "`Fp8DirectDotGeneralOp`"}  # Flax
PLAIN_DOTS = {"bf16": None, "flax_direct": nn.Fp8DirectDotGeneralOp}
RECIPES = {
    "ours_bf16": None,
    "delayed": fp8.DelayedScaling(),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
}
OPTIONS = {
    "1d1d": '`wgrad="1d1d"`',
    "fast": "fast accumulation",  # in all GEMMs of layers, as Transformer Engine's in JAX
    "head": "head in FP8",
    "attention": "attention in FP8",
    "tuned": "tuned GEMMs",
    "cached": "weights in FP8 in the state",
    "recompute": "`recompute`",
    "bf16": "bfloat16 params with remainders",
    "small": 'bfloat16 params with remainders, bfloat16 moments, `remat="norms"`',  # 8 bytes a param: fills a GPU
}
OF_BF16 = ("recompute", "bf16", "small")  # what a model without FP8 can have of these
COMMON_VARIANTS = ["bf16", "flax_direct", "ours_bf16", "delayed", "current"]


def options_of(trainer: str) -> tuple[str, ...]:
    """The options of one of RECIPES."""
    if RECIPES[trainer] is None:
        return OF_BF16
    return tuple(option for option in OPTIONS if option != "1d1d" or trainer == "block")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A recipe, one of PLAIN or of RECIPES, and OPTIONS."""

    trainer: str
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> "Variant":
        """The variant of a name such as "bf16" or "delayed_fast_head"."""
        if name in PLAIN:
            return cls(name)
        for trainer in RECIPES:
            options = tuple(name.removeprefix(trainer).split("_")[1:])
            if name == "_".join((trainer, *options)) and len({*options} & {*options_of(trainer)}) == len(options):
                return cls(trainer, options)
        known = "; ".join(f"{trainer} and any of {', '.join(options_of(trainer))}" for trainer in RECIPES)
        raise ValueError(
            f"a variant must be {' or '.join(PLAIN)}, or a trainer and its options, each once, joined by _ "
            f"({known}), got {name!r}"
        )

    def __str__(self) -> str:
        """The name as tables have it."""
        if self.trainer in PLAIN:
            return f"plain Flax, {PLAIN[self.trainer]}"
        recipe = RECIPES[self.trainer]
        named = "`recipe=None`" if recipe is None else f"`{type(recipe).__name__}`"
        return ", ".join(("jax_fp8", named, *(OPTIONS[option] for option in self.options)))

    @property
    def recipe(self) -> Any:
        changes = {"split_accumulator": ()} if "fast" in self.options else {}
        changes |= {"wgrad": "1d1d"} if "1d1d" in self.options else {}
        recipe: Any = RECIPES[self.trainer]
        return dataclasses.replace(recipe, **changes) if changes else recipe

    def model(self, config: fp8.GPTConfig) -> fp8.GPT:
        has_state = self.recipe is not None and self.recipe.has_state
        fields: dict[str, Any] = {"recipe": self.recipe}
        if "head" in self.options:  # which has no history
            fields["head_recipe"] = fp8.CurrentScaling() if has_state else RECIPES[self.trainer]
        if {"bf16", "small"} & {*self.options}:
            fields["param_dtype"] = jnp.bfloat16
        if "small" in self.options:
            fields["remat"] = "norms"
        switches = {"attention": "fp8_attention", "recompute": "recompute"}
        return fp8.GPT(config, **fields, **{switches[name]: True for name in switches.keys() & {*self.options}})

    def optimizer(self) -> Any:
        if self.trainer in PLAIN:
            return optax.adamw(1e-4, weight_decay=0.1)
        moments = jnp.bfloat16 if "small" in self.options else jnp.float32
        # Of float32 params nothing is kept apart; of bfloat16 params the 16 bits that they lack.
        return fp8.fused_adamw(1e-4, weight_decay=0.1, master_dtype="remainder", mu_dtype=moments, nu_dtype=moments)


def variant_name(name: str) -> str:
    """The name of a variant, for the parser of a command line; an error if there is no such variant."""
    try:
        Variant.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def gemms_of(variant: str) -> contextlib.AbstractContextManager:
    """The context in which a variant is traced: with this machine's table of tuned GEMMs, which must exist, or with
    cuBLASLt's own choices.
    """
    return fp8.tuned_gemms(fp8.GemmTable.load() if "tuned" in Variant.parse(variant).options else None)


def build(name: str, shape: Shape, microbatches: int, tokens: jax.Array) -> tuple[Callable, object, int]:
    """`(step, state, number of parameters)` of one variant; `step(state, tokens)` gives `(state, {"loss"})`."""
    variant, key, inputs = Variant.parse(name), jax.random.key(1), tokens[: shape.batch_size, :-1]
    if variant.trainer not in PLAIN:
        model, step = _ours(variant, shape, microbatches)
        # Array by array: what fills a GPU must not be there twice.
        make = _cached_state(variant, model) if "cached" in variant.options else partial(step.init_state, model.init)
        state = make(key, inputs)
        return step, state, _count(state.params)
    tx, model = variant.optimizer(), shape.plain(PLAIN_DOTS[name])
    variables = jax.jit(model.init)(key, inputs)
    state = dict(variables), tx.init(variables["params"])
    return make_plain_step(plain_loss(model), tx, microbatches), state, _count(variables["params"])


def compile_ahead(name: str, shape: Shape, microbatches: int) -> None:
    """Compile the step of a variant of RECIPES from shapes into jax's cache, without making a state."""
    variant, key = Variant.parse(name), jax.random.key(1)
    model, step = _ours(variant, shape, microbatches)
    inputs = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len), jnp.int32)
    tokens = jax.ShapeDtypeStruct((shape.batch_size * microbatches, shape.seq_len + 1), jnp.int32)
    if "cached" in variant.options:
        state: Any = jax.eval_shape(_cached_state(variant, model), key, inputs)
    else:
        state = step.state_shapes(model.init, key, inputs)
    step.lower(state, tokens).compile()


def _ours(variant: Variant, shape: Shape, microbatches: int) -> tuple[fp8.GPT, Any]:
    model = variant.model(shape.config)
    return model, fp8.make_train_step(fp8.next_token_loss(model), variant.optimizer(), variant.recipe, microbatches)


def _cached_state(variant: Variant, model: fp8.GPT) -> Callable:
    """From a key and inputs, the state that has the weights in FP8."""

    def make(key, inputs):
        variables, forward = dict(jax.jit(model.init)(key, inputs)), lambda variables: model.apply(variables, inputs)
        cache = jax.jit(lambda variables: fp8.cast_weights(variables, variant.recipe, forward=forward))(variables)
        return fp8.TrainState.create(variables=variables | {"fp8_cache": cache}, tx=variant.optimizer())

    return make


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
