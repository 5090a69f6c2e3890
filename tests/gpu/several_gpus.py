"""Scripts about several GPUs, run by tests: each in a process whose only devices are GPUs.

In a test's own process the CPU's devices come first, and a mesh is made of those.
"""

import re
from types import ModuleType

import jax
import pytest
from several_processes import gpus, run_processes

LIMIT = 600  # seconds


def assert_passes(script: ModuleType, *arguments: str) -> None:
    """Run a script on all GPUs: it must end well, and must have compared something."""
    count = len(jax.devices("cuda"))
    if count < 2:
        pytest.skip(f"needs two GPUs or more, got {count}")
    (environment,) = gpus(count, 1)
    for_gpus = environment | {"XLA_FLAGS": ""}  # those of tests are for compiling quickly for a CPU
    (finished,) = run_processes([script.__file__, *arguments], environments=[for_gpus], limit=LIMIT)
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said[-5000:]
    assert re.search(r"^ok +[1-9]", said, re.MULTILINE), said[-5000:]
