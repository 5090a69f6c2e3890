"""scikit-build-core, told whether to compile the CUDA kernels, and given the compilers that this takes.

`JAX_FP8_KERNELS` is ON, OFF, or AUTO, the default: ON where the machine has an NVIDIA GPU. AUTO is decided here, before
CMake runs, because a build in isolation sees only the packages that it asked for:

    pip's nvcc    if the kernels are compiled and the machine has none
    Zig           if the extension is linked for an older glibc than this machine's (`JAX_FP8_GLIBC`)

What is decided is said in one line. pip hides what a build prints, so the line also goes to the terminal.
"""

import contextlib
import os
import pathlib
import shutil
import sys

from scikit_build_core import build as _scikit
from scikit_build_core.build import *  # noqa: F403  every other hook is scikit-build-core's own

# One CUDA release throughout: nvcc, its front end, its optimiser and the runtime it links must match.
NVCC_WHEELS = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]
ZIG_WHEELS = ["ziglang>=0.13"]
MINUTES = 7  # of one core, to compile the kernels for the three architectures of the default
TERMINAL = "/dev/tty"
KERNELS, WHY_NOT, LIBRARY, GLIBC = (
    f"cmake.define.JAX_FP8_{name}" for name in ("KERNELS", "WHY_NO_KERNELS", "LIBRARY", "GLIBC")
)


def with_decision(config_settings: dict | None) -> dict:
    """`config_settings` with `JAX_FP8_KERNELS` as ON or OFF, and the reason for OFF."""
    settings = dict(config_settings or {})
    asked = str(settings.get(KERNELS, "AUTO")).upper()
    if asked not in ("AUTO", "ON", "OFF"):
        raise ValueError(f"JAX_FP8_KERNELS must be AUTO, ON or OFF, got {asked}")
    is_on = asked == "ON" or (asked == "AUTO" and _has_gpu())
    settings[KERNELS] = "ON" if is_on else "OFF"
    if not is_on:
        settings[WHY_NOT] = "JAX_FP8_KERNELS=OFF" if asked == "OFF" else "on a machine without an NVIDIA GPU"
    return settings


def announcement(settings: dict) -> str:
    """What a build with these settings does, and how long it takes, in one line."""
    if settings[KERNELS] == "OFF":
        return f"jax_fp8: building without CUDA kernels ({settings[WHY_NOT]}): seconds"
    if settings.get(LIBRARY):
        return f"jax_fp8: linking the CUDA kernels of {settings[LIBRARY]}: seconds"
    cores = len(os.sched_getaffinity(0))
    return f"jax_fp8: compiling CUDA kernels on {cores} cores: about {max(1, round(MINUTES / cores))} minutes"


def _has_nvcc() -> bool:
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists())


def _has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi") or pathlib.Path("/proc/driver/nvidia/version").exists())


def _compilers(config_settings: dict | None) -> list[str]:
    settings = with_decision(config_settings)
    nvcc = NVCC_WHEELS if settings[KERNELS] == "ON" and not _has_nvcc() else []
    return [*nvcc, *(ZIG_WHEELS if settings.get(GLIBC) else [])]


def _decide(config_settings: dict | None) -> dict:
    settings = with_decision(config_settings)
    line = announcement(settings)
    print(line, file=sys.stderr)
    with contextlib.suppress(OSError), open(TERMINAL, "w") as terminal:
        print(line, file=terminal)
    return settings


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_wheel(config_settings), *_compilers(config_settings)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_editable(config_settings), *_compilers(config_settings)]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    return _scikit.build_wheel(wheel_directory, _decide(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None) -> str:
    return _scikit.build_editable(wheel_directory, _decide(config_settings), metadata_directory)
