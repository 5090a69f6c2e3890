"""A run that could begin: settings, text and tokens, the model's shape and devices, and what is made of them.

settings → tokens, model, mesh: everything that can be wrong, before anything is computed
Job → the model in a recipe, and what its step is told of several devices
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from building import compiler_options, make_optimizer
from jax.sharding import Mesh
from mesh import check_memory, check_model, check_tiles, make_mesh, own_rows, parse_axes
from processes import fingerprint
from resuming import describe_run
from settings import Settings
from text import ByteEncoder, Encoder, PairEncoder, read_corpus, standard_library, user_files

import jax_fp8 as fp8

RECIPES = {"delayed": fp8.DelayedScaling, "current": fp8.CurrentScaling, "block": fp8.BlockScaling}


class Job(NamedTuple):
    """Everything two runs share: settings, model shape, tokens and devices."""

    settings: Settings
    model: fp8.GPTConfig
    encoder: Encoder
    train: np.ndarray  # (tokens,)
    held_out: np.ndarray  # (tokens,)
    mesh: Mesh
    rows: np.ndarray  # of a batch, which this process reads
    description: dict[str, Any]  # for checkpoints


def prepare(settings: Settings) -> Job:
    """Settle everything else that can be wrong before anything is computed."""
    sizes = parse_axes(settings.mesh)
    mesh = make_mesh(sizes)
    corpus = read_corpus(standard_library() if settings.data is None else user_files(settings.data))
    if settings.tokenizer == "bytes":
        encoder = ByteEncoder()
    else:
        encoder = PairEncoder.trained_on(corpus.train, settings.vocab_size, settings.cache)
    train, held_out = encoder.encode(corpus.train), encoder.encode(corpus.held_out)
    needed = settings.batch_size * settings.seq_len + 1
    if len(train) < needed:
        raise ValueError(
            f"--data must hold at least one batch of {needed:,} tokens to train on, got {len(train):,}; "
            f"give more text, or a smaller --batch-size or --seq-len"
        )
    if len(held_out) <= settings.seq_len:
        raise ValueError(
            f"--data must leave {settings.seq_len + 1:,} tokens for validation, a twentieth of it has "
            f"{len(held_out):,}; give more text, or a smaller --seq-len"
        )
    model = fp8.GPTConfig.preset(
        settings.preset,
        vocab_size=-(-encoder.vocab_size // 128) * 128,  # tensor cores like round numbers
        max_seq_len=settings.seq_len,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        dropout_rate=settings.dropout,
    )
    check_model(sizes, model, settings.fp8_head)
    check_tiles(sizes, settings, model)
    check_attention(settings, model)
    check_memory(mesh, model)
    text = fingerprint(train.tobytes(), held_out.tobytes()).hex()[:16]
    description = describe_run(settings, model, encoder.identity, text)
    return Job(settings, model, encoder, train, held_out, mesh, own_rows(mesh, settings.batch_size), description)


def check_attention(settings: Settings, model: fp8.GPTConfig) -> None:
    """Raise unless cuDNN can attend in FP8 where that is asked for."""
    if settings.fp8_attention and model.features_of_head != 128:
        raise ValueError(
            f"--fp8-attention needs heads of 128 features, got {model.features_of_head}; change --num-heads or "
            "--hidden-size, or leave it out"
        )
    if settings.fp8_attention and settings.seq_len % 128:
        raise ValueError(
            f"--fp8-attention needs a multiple of 128 tokens, got --seq-len {settings.seq_len}; change it, or leave "
            "--fp8-attention out"
        )


def make_model(settings: Settings, config: fp8.GPTConfig, recipe: str) -> fp8.GPT:
    """The GPT in one recipe; "bf16" has no FP8 anywhere."""
    if recipe == "bf16":
        return fp8.GPT(config, recipe=None, remat=settings.remat)
    layers = RECIPES[recipe](split_accumulator=()) if settings.fast else RECIPES[recipe]()
    # The head keeps no history of amaxes: it is in the recipe of the layers where that has none, either.
    head = fp8.BlockScaling() if recipe == "block" else fp8.CurrentScaling()
    others = {"remat": settings.remat, "fp8_attention": settings.fp8_attention}
    return fp8.GPT(config, recipe=layers, head_recipe=head if settings.fp8_head else None, **others)


def make_step(job: Job, recipe: str, model: fp8.GPT) -> Any:
    """The training step of a model in this recipe."""
    return fp8.make_train_step(
        fp8.next_token_loss(model),
        make_optimizer(job.settings),
        model.recipe,
        microbatches=job.settings.microbatches,
        compiler_options=compiler_options(recipe),
        rngs={"dropout": jax.random.key(job.settings.seed)} if job.settings.dropout else None,
        parallel=parallelism(job),
    )


def parallelism(job: Job) -> fp8.Parallelism | None:
    """How the step is spread over several devices; None for one."""
    settings = job.settings
    if job.mesh.size == 1:
        return None
    return fp8.Parallelism(
        job.mesh,
        sequence_parallel=settings.sequence_parallel,
        gradient_dtype=settings.gradient_dtype,
        schedule=settings.schedule or None,
        chunks=settings.chunks or None,
    )
