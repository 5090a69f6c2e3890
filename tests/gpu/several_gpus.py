"""Runs scripts that need several GPUs, each in a process whose only devices are GPUs.

In a test's own process the CPU's devices come first, so a mesh would be made of those.
"""

import re
from types import ModuleType

import jax
import pytest
from several_processes import gpus, run_processes

LIMIT = 600  # seconds


def assert_passes(script: ModuleType, *arguments: str) -> None:
    """Run a script on all GPUs. It must exit with 0, and must have made comparisons."""
    count = len(jax.devices("cuda"))
    if count < 2:
        pytest.skip(f"needs two GPUs or more, got {count}")
    (environment,) = gpus(count, 1)
    for_gpus = environment | {"XLA_FLAGS": ""}  # the tests' flags are for fast compilation on a CPU
    (finished,) = run_processes([script.__file__, *arguments], environments=[for_gpus], limit=LIMIT)
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said[-5000:]
    assert re.search(r"^ok +[1-9]", said, re.MULTILINE), said[-5000:]
