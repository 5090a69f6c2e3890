"""A step as one CUDA graph: the XLA options for it, and how its arrays keep their addresses from step to step.

Before each step XLA compares the addresses of every command of the graph with those of the last step. A command whose
addresses changed is recorded again, which takes some 15 µs of the host's time: 17 ms in all for a GPT of 24 layers. A
donated state keeps its addresses. Two kinds of memory would not:

    metrics   each step makes new arrays, and XLA uses their buffers also for scalars in between (amaxes);
              so the step overwrites zeros that the host donates
    scratch   XLA takes one block where memory is free; small arrays that the program keeps would move it,
              so `make_room` leaves free memory for them in front of it
"""

from collections.abc import Mapping

import jax
import numpy as np

from jax_fp8.core.types import PyTree
from jax_fp8.parallel.overlap import OVERLAP_OPTIONS

# A whole step, loops and conditionals included, as one CUDA graph. Collectives stay outside:
# inside graphs they were slower and could hang.
CUDA_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_graph_min_graph_size": 1,
}


# How many copies to and from the host may run at a time. XLA's own limit is two, too few to hide them behind compute.
OFFLOAD_OPTIONS = {"xla_gpu_experimental_parallel_async_compute_limit": 4096}


def default_options(on_mesh: bool, offloads: bool = False) -> dict[str, str | bool | int]:
    """The options of a step on one GPU or on those of a mesh; `offloads`: layers keep arrays on the host."""
    return CUDA_GRAPH_OPTIONS | (OVERLAP_OPTIONS if on_mesh else {}) | (OFFLOAD_OPTIONS if offloads else {})


def options_of_step(
    compiler_options: Mapping[str, object] | None, on_mesh: bool, offloads: bool
) -> Mapping[str, object]:
    """The options to compile a step with: the caller's, or the default ones where he passes None."""
    if not isinstance(compiler_options, Mapping | None):
        raise ValueError(f"compiler_options must be a dict or None, got {compiler_options!r}; name XLA's options")
    if compiler_options is not None:
        return compiler_options
    return {**default_options(on_mesh, offloads)} if jax.default_backend() == "gpu" else {}


ROOM_BYTES = 16 * 2**20  # 64,000 scalars


def zero_metrics(skip_above: float | None = None, diagnostics: PyTree = None) -> dict[str, PyTree]:
    """Zeros under the names of a step's metrics. The step adds its metrics to them and donates them.

    The step reads them to its end, so XLA puts nothing else into their buffers.

    Args:
      skip_above: the limit of the loss, if there is one; the step reads it here.
      diagnostics: `Diagnostics` of zeros, if the step is to return some.
    """
    zeros: dict[str, PyTree] = {
        "loss": np.float32(0),
        "nonfinite_amaxes": np.int32(0),
        "underflowing_amaxes": np.int32(0),
    }
    if skip_above is not None:
        zeros |= {"skipped": np.int32(0), "skip_above": np.float32(skip_above)}
    return zeros if diagnostics is None else zeros | {"diagnostics": diagnostics}


def make_room(near: jax.Array) -> list[jax.Array]:
    """Leave free memory for small arrays on the GPUs of an array, as long as the caller keeps what this returns.

    It allocates two arrays of one size on each GPU, frees the first and returns the second. The allocator takes the
    smallest free piece that is large enough. So the second array lies right behind the first, unless smaller pieces
    were free before. Small arrays fit into either without moving anything else.
    """
    devices = [device for device in near.sharding.addressable_devices if device.platform == "gpu"]
    contents = np.zeros(ROOM_BYTES if devices else 0, np.int8)
    _room, behind = ([jax.device_put(contents, device) for device in devices] for _ in range(2))
    return behind
