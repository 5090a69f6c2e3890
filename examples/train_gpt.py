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
Settings are in settings.py, what is made of them in job.py, optimizer and compiler in building.py, text and tokens in
text.py, validation and sample in evaluation.py. The line that shows how far a run is: progress.py and speed.py; which
steps are skipped or looked at: spikes.py, watch.py and profiling.py; what is written: record.py, logbook.py, logs.py
and scalars.py; checkpoints: checkpoints.py and resuming.py. Ctrl-C is in leaving.py, devices in mesh.py, and what
several processes agree on in processes.py: each runs this script from top to bottom.
"""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import BASELINE, MAIN, CannotResume, CannotSave, Checkpoints
from evaluation import make_validation, write
from job import Job, make_model, make_step, prepare
from leaving import FAILED, Leaving, leave
from logbook import Logbook, bytes_of_logs
from mesh import check_settings, on_mesh, parse_axes
from processes import agree, all_end, fingerprint, is_first, start, tell_all
from profiling import Profile
from progress import Progress
from record import Folder, versions
from resuming import find_run, interruption
from settings import Settings, check, parse, parse_steps
from speed import Speed
from text import PairEncoder, training_batch, validation_batches
from watch import Watch

import jax_fp8 as fp8
from jax_fp8.streams import one_line, surviving

VALIDATION_BATCHES = 8  # at least
VALIDATION_TOKENS = 2**15  # at least, where so many are held out: the mean of fewer is noise itself
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it; leaving.py has that of other signals


def read_settings(argv: list[str]) -> Settings:
    """The command line, with what can be wrong about it alone."""
    settings = parse(argv)
    check(settings)
    check_settings(parse_axes(settings.mesh), settings)
    return settings


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
    of_one = {"coordinator": "", "process_id": None, "data": None, "output": None, "cache": None}
    shared = dataclasses.replace(settings, **of_one)
    try:
        agree(fingerprint(repr(shared).encode(), job.train.tobytes(), job.held_out.tobytes()))
    except ValueError:
        folder.remove()
        raise
    path, goes_on = json.loads(tell_all(json.dumps([str(folder.path.absolute()), existing is not None])))
    return job, folder if is_first() else folder.like_that_of_the_first(Path(path), goes_on)


class Trained(NamedTuple):
    model: fp8.GPT
    variables: Any
    val_loss: float


def train(job: Job, recipe: str, folder: Folder, kept: Checkpoints, leaving: Leaving) -> Trained:
    """One run: the model in one recipe, from the seed's parameters or a checkpoint, over the seed's batches."""
    settings, last = job.settings, kept.last
    shape = (settings.batch_size, settings.seq_len)
    model = make_model(settings, job.model, recipe)
    train_step = make_step(job, recipe, model)

    def batch(step):
        return on_mesh(job.mesh, training_batch(job.train, step, settings.seed, *shape, job.rows))

    state = first_state(job, model, train_step, batch, kept)
    folder.take_up()
    held_out, mean_loss = validation(job), make_validation(fp8.next_token_loss(model, deterministic=True))

    def validate():
        with progress.calling("validation"):
            return mean_loss(state.variables, held_out)

    def diagnose(step):
        return train_step.diagnose(state, batch(step))

    log = Logbook(folder, recipe, settings.tensorboard, last["step"] if last else 0)
    watch = Watch(log, settings, diagnose, last)
    progress = Progress(log, settings.steps, math.prod(shape), Speed.of(job.model, job.mesh), watch, last)
    profiled = parse_steps(settings.profile if folder.is_written else "", settings.steps)
    profile = Profile(folder.path / "profile" / recipe, profiled, progress)
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


def first_state(job: Job, model: fp8.GPT, train_step: Any, batch: Callable, kept: Checkpoints) -> fp8.TrainState:
    """The seed's parameters, or what the last checkpoint has, with new scales if that was another recipe's."""
    tokens = jnp.zeros((job.settings.batch_size, job.settings.seq_len), jnp.int32)
    arguments = (model.init, jax.random.key(job.settings.seed), tokens)
    if kept.every or kept.last is not None:
        shapes = train_step.state_shapes(*arguments)
        kept.check_room(shapes)
    if kept.last is None:
        state = train_step.init_state(*arguments)
        # Programs of arrays that say where they are, as those of a step do, are others.
        return jax.device_put(state, job.mesh.devices.item()) if job.mesh.size == 1 else state
    state, is_new = kept.restore(shapes, lambda: jax.jit(lambda *inputs: model.init(*inputs)["fp8"])(*arguments[1:]))
    return train_step.warm_start(state, batch(kept.last["step"] + 1)) if is_new else state


def sample(job: Job, trained: Trained) -> tuple[str, str]:
    """A prompt from the held-out text, and what the model writes after it."""
    prompt = job.held_out[: job.settings.seq_len].astype(np.int32)
    written = write(trained.model, trained.variables, prompt, job.settings.sample_tokens, job.settings.seed)
    return job.encoder.decode(prompt), job.encoder.decode(written)


def complain(sentence: str, status: int) -> int:
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    print(f"train_gpt.py{f', process {jax.process_index()}' if several else ''}: {one_line(sentence)}", file=sys.stderr)
    return status


def main(argv: list[str]) -> int:
    with surviving() as streams:  # a run that nobody reads trains on
        return streams.status(begin_and_run(argv))


def begin_and_run(argv: list[str]) -> int:
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
    with Leaving(all_end if jax.process_count() > 1 else None) as leaving:
        try:
            with folder.alone():
                return run(job, folder, leaving)
        except KeyboardInterrupt:
            if not folder.is_written:  # what there is to say, the first process says
                return leaving.status
            if folder.rows:
                folder.plot(title(job))
            return complain(interruption(job.settings, folder.path, folder.rows), leaving.status)
        except CannotResume as error:
            return complain(str(error), 2)
        except FloatingPointError as error:
            folder.plot(title(job))
            return complain(str(error), FAILED)
        except CannotSave as error:
            return complain(str(error), FAILED)
        except OSError as error:
            return complain(f"what the run writes must find room in {folder.path}, got {error}; it ends here", FAILED)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return complain("out of device memory; use more --microbatches or a smaller --preset", FAILED)


def title(job: Job) -> str:
    return f"{job.settings.preset}, {job.model.num_layers} layers, {job.model.hidden_size} wide"


def run(job: Job, folder: Folder, leaving: Leaving) -> int:
    """What a run is once nothing in its settings is wrong: train, plot, write a sample, sum up."""
    settings, found = job.settings, versions(job.mesh)
    goes_on = folder.existing is not None

    def train_in(recipe, name):
        kept = Checkpoints(folder.path / name, settings.checkpoint_every, settings.keep, goes_on)
        return train(job, recipe, folder, kept, leaving)

    if not goes_on or not folder.existing.rows:
        folder.write_config({"settings": dataclasses.asdict(settings), "model": dataclasses.asdict(job.model)} | found)
    if isinstance(job.encoder, PairEncoder):
        folder.write_tokenizer(job.encoder.text())
    print(
        f"{settings.preset}: {settings.num_layers} layers, {settings.hidden_size} wide, on {found['device']}; "
        f"{len(job.train):,} tokens to train on, {len(job.held_out):,} held out"
    )
    trained = train_in(settings.recipe, MAIN)
    baseline = train_in("bf16", BASELINE) if settings.compare else None
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
    leave(main(sys.argv[1:]))
