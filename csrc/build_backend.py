"""scikit-build-core, plus a CUDA compiler from pip where a GPU machine has none.

A build in isolation sees only what it asks for, so this is where the question "does this build need nvcc?" is
answered: always when the kernels were asked for (`JAX_FP8_KERNELS=ON`), on a machine with an NVIDIA GPU by default,
and never when an nvcc is there already. A machine without GPU and nvcc downloads nothing extra and builds the
extension without kernels.
"""

import os
import pathlib
import shutil

from scikit_build_core import build as _scikit
from scikit_build_core.build import *  # noqa: F403  every other hook is scikit-build-core's own

# One CUDA release throughout: nvcc, its front end, its optimiser and the runtime it links must match.
NVCC_WHEELS = [f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "cuda-cccl")]


def _kernels_option(config_settings) -> str:
    return str((config_settings or {}).get("cmake.define.JAX_FP8_KERNELS", "AUTO")).upper()


def _has_nvcc() -> bool:
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists())


def _has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi") or pathlib.Path("/proc/driver/nvidia/version").exists())


def _nvcc_requirements(config_settings) -> list[str]:
    option = _kernels_option(config_settings)
    wanted = option == "ON" or (option == "AUTO" and _has_gpu())
    return NVCC_WHEELS if wanted and not _has_nvcc() else []


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_wheel(config_settings), *_nvcc_requirements(config_settings)]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_scikit.get_requires_for_build_editable(config_settings), *_nvcc_requirements(config_settings)]
