"""Runs Python scripts at the same time, each in its own process: the processes of one run."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

LIMIT = 120  # seconds, after which all processes are killed
DEVICE_COUNT = "--xla_force_host_platform_device_count"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def cpus(each: int, processes: int) -> list[dict[str, str]]:
    """The environment of each process, with so many CPU devices."""
    flags = re.sub(rf"{DEVICE_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {DEVICE_COUNT}={each}"}] * processes


def gpus(each: int, processes: int) -> list[dict[str, str]]:
    """The environment of each process, with `each` of this process's visible GPUs. It leaves memory on them for this
    process.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(each * processes)]
    own = [",".join(names[first : first + each]) for first in range(0, each * processes, each)]
    common = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return [common | {"CUDA_VISIBLE_DEVICES": of} for of in own]


def run_processes(
    *commands: list,
    environments: Sequence[dict[str, str]],
    stop: Callable[[], bool] | None = None,
    limit: float = LIMIT,
) -> list[subprocess.CompletedProcess]:
    """Run a script with its arguments in each process. As soon as `stop` returns True, the last process gets SIGTERM.
    All are killed after `limit` seconds.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, *map(str, command)], env=os.environ | environment, **pipes)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        while stop is not None and started[-1].poll() is None:
            if stop():
                started[-1].terminate()
                break
            time.sleep(0.05)
        outputs = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]
