"""Train a GPT in FP8 on real text, and see whether it learns as well as in bfloat16.

    python -m jax_fp8 train                                             # a tiny model on the standard library's sources
    python -m jax_fp8 train --compare                                   # the same model in bfloat16 beside it
    python -m jax_fp8 train --data book.txt --tokenizer bpe --steps 500
    python -m jax_fp8 train --preset gpt2-124m --mesh data=4            # on four GPUs
    python -m jax_fp8 train --preset gpt3-13b --mesh fsdp=2,tensor=4 --sequence-parallel
    python -m jax_fp8 train --preset gpt3-1.3b --mesh pipe=4 --schedule zero-bubble --microbatches 8

The comparison is one of recipes alone: both runs begin with the same parameters, read the same batches, and are
measured on the same held-out text. What else sets two runs apart is noise. It grows with the learning rate, from
rounding alone, so this one is low and ends at zero; benchmarks/results/first_run_seeds.md has five seeds.

    argv → Settings → Job, Folder ─train, once for each recipe→ logs, checkpoints, Trained → picture, sample, summary

Each of several processes runs this from top to bottom.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.report.run_format import BASELINE, CHECKPOINTS, PROFILE, CannotResume
from jax_fp8.run.checkpoints import CannotSave, Checkpoints
from jax_fp8.run.checks import check, parse_steps
from jax_fp8.run.command_line import REFUSED, complain
from jax_fp8.run.devices import agree, all_end, fingerprint, is_first, on_mesh, start, tell_all
from jax_fp8.run.folder import Folder, versions
from jax_fp8.run.generate import sample
from jax_fp8.run.job import Job, init_arguments, make_step, prepare, state_shapes
from jax_fp8.run.leaving import FAILED, Leaving
from jax_fp8.run.logs import Logbook, bytes_of_logs
from jax_fp8.run.profiling import Profile
from jax_fp8.run.progress import Progress, Speed
from jax_fp8.run.resuming import find_run, interruption
from jax_fp8.run.settings import Settings, describe, parse
from jax_fp8.run.spikes import Watch
from jax_fp8.run.text import PairEncoder, training_batch, validation_batches
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.train_step import TrainStep

VALIDATION_BATCHES = 8  # at least
VALIDATION_TOKENS = 2**15  # at least, where so many are held out: the mean of fewer is noise itself
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it; leaving.py has that of other signals


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
    """The job and the folder of its run, once all processes have both."""
    try:
        job = prepare(settings)
        name = settings.name or f"{settings.preset}-{settings.recipe}"
        existing = find_run(settings, name, job.description) if is_first() else None
        folder = Folder(settings.output, name, bytes_of_logs(settings), is_first(), existing)
    except (ValueError, OSError):
        agree()
        raise
    of_one = {"coordinator": "", "process_id": None, "data": None, "validation_data": None, "output": None,
              "cache": None, "config": None}  # fmt: skip
    shared = dataclasses.replace(settings, **of_one)
    try:
        agree(fingerprint(repr(shared).encode(), job.train.tobytes(), job.held_out.tobytes()))
    except ValueError:
        folder.remove()
        raise
    path, goes_on = json.loads(tell_all(json.dumps([str(folder.path.absolute()), existing is not None])))
    return job, folder if is_first() else folder.like_that_of_the_first(Path(path), goes_on)


class Trained(NamedTuple):
    model: GPT
    variables: Any
    val_loss: float


def train(job: Job, recipe: str, folder: Folder, kept: Checkpoints, leaving: Leaving) -> Trained:
    """One run: the model in one recipe, from the seed's parameters or a checkpoint, over the seed's batches."""
    settings, last = job.settings, kept.last
    shape, rows = (settings.batch_size, settings.seq_len), job.rows
    model, train_step = make_step(job, recipe)

    def batch(step):
        return on_mesh(job.mesh, training_batch(job.train, step, settings.seed, *shape, rows))

    state = first_state(job, model, train_step, batch, kept)
    folder.take_up()
    held_out, mean_loss = validation(job), make_validation(next_token_loss(model, deterministic=True))

    def validate():
        with progress.calling("validation"):
            return mean_loss(state.variables, held_out)

    def diagnose(step):
        return train_step.diagnose(state, batch(step))

    log = Logbook(folder, recipe, settings.tensorboard, last["step"] if last else 0)
    watch = Watch(log, settings, diagnose, last)
    progress = Progress(log, settings.steps, math.prod(shape), Speed.of(job.model, job.mesh), watch, last)
    profiled = parse_steps(settings.profile if folder.is_written else "", settings.steps)
    profile = Profile(folder.path / PROFILE / recipe, profiled, progress)
    with leaving.after_a_step(), kept, log, progress, profile:
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
            if is_last or kept.is_due(step, settings.steps):
                with progress.pause():
                    kept.save(step, state, job.description | progress.notes())
            if is_last:
                raise KeyboardInterrupt
    return Trained(model, state.variables, progress.val_loss)


def validation(job: Job) -> jax.Array:
    """Batches of held-out text (count, batch, seq + 1), as many as are needed."""
    measured, shape = min(VALIDATION_TOKENS, len(job.held_out)), (job.settings.batch_size, job.settings.seq_len)
    count = max(VALIDATION_BATCHES, math.ceil(measured / math.prod(shape)))
    return on_mesh(job.mesh, validation_batches(job.held_out, count, *shape, job.rows))


def first_state(job: Job, model: GPT, train_step: TrainStep, batch: Callable, kept: Checkpoints) -> TrainState:
    """The seed's parameters, or what the last checkpoint has, with new scales if that was another recipe's."""
    arguments, shapes = init_arguments(job, model), state_shapes(job, model, train_step)
    if kept.every or kept.last is not None:
        kept.check_room(shapes)
    if kept.last is None:
        state = train_step.init_state(*arguments)
        # Programs of arrays that say where they are, as those of a step do, are others.
        return jax.device_put(state, job.mesh.devices.item()) if job.mesh.size == 1 else state
    state, is_new = kept.restore(shapes, lambda: jax.jit(lambda *inputs: model.init(*inputs)["fp8"])(*arguments[1:]))
    return train_step.warm_start(state, batch(kept.last["step"] + 1)) if is_new else state


def make_validation(loss_fn: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, jax.Array], jax.Array]:
    """The mean loss of batches (count, batch, seq + 1): one program, for which the host need not wait. Variables stay
    where training has put them, and the compiler splits it.
    """

    @jax.jit
    def mean_loss(variables, batches):
        return jnp.mean(jax.lax.map(partial(loss_fn, variables), batches))

    return mean_loss


def run_or_say_why(job: Job, folder: Folder) -> int:
    """The run, and one sentence where it ends early."""
    with Leaving(all_end if jax.process_count() > 1 else None) as leaving:
        try:
            with folder.alone():
                return run(job, folder, leaving)
        except KeyboardInterrupt:
            if not folder.is_written:  # what there is to say, the first process says
                return leaving.status
            if folder.rows:
                folder.plot(title(job))
            return _complain(interruption(job.settings, folder.path, folder.rows), leaving.status)
        except CannotResume as error:
            return _complain(error, REFUSED)
        except FloatingPointError as error:
            folder.plot(title(job))
            return _complain(error, FAILED)
        except CannotSave as error:
            return _complain(error, FAILED)
        except OSError as error:
            return _complain(f"what the run writes must find room in {folder.path}, got {error}; it ends here", FAILED)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _complain("out of device memory; use more --microbatches or a smaller --preset", FAILED)


def title(job: Job) -> str:
    return f"{job.settings.preset}, {job.model.num_layers} layers, {job.model.hidden_size} wide"


def run(job: Job, folder: Folder, leaving: Leaving) -> int:
    """What a run is once nothing in its settings is wrong: train, plot, write a sample, sum up."""
    settings, found = job.settings, versions(job.mesh)
    existing = folder.existing  # of a run that continues

    def train_in(recipe, name):
        kept = Checkpoints(folder.path / name, settings.checkpoint_every, settings.keep, existing is not None)
        return train(job, recipe, folder, kept, leaving)

    if existing is None or not existing.rows:
        folder.write_config(describe(settings), dataclasses.asdict(job.model), found)
    if isinstance(job.encoder, PairEncoder):
        folder.write_tokenizer(job.encoder.text())
    print(
        f"{settings.preset}: {settings.num_layers} layers, {settings.hidden_size} wide, on {found['device']}; "
        f"{len(job.train):,} tokens to train on, {len(job.held_out):,} held out"
    )
    trained = train_in(settings.recipe, CHECKPOINTS)
    baseline = train_in("bf16", BASELINE) if settings.compare else None
    folder.plot(title(job))
    if settings.sample_tokens:
        prompt = job.held_out[: settings.seq_len].astype(np.int32)
        text = sample(trained.model, trained.variables, prompt, settings.sample_tokens, settings.seed)
        prompt, text = job.encoder.decode(prompt), job.encoder.decode(text)
        print(f"\n--- after the held-out text\n{prompt}\n--- the model writes\n{text}\n---")
    summary = f"validation loss: {settings.recipe} {trained.val_loss:.4f}"
    if baseline is not None:
        difference = 100 * (trained.val_loss / baseline.val_loss - 1)
        summary += f", bf16 {baseline.val_loss:.4f}, difference {difference:+.2f} %"
    print(f"{summary}; log, configuration and picture are in {folder.path}")
    return 0


def _complain(sentence: Any, status: int) -> int:
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    return complain(f"train{f', process {jax.process_index()}' if several else ''}", sentence, status)
