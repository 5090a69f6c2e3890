"""Described GPUs, which this machine need not have: XLA:GPU compiles for a description as it would for a device.

    a name ─gpus/<name>.txtpb→ devices of a mesh ─lower and compile a step→ the program, its memory, its collectives

Nothing can run on such devices, so XLA's autotuning, which times kernels, is switched off. Compiling needs jax's CUDA
plugin, but no GPU.
"""

import ctypes
import functools
import importlib.util
import math
import os
import pathlib
from typing import Any

import jax
from jax.experimental import topologies

GPUS = {"h200": 150_109_880_320}  # bytes of memory
FOLDER = pathlib.Path(__file__).with_name("gpus")
HOST = 8  # GPUs of one host; a topology of more GPUs has several hosts

# Autotuning needs a device. Without Triton, cuBLAS computes every GEMM that XLA makes; fusions take the emitter of
# untuned ones.
UNTIMED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_experimental_enable_fusion_autotuner": False}

# Fields for timing, which jaxlib 0.10's schema of a description does not have.
_FIELDS_SINCE_0_11 = (
    "collective_memory_granularity",
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
)


def missing_reason() -> str | None:
    """Why this machine cannot compile for a described GPU, and what to do, in one sentence; None if it can."""
    found = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
    if not found:
        version = jax.__version__
        return (
            "compiling for an H200 needs jax's CUDA plugin, which is not installed; "
            f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        )
    return None


@functools.cache
def described_gpus(count: int, gpu: str = "h200") -> tuple[Any, ...]:
    """`count` described GPUs, for which programs can be compiled but not run. jax has no public type for devices."""
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}; choose one of these")
    if reason := missing_reason():
        raise ValueError(reason)
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin asks for a driver
    text = FOLDER.joinpath(f"{gpu}.txtpb").read_text()
    if jax.__version_info__ < (0, 11):
        text = "\n".join(line for line in text.splitlines() if not line.strip().startswith(_FIELDS_SINCE_0_11))
    of_host = count if count <= HOST else math.gcd(count, HOST)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=text, topology=f"1x{count // of_host}x{of_host}"
    )
    return tuple(topology.devices)


def load_cudnn() -> None:
    """Load cuDNN into this process: jax asks it for its version before it compiles attention for cuDNN."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    found = [str(path) for folder in folders for path in pathlib.Path(folder, "cudnn", "lib").glob("libcudnn.so.*")]
    try:
        ctypes.CDLL(max(found, default="libcudnn.so.9"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ValueError(
            f"attention is compiled for cuDNN, which must be here, got {error}; pip install nvidia-cudnn-cu13"
        ) from None
