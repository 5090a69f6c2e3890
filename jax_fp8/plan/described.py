"""GPUs that are not here, described well enough to compile for: XLA:GPU asks such a description what it would ask a
device.

    a name ─gpus/<name>.txtpb→ devices of a mesh ─a step lowered on it→ the program, its memory, what it sends

Nothing can run on them, and what XLA finds out by timing is left out. It needs jax's CUDA plugin, not a GPU.
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
HOST = 8  # GPUs of one host, beyond which a topology has several

# What is chosen by timing needs a device. Without Triton every GEMM that XLA makes is cuBLAS;
# fusions take the emitter they would have without a tuner.
UNTIMED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_experimental_enable_fusion_autotuner": False}

# Fields that the schema inside jaxlib 0.10 has no name for; they describe timing.
_FIELDS_SINCE_0_11 = (
    "collective_memory_granularity",
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
)


def missing_reason() -> str | None:
    """Why nothing can be compiled for a described GPU here, in one sentence with what to do; None when all is there."""
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
    """`count` described GPUs; they compile and cannot run."""
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
    """Make cuDNN known to this process: jax asks it for its version before it compiles attention for it."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    found = [str(path) for folder in folders for path in pathlib.Path(folder, "cudnn", "lib").glob("libcudnn.so.*")]
    try:
        ctypes.CDLL(max(found, default="libcudnn.so.9"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ValueError(
            f"attention is compiled for cuDNN, which must be here, got {error}; pip install nvidia-cudnn-cu13"
        ) from None
