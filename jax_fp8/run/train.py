"""Train a GPT in FP8 on real text, and see whether it learns as well as in bfloat16.

    python -m jax_fp8 train                                             # a tiny model on the standard library's sources
    python -m jax_fp8 train --compare                                   # the same model in bfloat16 beside it
    python -m jax_fp8 train --data book.txt --tokenizer bpe --steps 500
    python -m jax_fp8 train --preset gpt2-124m --mesh data=4            # on four GPUs
    python -m jax_fp8 train --preset gpt3-13b --mesh fsdp=2,tensor=4 --sequence-parallel
    python -m jax_fp8 train --preset gpt3-1.3b --mesh pipe=4 --schedule zero-bubble --microbatches 8

`--compare` compares recipes alone: both runs begin with the same parameters, read the same batches, and are validated
on the same text. Any other difference is noise from rounding, which grows with the learning rate. So the default
learning rate is low and decays to zero; benchmarks/results/first_run_seeds.md has five seeds.

    argv → Settings → Job, Folder ─train, once for each recipe→ logs, checkpoints, Trained → picture, sample, summary

With several processes, each of them runs all of this.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8.core.types import Batch, Variables
from jax_fp8.models.batch import CountedBatch, counted
from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.report.run_format import BASELINE, CHECKPOINTS, PROFILE, CannotResume
from jax_fp8.run.batches import BadTokens
from jax_fp8.run.checkpoints import CannotSave, Checkpoints
from jax_fp8.run.checks import check, parse_steps
from jax_fp8.run.command_line import REFUSED, complain
from jax_fp8.run.devices import agree, all_end, fingerprint, is_first, joined, on_mesh, start, tell_all
from jax_fp8.run.encoders import is_file
from jax_fp8.run.export import write_huggingface
from jax_fp8.run.folder import Folder, versions
from jax_fp8.run.generate import sample
from jax_fp8.run.job import Job, are_apart, init_arguments, make_step, prepare, state_shapes
from jax_fp8.run.leaving import FAILED, Leaving
from jax_fp8.run.logs import Logbook, bytes_of_logs
from jax_fp8.run.profiling import Profile
from jax_fp8.run.progress import Progress, Speed
from jax_fp8.run.resuming import existing_run, interruption, locate_run
from jax_fp8.run.settings import Settings, describe, parse
from jax_fp8.run.spikes import Watch
from jax_fp8.run.trained import make_init, whole_params
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.diagnostics import Diagnostics
from jax_fp8.train.step import TrainStep

# Settings in which the processes of one run may differ.
OF_ONE_PROCESS = {"coordinator", "process_id", "data", "validation_data", "output", "cache", "config"}
OF_ONE_PROCESS |= {"init_from", "tokenizer"}
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells; leaving.py has that of other signals


def main(argv: list[str]) -> int:
    with contextlib.ExitStack() as stack:
        try:
            settings = parse(argv)
            check(settings)
            start(settings)
            if not is_first():
                stack.enter_context(contextlib.redirect_stdout(None))  # one process prints
            job, folder = begin(settings)
        except (ValueError, OSError) as error:
            return _complain(error, REFUSED)
        except KeyboardInterrupt:
            return _complain("interrupted before training", INTERRUPTED)
        return run_or_say_why(job, folder)


def begin(settings: Settings) -> tuple[Job, Folder]:
    """The job and the folder of its run. Returns once all processes have both, and raises if they disagree."""
    try:
        name = settings.name or f"{model_name(settings)}-{settings.recipe}"
        # Of a model that a run began with, and of its tokenizer, every process reads the copies in the run's folder.
        has_copies = settings.init_from is not None or is_file(settings.tokenizer)
        run = locate_run(settings, name) if has_copies or is_first() else None
        job = prepare(settings, run)
        existing = existing_run(run, job.description) if is_first() else None
        folder = Folder(settings.output, name, bytes_of_logs(settings), is_first(), existing)
    except (ValueError, OSError):
        agree()
        raise
    shared = {name: value for name, value in dataclasses.asdict(settings).items() if name not in OF_ONE_PROCESS}
    try:
        same = fingerprint(repr(shared).encode(), repr(job.model).encode(), job.encoder.identity.encode())
        agree(joined(same, job.train.digest, job.held_out.digest))
    except ValueError:
        folder.remove()
        raise
    path, is_resumed = json.loads(tell_all(json.dumps([str(folder.path.absolute()), existing is not None])))
    return job, folder if is_first() else folder.follow(Path(path), is_resumed)


class Trained(NamedTuple):
    model: GPT
    variables: Variables
    val_loss: float


def train(job: Job, recipe: str, folder: Folder, checkpoints: Checkpoints, leaving: Leaving) -> Trained:
    """One run: the model with one recipe, from the seed's parameters or a checkpoint, on the seed's batches."""
    settings, last = job.settings, checkpoints.last
    shape, rows = (settings.batch_size, settings.seq_len), job.rows
    model, train_step = make_step(job, recipe)

    def batch(step: int) -> Batch:
        return on_mesh(job.mesh, job.train.training(step, rows))

    state = first_state(job, model, train_step, batch, checkpoints)
    folder.take_up()
    held_out = on_mesh(job.mesh, job.held_out.validation(rows))
    mean_loss = make_validation(next_token_loss(model, deterministic=True))

    def validate() -> jax.Array:
        with progress.calling("validation"):
            return mean_loss(state.variables, held_out)

    def diagnose(step: int) -> Diagnostics:
        return train_step.diagnose(state, batch(step))

    log = Logbook(folder, recipe, settings.tensorboard, last["step"] if last else 0)
    watch = Watch(log, settings, diagnose, last)
    progress = Progress(
        log, settings.steps, math.prod(shape), Speed.for_model(job.model, job.mesh, settings.lora > 0), watch, last
    )
    profiled = parse_steps(settings.profile if folder.is_written else "", settings.steps)
    profile = Profile(folder.path / PROFILE / recipe, profiled, progress)
    with leaving.after_a_step(), checkpoints, log, progress, profile:
        if last is None:
            progress.start(validate())
        for step in range(progress.last_step + 1, settings.steps + 1):
            options = watch.options(step)
            with profile.around(step), progress.calling(f"step, {options['diagnose']}"):
                state, metrics = train_step(state, batch(step), **options)
            due = step % settings.eval_every == 0 or step == settings.steps
            progress.add(step, metrics, validate() if due else None)
            profile.end(step)
            is_last = leaving.is_asked(step)
            if is_last or checkpoints.is_due(step, settings.steps):
                with progress.pause():
                    checkpoints.save(step, state, job.description | progress.notes())
            if is_last:
                raise KeyboardInterrupt
    return Trained(model, state.variables, progress.val_loss)


def first_state(
    job: Job, model: GPT, train_step: TrainStep, batch: Callable[[int], Batch], checkpoints: Checkpoints
) -> TrainState:
    """The state of the last checkpoint, with new scales if another recipe saved it; for a new run, the state of the
    seed's parameters, or of the model that it begins with.

    Args:
      batch: gives the batch of a step, from which new scales are computed.
    """
    arguments, shapes = init_arguments(job, model), state_shapes(job, model, train_step)
    if checkpoints.every or checkpoints.last is not None:
        checkpoints.check_room(shapes)
    if checkpoints.last is None:
        state = new_state(job, model, train_step)
        # The step returns arrays that are committed to their device. For uncommitted ones jax would compile it twice.
        state = jax.device_put(state, job.mesh.devices.item()) if job.mesh.size == 1 else state
        # Params that were trained have a loss that says something, also before the first step would find their scales.
        return state if job.start is None else train_step.warm_start(state, batch(1))

    def new_fp8() -> Variables:
        return jax.jit(lambda *inputs: model.init(*inputs)["fp8"])(*arguments[1:])

    state, is_new = checkpoints.restore(shapes, new_fp8)
    return train_step.warm_start(state, batch(checkpoints.last["step"] + 1)) if is_new else state


def new_state(job: Job, model: GPT, train_step: TrainStep) -> TrainState:
    """The state before the first step. Params of a model to begin with go to their shards as they are."""
    init, *arguments = init_arguments(job, model)
    if job.start is None:
        return train_step.init_state(init, *arguments)
    return train_step.init_state(make_init(model, job.start.load(job.settings.param_dtype), are_apart(job)), *arguments)


def make_validation(
    loss_fn: Callable[[Variables, Batch], jax.Array],
) -> Callable[[Variables, Batch], jax.Array]:
    """The mean loss of batches (count, batch, seq + 1) as one program, for which the host does not wait. The variables
    keep their shardings from training, by which XLA partitions the program. Where only some tokens are learned, it is
    the mean over these of all batches.
    """

    @jax.jit
    def mean_loss(variables: Variables, batches: Batch) -> jax.Array:
        if isinstance(batches, Mapping):
            batches = counted_together(batches)
        return jnp.mean(jax.lax.map(partial(loss_fn, variables), batches))

    return mean_loss


def counted_together(batches: Mapping[str, jax.Array]) -> Batch:
    """Batches (count, batch, seq + 1) that all know how many tokens are learned in all of them."""
    count, rows = batches["tokens"].shape[:2]
    whole = counted(jax.tree.map(lambda array: array.reshape(count * rows, -1), batches), None)
    assert isinstance(whole, CountedBatch), "documents have tokens that are not learned"
    return jax.tree.map(lambda array: array.reshape(count, rows, *array.shape[1:]), whole)


def run_or_say_why(job: Job, folder: Folder) -> int:
    """Run the job, and print one sentence if it ends early. Returns the exit status."""
    with Leaving(all_end if jax.process_count() > 1 else None) as leaving:
        try:
            with folder.alone():
                return run(job, folder, leaving)
        except KeyboardInterrupt:
            if not folder.is_written:  # only the first process prints
                return leaving.status
            if folder.rows:
                folder.plot(title(job))
            return _complain(interruption(job.settings, folder.path, folder.rows), leaving.status)
        except CannotResume as error:
            return _complain(error, REFUSED)
        except BadTokens as error:
            return _complain(error, FAILED)
        except FloatingPointError as error:
            folder.plot(title(job))
            return _complain(error, FAILED)
        except CannotSave as error:
            return _complain(error, FAILED)
        except OSError as error:
            sentence = f"the run must be able to write to {folder.path}, got {error}; fix that, and start it again"
            return _complain(sentence, FAILED)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _complain("out of device memory; use more --microbatches or a smaller --preset", FAILED)


def title(job: Job) -> str:
    return f"{model_name(job.settings)}, {job.model.num_layers} layers, {job.model.hidden_size} wide"


def model_name(settings: Settings) -> str:
    """The preset, or the name of the model that the run begins with."""
    return settings.preset if settings.init_from is None else settings.init_from.absolute().name


def run(job: Job, folder: Folder, leaving: Leaving) -> int:
    """Train, plot the losses, generate a sample and print a summary. Returns the exit status."""
    settings, computed_with = job.settings, versions(job.mesh)
    existing = folder.existing  # of a resumed run

    def train_with(recipe: str, name: str) -> Trained:
        checkpoints = Checkpoints(folder.path / name, settings.checkpoint_every, settings.keep, existing is not None)
        return train(job, recipe, folder, checkpoints, leaving)

    if existing is None or not existing.rows:
        folder.write_config(describe(settings), dataclasses.asdict(job.model), computed_with)
    folder.write_tokenizer(job.encoder.files())
    print(
        f"{model_name(settings)}: {job.model.num_layers} layers, {job.model.hidden_size} wide, on "
        f"{computed_with['device']}; {job.train.size:,} tokens to train on, {job.held_out.size:,} held out"
    )
    trained = train_with(settings.recipe, CHECKPOINTS)
    baseline = train_with("bf16", BASELINE) if settings.compare else None
    folder.plot(title(job))
    if settings.sample_tokens:
        prompt = job.held_out.prompt()
        text = sample(trained.model, trained.variables, prompt, settings.sample_tokens, settings.seed)
        prompt, text = job.encoder.decode(prompt), job.encoder.decode(text)
        print(f"\n--- after the held-out text\n{prompt}\n--- the model generates\n{text}\n---")
    if settings.export is not None:
        try:
            print(write_huggingface(settings, job.model, whole_params(trained.model, trained.variables), job.encoder))
        except ValueError as error:
            raise CannotSave(str(error)) from error
    summary = f"validation loss: {settings.recipe} {trained.val_loss:.4f}"
    if baseline is not None:
        difference = 100 * (trained.val_loss / baseline.val_loss - 1)
        summary += f", bf16 {baseline.val_loss:.4f}, difference {difference:+.2f} %"
    print(f"{summary}; log, configuration and picture are in {folder.path}")
    return 0


def _complain(sentence: object, status: int) -> int:
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    return complain(f"train{f', process {jax.process_index()}' if several else ''}", sentence, status)
