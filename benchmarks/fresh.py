"""Measure in a fresh process, so that no earlier measurement has left anything in its memory, on its GPU or in its
caches.

parent ──job as JSON──→ python SCRIPT --job ... --result FILE ──measurement as JSON──→ parent
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}


def measure_in_fresh_process(script: pathlib.Path, job: Any, **environment: str) -> tuple[dict, str]:
    """The measurement of a job, or `{"failed": error}` if its process failed; and what the process wrote to stderr.

    Args:
      job: a dataclass whose fields JSON can express.
      environment: variables added to those of this process. Memory settings of this process win over the default ones.
    """
    whole = {**MEMORY, **os.environ, **environment}
    with tempfile.TemporaryDirectory() as directory:
        result = pathlib.Path(directory, "result.json")
        command = [sys.executable, str(script), "--job", json.dumps(dataclasses.asdict(job)), "--result", str(result)]
        done = subprocess.run(command, env=whole, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return json.loads(result.read_text()), done.stderr
    print(done.stderr[-4000:], file=sys.stderr, flush=True)
    errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", done.stderr, re.MULTILINE)
    return {"failed": errors[-1][:300] if errors else f"exit status {done.returncode}"}, done.stderr


def keep_programs(folder: str) -> dict[str, str]:
    """The environment in which jax keeps every compiled program in a folder, and looks for it there."""
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def compile_side_by_side(script: pathlib.Path, jobs: Sequence[Any], cache: str) -> dict[str, str]:
    """Compile the programs of all jobs at the same time into a folder, and return the environment in which jax finds
    them. If a job fails here, its error is reported when it is measured.
    """
    environment = keep_programs(cache)
    own = {**os.environ, **environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    commands = [
        [sys.executable, str(script), "--compile-only", "--job", json.dumps(dataclasses.asdict(job))] for job in jobs
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for process in [subprocess.Popen(command, env=own, **quiet) for command in commands]:
        process.wait()
    return environment
