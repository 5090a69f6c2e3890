"""Train a GPT in FP8 on real text, and see whether it learns as well as in bfloat16.

    python examples/train_gpt.py                                        # a tiny model on the standard library's sources
    python examples/train_gpt.py --compare                              # the same model in bfloat16 beside it
    python examples/train_gpt.py --data book.txt --tokenizer bpe --steps 500
    python examples/train_gpt.py --preset gpt2-124m --mesh data=4       # on four GPUs
    python examples/train_gpt.py --preset gpt3-13b --mesh fsdp=2,tensor=4 --sequence-parallel
    python examples/train_gpt.py --preset gpt3-1.3b --mesh pipe=4 --schedule zero-bubble --microbatches 8

The comparison is one of recipes alone: both runs begin with the same parameters, read the same batches, and are
measured on the same held-out text. What else sets two runs apart is noise. It grows with the learning rate, from
rounding alone, so this one is low and ends at zero; benchmarks/results/first_run_seeds.md has five seeds.

Reads from top to bottom: what is trained, one training run, a sample, and the job that puts them together.
Settings are in settings.py, text and tokens in text.py, validation and sample in evaluation.py, logs and pictures in
record.py, devices in mesh.py, and what several processes agree on in processes.py: each runs this script from top to
bottom.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import platform
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from evaluation import make_validation, write
from jax.sharding import Mesh
from mesh import check_model, check_settings, make_mesh, on_mesh, own_rows, parse_axes
from processes import agree, fingerprint, is_first, start
from record import Folder, Progress
from settings import Settings, check, parse
from text import (
    ByteEncoder,
    Encoder,
    PairEncoder,
    read_corpus,
    standard_library,
    training_batch,
    user_files,
    validation_batches,
)

import jax_fp8 as fp8

RECIPES = {"delayed": fp8.DelayedScaling, "current": fp8.CurrentScaling}
LOG_EVERY = 10  # steps between two rows of the log
VALIDATION_BATCHES = 8  # at least
VALIDATION_TOKENS = 2**15  # at least, where so many are held out: the mean of fewer is noise itself
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


class Job(NamedTuple):
    """Everything two runs share: settings, model shape, tokens and devices."""

    settings: Settings
    model: fp8.GPTConfig
    encoder: Encoder
    train: np.ndarray  # (tokens,)
    held_out: np.ndarray  # (tokens,)
    mesh: Mesh
    rows: np.ndarray  # of a batch, which this process reads


def read_settings(argv: list[str]) -> Settings:
    """The command line, with what can be wrong about it alone."""
    settings = parse(argv)
    check(settings)
    check_settings(parse_axes(settings.mesh), settings)
    return settings


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
    )
    check_model(sizes, model, settings.fp8_head)
    return Job(settings, model, encoder, train, held_out, mesh, own_rows(mesh, settings.batch_size))


def begin(settings: Settings) -> tuple[Job, Folder]:
    """The job and the folder of its run, once all processes have both."""
    try:
        job = prepare(settings)
        name = settings.name or f"{settings.preset}-{settings.recipe}"
        folder = Folder(settings.output, name, log_rows(settings), is_written=is_first())
    except (ValueError, OSError):
        agree()
        raise
    of_one = {"coordinator": "", "process_id": None, "data": None, "output": None, "cache": None}
    shared = dataclasses.replace(settings, **of_one)
    try:
        agree(fingerprint(repr(shared).encode(), job.train.tobytes(), job.held_out.tobytes()))
    except ValueError:
        folder.remove()
        raise
    return job, folder


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    peak, warmup = settings.learning_rate, max(1, min(settings.steps // 10, 200))
    up = optax.linear_schedule(peak / warmup, peak, warmup)
    down = optax.linear_schedule(peak, 0.0, settings.steps + 1 - warmup)
    schedule = optax.join_schedules([up, down], [warmup])
    return optax.chain(optax.clip_by_global_norm(1.0), fp8.fused_adamw(schedule, b2=0.95, weight_decay=0.1))


def make_model(job: Job, recipe: str) -> fp8.GPT:
    """The GPT in one recipe; "bf16" has no FP8 anywhere."""
    if recipe == "bf16":
        return fp8.GPT(job.model, recipe=None)
    layers = RECIPES[recipe](split_accumulator=()) if job.settings.fast else RECIPES[recipe]()
    return fp8.GPT(job.model, recipe=layers, head_recipe=fp8.CurrentScaling() if job.settings.fp8_head else None)


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


class Trained(NamedTuple):
    model: fp8.GPT
    variables: Any
    val_loss: float


def train(job: Job, recipe: str, folder: Folder) -> Trained:
    """One run: the model in one recipe, from the seed's parameters, over the seed's batches."""
    settings = job.settings
    model = make_model(job, recipe)
    loss_fn = fp8.next_token_loss(model)
    optimizer = make_optimizer(settings)
    shape = (settings.batch_size, settings.seq_len)
    train_step = fp8.make_train_step(
        loss_fn,
        optimizer,
        model.recipe,
        microbatches=settings.microbatches,
        compiler_options=compiler_options(recipe),
        **spread(job),
    )
    state = train_step.init_state(model.init, jax.random.key(settings.seed), jnp.zeros(shape, jnp.int32))
    measured = min(VALIDATION_TOKENS, len(job.held_out))
    count = max(VALIDATION_BATCHES, math.ceil(measured / math.prod(shape)))
    validation = on_mesh(job.mesh, validation_batches(job.held_out, count, *shape, job.rows))

    mean_loss = make_validation(loss_fn)

    def validate():
        return mean_loss(state.variables, validation)

    with Progress(folder, recipe, settings.steps, math.prod(shape), LOG_EVERY) as progress:
        progress.start(validate())
        for step in range(1, settings.steps + 1):
            tokens = training_batch(job.train, step, settings.seed, *shape, job.rows)
            state, metrics = train_step(state, on_mesh(job.mesh, tokens))
            due = step % settings.eval_every == 0 or step == settings.steps
            progress.add(step, metrics["loss"], validate() if due else None)
    return Trained(model, state.variables, progress.val_loss)


def spread(job: Job) -> dict[str, Any]:
    """What the step is told of several devices; of one there is nothing to say."""
    if job.mesh.size == 1:
        return {}
    settings = job.settings
    gradient_dtype = jnp.dtype(settings.gradient_dtype)
    return {
        "mesh": job.mesh,
        "sequence_parallel": settings.sequence_parallel,
        "gradient_dtype": gradient_dtype,
        "schedule": settings.schedule or None,
        "chunks": settings.chunks or None,
    }


def sample(job: Job, trained: Trained) -> tuple[str, str]:
    """A prompt from the held-out text, and what the model writes after it."""
    prompt = job.held_out[: job.settings.seq_len].astype(np.int32)
    written = write(trained.model, trained.variables, prompt, job.settings.sample_tokens, job.settings.seed)
    return job.encoder.decode(prompt), job.encoder.decode(written)


def log_rows(settings: Settings) -> int:
    """How many rows the log will have, at most."""
    return 2 * (settings.steps // LOG_EVERY + settings.steps // settings.eval_every + 3)


def interruption(settings: Settings, folder: Folder) -> str:
    """Where a run was when it was interrupted, and what it left."""
    if not folder.rows:
        return f"interrupted before the first step; the configuration is in {folder.path}"
    last = folder.rows[-1]
    return (
        f"interrupted after step {last['step']} of {settings.steps} of {last['run']}; "
        f"log, configuration and the curves so far are in {folder.path}"
    )


def versions(mesh: Mesh) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = mesh.devices.flat[0]
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "device": f"{mesh.size} x {device.device_kind}",
    }


def complain(sentence: str, status: int) -> int:
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    print(f"train_gpt.py{f', process {jax.process_index()}' if several else ''}: {sentence}", file=sys.stderr)
    return status


def main(argv: list[str]) -> int:
    with contextlib.ExitStack() as stack:
        try:
            settings = read_settings(argv)
            start(settings)
            if not is_first():
                stack.enter_context(contextlib.redirect_stdout(None))  # one process prints
            job, folder = begin(settings)
        except (ValueError, OSError) as error:
            return complain(str(error), 2)
        except KeyboardInterrupt:
            return complain("interrupted before training", INTERRUPTED)
        return run_or_say_why(job, folder)


def run_or_say_why(job: Job, folder: Folder) -> int:
    """The run, and one sentence where it ends early."""
    try:
        return run(job, folder)
    except KeyboardInterrupt:
        if not folder.is_written:  # what there is to say, the first process says
            return INTERRUPTED
        if folder.rows:
            folder.plot(title(job))
        return complain(interruption(job.settings, folder), INTERRUPTED)
    except FloatingPointError as error:
        return complain(str(error), 1)
    except OSError as error:
        return complain(f"what the run writes must find room in {folder.path}, got {error}; it ends here", 1)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return complain("out of device memory; use more --microbatches or a smaller --preset", 1)


def title(job: Job) -> str:
    return f"{job.settings.preset}, {job.model.num_layers} layers, {job.model.hidden_size} wide"


def run(job: Job, folder: Folder) -> int:
    """What a run is once nothing in its settings is wrong: train, plot, write a sample, sum up."""
    settings, found = job.settings, versions(job.mesh)
    folder.write_config({"settings": dataclasses.asdict(settings), "model": dataclasses.asdict(job.model)} | found)
    print(
        f"{settings.preset}: {settings.num_layers} layers, {settings.hidden_size} wide, on {found['device']}; "
        f"{len(job.train):,} tokens to train on, {len(job.held_out):,} held out"
    )
    trained = train(job, settings.recipe, folder)
    baseline = train(job, "bf16", folder) if settings.compare else None
    folder.plot(title(job))
    if settings.sample_tokens:
        prompt, text = sample(job, trained)
        print(f"\n--- after the held-out text\n{prompt}\n--- the model writes\n{text}\n---")
    summary = f"validation loss: {settings.recipe} {trained.val_loss:.4f}"
    if baseline is not None:
        difference = 100 * (trained.val_loss / baseline.val_loss - 1)
        summary += f", bf16 {baseline.val_loss:.4f}, difference {difference:+.2f} %"
    print(f"{summary}; log, configuration and picture are in {folder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
