"""The flags of `python -m jax_fp8 plan`, and the model and optimizer that they describe."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jax_fp8.core.checks import check_integer
from jax_fp8.core.lora import LORA_A, LORA_B, Lora
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling
from jax_fp8.core.types import Variables
from jax_fp8.kernels.fp8_attention import check_head_dim
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.models.remat import Remat
from jax_fp8.optim.freeze import freeze
from jax_fp8.optim.fused_adam import fused_adamw
from jax_fp8.parallel.mesh import BATCH_AXES, EXPERT, PIPE, parse_axes
from jax_fp8.state.frozen_kernels import freeze_kernels

RECIPES = {"delayed": DelayedScaling(), "current": CurrentScaling(), "block": BlockScaling()}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A user's description of a step: the flags of `python -m jax_fp8 plan`, by their names."""

    preset: str
    mesh: str = "data=1"
    gpu: str = "h200"
    batch: int | None = None
    sequence: int | None = None
    microbatches: int | None = None
    recipe: str = "delayed"
    fast: bool = False
    fp8_head: bool = False
    fp8_attention: bool = False
    bf16_params: bool = False
    bf16_moments: bool = False
    sequence_parallel: bool = False
    schedule: str | None = None
    chunks: int | None = None
    recompute: bool = False
    remat: str = "none"
    lora: int = 0
    rates: str | None = None
    between_hosts: float | None = None

    @property
    def config(self) -> GPTConfig:
        config = GPTConfig.preset(self.preset)
        return config if self.sequence is None else dataclasses.replace(config, max_seq_len=self.sequence)

    @property
    def axes(self) -> dict[str, int]:
        return parse_axes(self.mesh)

    @property
    def sequences(self) -> int:
        """Sequences of a step on all devices; by default 8 in each microbatch of each part of the batch."""
        if self.batch is not None:
            return self.batch
        return 8 * math.prod(self.axes.get(axis, 1) for axis in BATCH_AXES) * self.microbatches_of_step

    @property
    def microbatches_of_step(self) -> int:
        """The number of microbatches; by default 1, or 4 for each stage of a pipeline."""
        if self.microbatches is not None:
            return self.microbatches
        return 4 * self.axes[PIPE] if self.axes.get(PIPE, 1) > 1 else 1

    def check(self) -> None:
        """Raise a ValueError of one sentence for flags that contradict each other or are not supported."""
        layers_in(self.recipe, self.fast)
        check_integer("microbatches", self.microbatches_of_step)
        check_integer("batch", self.sequences)
        if self.axes.get(EXPERT, 1) > 1 and not self.config.num_experts:
            raise ValueError(
                f"the axis {EXPERT} is for a model with experts, got --mesh {self.mesh} and --preset {self.preset}; "
                "name it data"
            )
        if self.lora and self.config.num_experts:
            raise ValueError(f"--lora plans models without experts, got --preset {self.preset}; leave it out")
        if self.recompute and self.remat != "none":
            raise ValueError(f"--recompute is --remat norms, got also --remat {self.remat}; give one of them")
        if self.fp8_attention and self.recipe != "delayed":
            raise ValueError(f"--fp8-attention is for --recipe delayed, got {self.recipe}; leave out one of them")
        if self.fp8_attention:
            check_head_dim(f"--preset {self.preset}", self.config.features_of_head)
        Remat.parse(self.remat, self.config.num_layers)
        check_integer("lora", self.lora, least=0)
        if self.lora and self.axes.get(PIPE, 1) > 1:
            raise ValueError(
                "--lora plans meshes of data, fsdp and tensor, because a pipeline cannot carry frozen kernels, got "
                f"--mesh {self.mesh}; choose another mesh"
            )
        if self.between_hosts is not None and not 0 < self.between_hosts < math.inf:
            raise ValueError(f"--between-hosts must be GB/s above 0, got {self.between_hosts}; say --between-hosts 50")


def layers_in(recipe: str, fast: bool = False) -> DelayedScaling | CurrentScaling | BlockScaling | None:
    """The recipe of a GPT's layers by its name; None for "bf16"."""
    by_name = {**RECIPES, "bf16": None}[recipe]
    if not fast or by_name is None:
        return by_name
    if recipe == "block":
        raise ValueError(
            "--fast needs a recipe with fast accumulation, got --recipe block, which scales the sum of every 128 "
            "products in float32; leave out --fast, or choose --recipe delayed or --recipe current"
        )
    return dataclasses.replace(by_name, split_accumulator=())


def head_in(recipe: str) -> CurrentScaling | BlockScaling:
    """The recipe of a head in FP8. The head keeps no amax history, so it takes a recipe without state."""
    return BlockScaling() if recipe == "block" else CurrentScaling()


def model_of(choices: Choices) -> GPT:
    return GPT(
        choices.config,
        recipe=layers_in(choices.recipe, choices.fast),
        param_dtype=jnp.bfloat16 if choices.bf16_params else jnp.float32,
        head_recipe=head_in(choices.recipe) if choices.fp8_head else None,
        fp8_attention=choices.fp8_attention,
        recompute=choices.recompute,
        remat=choices.remat,
        attention_implementation="cudnn",
        lora=Lora(rank=choices.lora) if choices.lora else None,
    )


def optimizer_of(choices: Choices) -> optax.GradientTransformationExtraArgs:
    moments = jnp.bfloat16 if choices.bf16_moments else jnp.float32
    master = "remainder" if choices.bf16_params else jnp.float32
    adam = fused_adamw(1e-4, mu_dtype=moments, nu_dtype=moments, master_dtype=master)
    return freeze(adam, trained=f"/({LORA_A}|{LORA_B})$") if choices.lora else adam


def init_of(model: GPT, apart: bool = False) -> Callable[..., Variables]:
    """`model.init`; kernels of a model with adapters are frozen, `apart` as in `freeze_kernels`."""

    def init(key: jax.Array, tokens: jax.Array) -> Variables:
        variables = model.init(key, tokens)
        forward = lambda variables: model.apply(variables, tokens)  # noqa: E731
        return freeze_kernels(variables, model.recipe, forward=forward, apart=apart)

    return model.init if model.lora is None else init
