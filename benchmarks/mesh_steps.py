"""Measure one case of `meshes.py` in this process: step times, memory and profile, or the losses on a text.

python mesh_steps.py JOB RESULT LIMIT [TURNS]      # as mesh_processes.py starts it
"""

import contextlib
import dataclasses
import faulthandler
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import kernel_profile
import numpy as np
import overlap
import tables
from mesh_cases import Case, Training, build

import jax_fp8 as fp8

WARMUP_STEPS = 4
COMPILE, MEASURE = "compile", "measure"  # files in the folder of turns: what the process may do
COMPILED = "compiled"  # the phase after the first of them
SPARED = 3.0  # seconds before the limit, in which a process that hangs writes down where


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a fresh process must know: the case, the numbers of timed, warmup and profiled steps, and what else to
    measure.
    """

    case: Case
    steps: int = 20
    warmup: int = WARMUP_STEPS
    profile: int = 0
    report: bool = False
    text: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        return cls(**{**fields, "case": Case(**fields["case"])})


def say(phase: str) -> None:
    """Print a phase. The last one shows where a process hangs."""
    print(f"phase: {phase}", file=sys.stderr, flush=True)


def wait_for(turn: pathlib.Path) -> None:
    while not turn.exists():
        time.sleep(0.02)


def compile_ahead(case: Case, training: Training, turns: pathlib.Path) -> None:
    """Compile the step of a case from shapes into jax's cache when its turn comes; nothing for plain Flax. Returns when
    its turn to be measured has come.
    """
    lowered = None
    if case.recipe != "plain":
        say("tracing")
        tokens = np.zeros((case.sequences, case.config.max_seq_len + 1), np.int32)
        lowered = training.step.lower(training.shapes, training.place(tokens))
    wait_for(turns / COMPILE)
    if lowered is not None:
        say("compiling")
        lowered.compile()
    say(COMPILED)
    wait_for(turns / MEASURE)


def measure(job: Job, limit: float = float("inf"), turns: pathlib.Path | None = None) -> Iterator[dict]:
    """Run one job in this process, after its turns if it takes any. Writes the times first, and again with the
    additional measurements that were asked for.
    """
    table = fp8.GemmTable.load(job.case.gemms) if job.case.gemms else None
    with fp8.tuned_gemms(table) if table else contextlib.nullcontext():
        if turns is None:  # else there is no hurry yet
            hurry(limit)
        training = build(job.case, len(np.load(job.text, mmap_mode="r")) if job.text else 0)
        if turns is not None:
            compile_ahead(job.case, training, turns)
            hurry(limit)
        yield from [train(job, training)] if job.text else time_steps(job, training)


def hurry(limit: float) -> None:
    """Leave this number of seconds from now on."""
    if limit < float("inf"):
        faulthandler.dump_traceback_later(max(limit - SPARED, limit / 2))


def time_steps(job: Job, training: Training) -> Iterator[dict]:
    """Both times of a step, and the additional measurements that were asked for."""
    case = job.case
    say("making the state")
    state = training.make_state()
    shape, generator = (case.sequences, case.config.max_seq_len + 1), np.random.default_rng(0)
    batches = [
        training.place(generator.integers(0, case.config.vocab_size, shape, np.int32))
        for _ in range(1 + job.warmup + 2 * job.steps)
    ]
    jax.block_until_ready((state, batches))
    losses, waited_ms = [], []
    for index in range(1 + job.warmup + job.steps):
        if index < 2:
            say("the first step, with compiling" if index == 0 else "steps")
        start = time.perf_counter()
        state, metrics = training.step(state, batches[index])
        losses.append(float(metrics["loss"]))  # a number: arrays that are kept move the buffers of later steps
        waited_ms.append(1e3 * (time.perf_counter() - start))
    say("steps in a row")
    start = time.perf_counter()
    for batch in batches[-job.steps :]:
        state, metrics = training.step(state, batch)
    jax.block_until_ready((state, metrics))
    row_ms = 1e3 * (time.perf_counter() - start) / job.steps
    timed_ms, timed_losses = waited_ms[-job.steps :], losses[-job.steps :]
    step_ms = statistics.median(timed_ms)
    result = {
        **described(case, training.num_params),
        "step_ms": step_ms,
        "spread_ms": [min(timed_ms), max(timed_ms)],
        "row_ms": row_ms,
        "samples_per_s": 1e3 * case.sequences / step_ms,
        "row_samples_per_s": 1e3 * case.sequences / row_ms,
        "first_step_s": waited_ms[0] / 1e3,
        "peak_gib": peak_gib(case.devices),
        "first_loss": timed_losses[0],
        "last_loss": timed_losses[-1],
    }
    yield result
    if job.report or job.profile:
        yield result | look_closer(job, training.step, state, batches)


def described(case: Case, num_params: int) -> dict:
    return {
        "case": dataclasses.asdict(case),
        "environment": tables.environment(),
        "sequences": case.sequences,
        "seq_len": case.config.max_seq_len,
        "num_params": num_params,
    }


def peak_gib(devices: int) -> list[float] | None:
    """Peak memory of every device, with initialization; CPU devices have no such statistics."""
    statistics_of = [device.memory_stats() or {} for device in jax.devices()[:devices]]
    peaks = [found.get("peak_bytes_in_use") for found in statistics_of]
    return None if None in peaks else [peak / 2**30 for peak in peaks]


def look_closer(job: Job, step: Any, state: Any, batches: list[jax.Array]) -> dict:
    """The capture report and the profile. If one fails, the times are kept; the table and the exit status say so."""
    found = {}
    if job.report:
        say("the report")
        try:
            report = fp8.capture_report(step.lower(state, batches[0]))
            found |= {"wire_mib": report.wire_bytes / 2**20, "report": str(report)}
        except (ValueError, RuntimeError) as error:
            found["failed_beside"] = str(error)
    if job.profile:
        say("the profile")
        hlo_text = step.lower(state, batches[0]).compile().as_text()

        def run():
            nonlocal state
            for index in range(job.profile):
                state, _ = step(state, batches[index % len(batches)])
            jax.block_until_ready(state)

        try:
            found["profile"] = overlap.summarize(kernel_profile.record(run), job.profile, hlo_text)
        except (ValueError, RuntimeError) as error:
            found["failed_beside"] = str(error)
    return found


def train(job: Job, training: Training) -> dict:
    """The losses of all batches of a file: int (steps, sequences, seq + 1), as `mesh_curves.py text` writes it."""
    case, text = job.case, np.load(job.text, mmap_mode="r")
    wanted = case.sequences, case.config.max_seq_len + 1
    if text.ndim != 3 or text.shape[1:] != wanted:
        raise ValueError(
            f"{job.text} must have batches of {wanted[0]} x {wanted[1]} tokens, got {text.shape}; "
            "make it with mesh_curves.py text, its sequences a multiple of --microbatches"
        )
    if text.max() >= case.config.vocab_size:
        raise ValueError(
            f"tokens must be below the vocabulary of {case.config.vocab_size:,}, got {text.max():,}; set --vocab-size"
        )
    say("making the state")
    state, losses, started = training.make_state(), [], time.perf_counter()
    for index, batch in enumerate(text):
        if index < 2:
            say("the first step, with compiling" if index == 0 else "steps")
        state, metrics = training.step(state, training.place(np.asarray(batch, np.int32)))
        losses.append(float(metrics["loss"]))
    result = described(case, training.num_params)
    result |= {"seconds": time.perf_counter() - started, "peak_gib": peak_gib(case.devices), "losses": losses}
    return result | {"first_loss": losses[0], "last_loss": losses[-1]}


def main(arguments: list[str]) -> int:
    job, result, limit = Job.from_json(arguments[0]), pathlib.Path(arguments[1]), float(arguments[2])
    for found in measure(job, limit, *map(pathlib.Path, arguments[3:])):
        unfinished = result.with_suffix(".part")
        unfinished.write_text(json.dumps(found))
        unfinished.replace(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
