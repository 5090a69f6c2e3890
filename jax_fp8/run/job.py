"""A run that could begin: settings, text and tokens, the model's shape and devices, and what is made of them.

settings → tokens, model, mesh → Job     everything that can be wrong, before anything is computed
Job → the model in a recipe, its step
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.plan.gpt_plans import head_in, layers_in
from jax_fp8.run import checks
from jax_fp8.run.devices import fingerprint, make_mesh, own_rows
from jax_fp8.run.optimizer import make_optimizer
from jax_fp8.run.resuming import describe_run
from jax_fp8.run.settings import Settings
from jax_fp8.run.text import ByteEncoder, Encoder, PairEncoder, read_corpus, standard_library, user_files
from jax_fp8.train.train_step import TrainStep, make_train_step


class Job(NamedTuple):
    """Everything two runs share: settings, model shape, tokens and devices."""

    settings: Settings
    model: GPTConfig
    encoder: Encoder
    train: np.ndarray  # (tokens,)
    held_out: np.ndarray  # (tokens,)
    mesh: Mesh
    description: dict[str, Any]  # for checkpoints

    @property
    def rows(self) -> np.ndarray:
        """Those of a batch that this process reads."""
        return own_rows(self.mesh, self.settings.batch_size)


def prepare(settings: Settings) -> Job:
    """Settle everything that can be wrong before anything is computed."""
    mesh = make_mesh(settings.mesh)
    encoder, train, held_out = read_tokens(settings)
    checks.check_length(len(train), len(held_out), settings)
    model = GPTConfig.preset(
        settings.preset,
        vocab_size=-(-encoder.vocab_size // 128) * 128,  # tensor cores like round numbers
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
    made = make_step(job, settings.recipe)  # the library refuses what cannot be a step,
    checks.check_on_mesh(settings, mesh, model)
    state_shapes(job, *made)  # and params that do not split
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
    """The GPT in one recipe; "bf16" has no FP8 anywhere."""
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
    """The model in this recipe, and its training step."""
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
    """How a step lies on several devices. With one there is nothing to say, and what is said is refused."""
    settings = job.settings
    options: dict[str, Any] = {
        "sequence_parallel": settings.sequence_parallel,
        "schedule": settings.schedule or None,
        "chunks": settings.chunks or None,
    }
    if job.mesh.size == 1 and not any(options.values()):
        return None
    return Parallelism(job.mesh, gradient_dtype=settings.gradient_dtype, **options)


def init_arguments(job: Job, model: GPT) -> tuple:
    """What `step.init_state` and `step.state_shapes` take: the seed's parameters."""
    shape = (job.settings.batch_size, job.settings.seq_len)
    return model.init, jax.random.key(job.settings.seed), jnp.zeros(shape, jnp.int32)


def state_shapes(job: Job, model: GPT, step: TrainStep) -> Any:
    return step.state_shapes(*init_arguments(job, model))


def compiler_options(recipe: str) -> dict[str, str] | None:
    """Options for the compiler of a step; None is what the library chooses.

    On the CPU, XLA multiplies the bfloat16 matrices of a weight's gradient in a plain loop, which makes a step of the
    tiny model four times as long, unless it is kept from handing products to its library for them.
    """
    if recipe != "bf16" or jax.default_backend() != "cpu":
        return None
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # another jaxlib, which does not know it
        return None
    return options
