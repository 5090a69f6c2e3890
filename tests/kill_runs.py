"""Kills a run again and again, and checks that it ends like a run that was never killed.

    python tests/kill_runs.py                                        # 20 kills, some minutes
    python tests/kill_runs.py --kills 3 --steps 60 --recipe bf16

One run is left alone. Another is killed by SIGKILL at random moments, the first before its first checkpoint, some while
it starts, most while it trains and writes a checkpoint every few steps; it is started again each time with
`--resume auto`. In the end both must have the same params, optimizer state and FP8 state, bit for bit, and the same
logs: every loss and every diagnosis, each step once. `tests/test_kill_runs.py` runs a small form of it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DIAGNOSED = "--diagnose-every 5 --skip-spikes"
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 0 --eval-every 50"
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
STARTING, SECONDS = 0.2, 2.0  # share of kills while a run starts; how long it trains at most before a kill
LIMIT = 300  # seconds without anything new, so that nothing hangs for ever


class Killed(NamedTuple):
    """The progress of a run when it was killed."""

    while_it: str  # starts or trains
    seconds: float  # it had done so
    checkpoint: int  # step of the last one; 0 for none
    unfinished: bool  # another was being written


class Program:
    """`python -m jax_fp8 train`, with all outputs in one folder, and programs that are compiled once for all starts."""

    def __init__(self, folder: Path, options: list[str]):
        self.output, self._options = folder / "runs", options
        always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
        programs = {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "JAX_ENABLE_COMPILATION_CACHE": "True"}
        self._environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS} | programs | always

    def start(self, name: str) -> subprocess.Popen:
        """Start the run of this name, or resume it."""
        command = [sys.executable, "-m", "jax_fp8", "train", *SMALL.split(), *DIAGNOSED.split()]
        command += self._options
        command += ["--output", str(self.output), "--name", name, "--resume", "auto"]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self._environment, **pipes)

    def finish(self, name: str) -> None:
        process = self.start(name)
        _, said = process.communicate(timeout=LIMIT)
        if process.returncode:
            raise RuntimeError(f"{name} must end well, got {said}")

    def kill(self, name: str, starts: bool, seconds: float) -> Killed:
        """Start a run, and kill it after so many seconds, counted from its start or from its first step."""
        folder = self.output / name / "checkpoints"
        before, process, began = _names(folder), self.start(name), time.monotonic()
        is_training, limit = False, began + LIMIT
        while time.monotonic() < limit:
            if process.poll() is not None:
                raise RuntimeError(
                    f"{name} must not end before it is killed, give it more --steps, got:\n{process.stderr.read()}"
                )
            if not starts and not is_training and _names(folder) != before:
                is_training, began = True, time.monotonic()
            if (starts or is_training) and time.monotonic() - began >= seconds:
                break
            time.sleep(0.002)
        process.kill()
        process.communicate()
        steps = [int(name) for name in _names(folder) if name.isdecimal()]
        is_unfinished = any(not name.isdecimal() for name in _names(folder))
        return Killed("starts" if starts else "trains", round(seconds, 2), max(steps, default=0), is_unfinished)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


def losses(run: Path) -> list[tuple]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["run"], row["step"], row["loss"], row["val_loss"]) for row in rows]


def arrays(run: Path) -> dict:
    """Dtype, shape and the sum of all bits of every array of the last checkpoint."""
    folder = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    notes = json.loads((folder / "notes/metadata").read_text())
    return {"step": notes["step"]} | notes["arrays"]


def diagnostics(run: Path) -> str:
    path = run / "diagnostics.jsonl"
    return path.read_text() if path.exists() else ""


def check_equal(one: Path, other: Path) -> None:
    if losses(one) != losses(other):
        raise AssertionError(f"the logs of {one} and {other} must be equal")
    steps = [row[1] for row in losses(one)]
    if steps != sorted(set(steps)):
        raise AssertionError(f"each step must be in the log once, got {steps}")
    if diagnostics(one) != diagnostics(other):
        raise AssertionError(f"the diagnostics of {one} and {other} must be equal")
    if arrays(one) != arrays(other):
        raise AssertionError(f"the last checkpoints of {one} and {other} must be equal")


def kill_runs(folder: Path, kills: int, steps: int, every: int, seed: int, recipe: str, data: Path) -> list[Killed]:
    given = {"--steps": steps, "--checkpoint-every": every, "--recipe": recipe, "--data": data}
    program = Program(folder, [str(part) for pair in given.items() for part in pair])
    drawn, killed = random.Random(seed), []
    program.finish("whole")
    for number in range(kills):
        # The first while nothing is saved: from there the run begins anew.
        starts = number == 0 or drawn.random() < STARTING
        killed.append(program.kill("killed", starts, drawn.uniform(0, 2 * SECONDS if starts else SECONDS)))
        print(f"kill {number + 1}: {killed[-1]}", flush=True)
    program.finish("killed")
    check_equal(program.output / "whole", program.output / "killed")
    return killed


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Kill a run, and compare it with one left alone.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--every", type=int, default=3, help="steps between two checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--recipe", default="delayed")
    parser.add_argument("--data", type=Path, default=ROOT / "docs")
    given, began = vars(parser.parse_args(argv)), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_runs(Path(folder), **given)
    unfinished, minutes = sum(found.unfinished for found in killed), (time.monotonic() - began) / 60
    print(
        f"{len(killed)} kills, {unfinished} of them while a checkpoint was written: params, optimizer state, FP8 state "
        f"and log are those of the run that was left alone; {minutes:.1f} minutes"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
