"""The processes of `meshes.py`, one for each case. They run one after the other, or compile at the same time and then
take turns.

    parent ──job as JSON──→ python mesh_steps.py JOB RESULT LIMIT [TURNS] ──measurement as JSON──→ parent

With a folder TURNS, a process waits for one file in it before it compiles, and for another before it makes its state.
So a GPU has one state at a time, and nothing compiles while steps are timed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from fresh import keep_programs
from mesh_steps import COMPILE, COMPILED, MEASURE, Job

STEPS = pathlib.Path(__file__).resolve().with_name("mesh_steps.py")
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}  # unless told otherwise
POLL = 0.05  # seconds


class CaseProcess:
    """A job in a fresh process, which this starts.

    Args:
      limit: seconds to measure in, and with turns as many to compile in.
      cache: a folder for compiled programs; the process takes turns, and allocates memory as needed. None: no turns.
    """

    def __init__(self, job: Job, limit: float, cache: str | None = None):
        self.job, self.limit = job, limit
        self._directory = tempfile.TemporaryDirectory()
        self._folder = pathlib.Path(self._directory.name)
        command = [sys.executable, str(STEPS), job.to_json(), str(self._folder / "result.json"), str(limit)]
        environment = {**MEMORY, **os.environ}
        if cache is not None:
            command.append(str(self._folder))
            environment |= {**keep_programs(cache), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with self._errors.open("w") as file:
            self._process = subprocess.Popen(command, env=environment, stderr=file, stdout=file)

    @property
    def _errors(self) -> pathlib.Path:
        return self._folder / "errors.txt"

    def let(self, turn: str) -> None:
        """Start the process's turn COMPILE or MEASURE."""
        (self._folder / turn).touch()

    def wait_until(self, phase: str) -> None:
        """Wait until the process prints this phase, has ended, or the limit is over; `result` reports the last two."""
        until = time.monotonic() + self.limit
        while self._process.poll() is None and time.monotonic() < until:
            if f"phase: {phase}\n" in self._errors.read_text(errors="replace"):
                return
            time.sleep(POLL)

    def result(self, limit: float | None = None) -> dict:
        """Let the process measure, and wait for its measurement, or for the case and how it failed."""
        limit = self.limit if limit is None else limit
        self.let(MEASURE)
        try:
            status = self._process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        said, result = self._errors.read_text(errors="replace"), self._folder / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {}
        self.end()
        if status == 0:
            return found
        print(said[-3000:], file=sys.stderr, flush=True)
        if found:  # the times are good; what came after them failed
            return {**found, "failed_beside": reason(said, status, limit)}
        return {"case": dataclasses.asdict(self.job.case), "failed": reason(said, status, limit)}

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even a killed process
            self._process.wait(timeout=10)
        self._directory.cleanup()


def reason(said: str, status: int | None, limit: float) -> str:
    """In one line, how a process ended that left no result."""
    phase = ["the start", *re.findall(r"^phase: (.*)$", said, re.MULTILINE)][-1]
    if status is None:
        frames = re.findall(r'most recent call first\):\n  File "[^"]*", line \d+ in (\w+)', said)
        inside = f", in {frames[-1]}" if frames else ""
        return f"no result within {limit:g} s; last seen at {phase}{inside}"
    errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", said, re.MULTILINE)
    return errors[-1][:200] if errors else f"exit status {status} at {phase}"


def compile_side_by_side(jobs: Sequence[Job], limit: float, cache: str) -> list[CaseProcess]:
    """A process for each job that has compiled its step and waits for its turn.

    XLA times the products of a model without FP8, and keeps its choices in the folder `cache`. For each mesh, one case
    does so first, with the GPU to itself; the others then take its choices.
    """
    processes = [CaseProcess(job, limit, cache) for job in jobs]
    by_xla: dict[str, list[CaseProcess]] = {}
    for process in processes:
        if process.job.case.in_fp8:
            process.let(COMPILE)
        else:
            by_xla.setdefault(process.job.case.mesh, []).append(process)
    for first, *_ in by_xla.values():
        first.let(COMPILE)
        first.wait_until(COMPILED)
    for process in processes:
        process.let(COMPILE)
    for process in processes:
        process.wait_until(COMPILED)
    return processes
