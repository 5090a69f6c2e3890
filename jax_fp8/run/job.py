"""A run before its first step: settings become tokens, the model's config and a mesh; these become model and step.

settings → tokens, config, mesh → Job     raises every error of the settings before anything is computed
Job, recipe → model, step
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_fp8.core.types import Variables
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.plan.gpt_plans import head_in, layers_in
from jax_fp8.report.run_format import JsonObject
from jax_fp8.run import checks
from jax_fp8.run.devices import fingerprint, make_mesh, own_rows
from jax_fp8.run.optimizer import make_optimizer
from jax_fp8.run.resuming import describe_run
from jax_fp8.run.settings import Settings
from jax_fp8.run.text import ByteEncoder, Encoder, PairEncoder, read_corpus, standard_library, user_files
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.step import TrainStep
from jax_fp8.train.train_step import make_train_step


class Job(NamedTuple):
    """Everything that the two runs of `--compare` share: settings, model config, tokens and devices."""

    settings: Settings
    model: GPTConfig
    encoder: Encoder
    train: np.ndarray  # (tokens,)
    held_out: np.ndarray  # (tokens,)
    mesh: Mesh
    description: JsonObject  # part of the notes of every checkpoint

    @property
    def rows(self) -> np.ndarray:
        """The rows of a batch that this process reads."""
        return own_rows(self.mesh, self.settings.batch_size)


def prepare(settings: Settings) -> Job:
    """Read the text and check everything that can be wrong, before anything is computed."""
    mesh = make_mesh(settings.mesh)
    encoder, train, held_out = read_tokens(settings)
    checks.check_length(len(train), len(held_out), settings)
    model = GPTConfig.preset(
        settings.preset,
        vocab_size=-(-encoder.vocab_size // 128) * 128,  # a multiple of 128: GEMMs of such sizes are fast
        max_seq_len=settings.seq_len,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        dropout_rate=settings.dropout,
    )
    checks.check_memory(settings, mesh, model)
    text = fingerprint(train.tobytes(), held_out.tobytes()).hex()[:16]
    description = describe_run(settings, model, encoder.identity, text)
    job = Job(settings, model, encoder, train, held_out, mesh, description)
    model_and_step = make_step(job, settings.recipe)  # the library raises here if it cannot make the step,
    checks.check_on_mesh(settings, mesh, model)
    state_shapes(job, *model_and_step)  # and here if the mesh cannot split the params
    return job


def read_tokens(settings: Settings) -> tuple[Encoder, np.ndarray, np.ndarray]:
    """The tokenizer, and the tokens to train on and to validate on."""
    files = standard_library() if settings.data is None else user_files(settings.data)
    validation = settings.validation_data
    corpus = read_corpus(files, None, None if validation is None else user_files(validation, "--validation-data"))
    if settings.tokenizer == "bytes":
        encoder = ByteEncoder()
    else:
        encoder = PairEncoder.trained_on(corpus.train, settings.vocab_size, settings.cache)
    return encoder, encoder.encode(corpus.train), encoder.encode(corpus.held_out)


def make_model(settings: Settings, config: GPTConfig, recipe: str) -> GPT:
    """The GPT with one recipe; "bf16" has no FP8 anywhere."""
    if recipe == "bf16":
        return GPT(config, recipe=None, remat=settings.remat)
    return GPT(
        config,
        recipe=layers_in(recipe, settings.fast),
        head_recipe=head_in(recipe) if settings.fp8_head else None,
        remat=settings.remat,
        fp8_attention=settings.fp8_attention,
    )


def make_step(job: Job, recipe: str) -> tuple[GPT, TrainStep]:
    """The model with this recipe, and its training step."""
    settings, model = job.settings, make_model(job.settings, job.model, recipe)
    step = make_train_step(
        next_token_loss(model),
        make_optimizer(settings),
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
    """The arguments of `step.init_state` and `step.state_shapes`: `model.init`, the seed's key, and tokens."""
    shape = (job.settings.batch_size, job.settings.seq_len)
    return model.init, jax.random.key(job.settings.seed), jnp.zeros(shape, jnp.int32)


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
