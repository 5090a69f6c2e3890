"""A run before its first step: settings become data, the model's config and a mesh; these become model and step.

settings → data, config, mesh → Job       raises every error of the settings before anything is computed
Job, recipe → model, step
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_fp8.core.types import Variables
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.parallel.mesh import TENSOR, Parallelism
from jax_fp8.report.run_format import CHECKPOINTS, OF_A_RUN, JsonObject
from jax_fp8.run import checks
from jax_fp8.run.batches import Batches
from jax_fp8.run.checkpoints import read_last
from jax_fp8.run.data import read_data
from jax_fp8.run.devices import joined, make_mesh, own_rows
from jax_fp8.run.encoders import Encoder, is_file
from jax_fp8.run.export import check_can_export
from jax_fp8.run.memory_checks import check_memory, check_state
from jax_fp8.run.optimizer import make_optimizer
from jax_fp8.run.resuming import describe_run
from jax_fp8.run.settings import Settings
from jax_fp8.run.start import Start, begin_from
from jax_fp8.run.trained import encoder_of, make_init, make_model
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.step import TrainStep
from jax_fp8.train.train_step import make_train_step


class Job(NamedTuple):
    """Everything that the two runs of `--compare` share: settings, model config, data and devices."""

    settings: Settings
    model: GPTConfig
    encoder: Encoder
    train: Batches
    held_out: Batches
    mesh: Mesh
    description: JsonObject  # part of the notes of every checkpoint
    start: Start | None = None  # the model that training begins with; None: the seed's parameters

    @property
    def rows(self) -> np.ndarray:
        """The rows of a batch that this process reads."""
        return own_rows(self.mesh, self.settings.batch_size)


def prepare(settings: Settings, run: Path | None = None) -> Job:
    """Read the data and check everything that can be wrong, before anything is computed.

    Args:
      run: the folder of the run to resume, if it has a checkpoint already.
    """
    mesh = make_mesh(settings.mesh)
    start = None if settings.init_from is None else begin_from(settings, run)
    encoder, train, held_out = read_data(settings, encoder_to_use(settings, start, run))
    checks.check_size(train, held_out, settings)
    model = model_of(settings, encoder, start)
    check_memory(settings, mesh, model)
    text = joined(train.digest, held_out.digest).hex()[:16]
    description = describe_run(settings, model, encoder.identity, text)
    job = Job(settings, model, encoder, train, held_out, mesh, description, start)
    if settings.export is not None:
        check_can_export(settings, model)
    model_and_step = make_step(job, settings.recipe)  # the library raises here if it cannot make the step,
    checks.check_on_mesh(settings, mesh, model)
    check_state(state_shapes(job, *model_and_step), mesh)  # and here if the mesh cannot split the params
    return job


def encoder_to_use(settings: Settings, start: Start | None, run: Path | None) -> Encoder | None:
    """The tokenizer, where it is known before the data is read: that of --init-from, or the copy in the folder of a run
    that is resumed, when the files that it was copied from are gone.
    """
    if start is not None and settings.tokenizer == "":
        if start.encoder is None:
            raise ValueError(
                f"--init-from {settings.init_from} must have a tokenizer.json, got none; name the tokenizer with "
                "--tokenizer"
            )
        return start.encoder
    if run is not None and is_file(settings.tokenizer) and not os.path.exists(settings.tokenizer):
        notes = read_last(run / CHECKPOINTS, OF_A_RUN)
        return None if notes is None else encoder_of(run, notes)
    return None


def model_of(settings: Settings, encoder: Encoder, start: Start | None) -> GPTConfig:
    """The shape of the model: that of --init-from, or a preset with the vocabulary of the tokenizer."""
    if start is not None:
        checks.check_start(settings, start.model, encoder.vocab_size)
        return dataclasses.replace(start.model, dropout_rate=settings.dropout)
    return GPTConfig.preset(
        settings.preset,
        vocab_size=-(-encoder.vocab_size // 128) * 128,  # a multiple of 128: GEMMs of such sizes are fast
        max_seq_len=settings.seq_len,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        dropout_rate=settings.dropout,
    )


def make_step(job: Job, recipe: str) -> tuple[GPT, TrainStep]:
    """The model with this recipe, and its training step."""
    settings, model = job.settings, make_model(job.settings, job.model, recipe)
    step = make_train_step(
        next_token_loss(model),
        make_optimizer(settings, job.model),
        model.recipe,
        microbatches=settings.microbatches,
        compiler_options=compiler_options(recipe),
        rngs={"dropout": jax.random.key(settings.seed)} if settings.dropout else None,
        parallel=parallelism(job),
    )
    return model, step


def parallelism(job: Job) -> Parallelism | None:
    """How the step is spread over several devices; None on one device. On one device with options that need several,
    `Parallelism` raises.
    """
    settings = job.settings
    if job.mesh.size == 1 and not (settings.sequence_parallel or settings.schedule or settings.chunks):
        return None
    return Parallelism(
        job.mesh,
        gradient_dtype=settings.gradient_dtype,
        sequence_parallel=settings.sequence_parallel,
        schedule=settings.schedule or None,
        chunks=settings.chunks or None,
    )


def init_arguments(job: Job, model: GPT) -> tuple[Callable[..., Variables], jax.Array, jax.Array]:
    """The arguments of `step.init_state` and `step.state_shapes`: a function like `model.init`, the seed's key, and
    tokens.
    """
    shape = (job.settings.batch_size, job.settings.seq_len)
    return make_init(model, apart=are_apart(job)), jax.random.key(job.settings.seed), jnp.zeros(shape, jnp.int32)


def are_apart(job: Job) -> bool:
    """Whether frozen kernels are stored one by one, as the axis `tensor` splits them."""
    return job.mesh.shape[TENSOR] > 1


def state_shapes(job: Job, model: GPT, step: TrainStep) -> TrainState:
    """The `jax.ShapeDtypeStruct`s of the state, with their shardings."""
    return step.state_shapes(*init_arguments(job, model))


def compiler_options(recipe: str) -> dict[str, str] | None:
    """XLA's options for the step; None leaves the choice to the library.

    On the CPU, XLA computes the weight gradients in bfloat16 in a plain loop, which makes a step of the tiny model four
    times as long, unless this option keeps it from handing these products to its library YNN.
    """
    if recipe != "bf16" or jax.default_backend() != "cpu":
        return None
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # a jaxlib that does not know the option
        return None
    return options
