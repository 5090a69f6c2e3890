"""A step as one CUDA graph: the options that make it one, and arrays that stay where they are,
so that it is recorded once.

XLA compares the addresses of each command of a graph with those of the last step and records it again when one has
moved, some 15 µs of the host's time each, 17 ms for a GPT of 24 layers. A donated state stays. Two things would not:

    metrics   new arrays every step, whose buffers XLA also uses for scalars in between (amaxes);
              so they overwrite zeros that are donated
    scratch   one block, taken where memory is free; small arrays that are kept would push it on,
              so there is room for them in front of it
"""

from typing import Any

import jax
import numpy as np

from jax_fp8.parallel.overlap import OVERLAP_OPTIONS

# A whole step, loops and conditionals included, as one CUDA graph. Collectives stay outside:
# inside graphs they were slower and could hang.
CUDA_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_graph_min_graph_size": 1,
}


# Copies to and from the host that XLA may have under way at a time: by itself two, which hide behind nothing.
OFFLOAD_OPTIONS = {"xla_gpu_experimental_parallel_async_compute_limit": 4096}


def default_options(on_mesh: bool, offloads: bool = False) -> dict[str, str | bool | int]:
    """The options of a step on a GPU, or on the GPUs of a mesh, whose layers may keep on the host."""
    return CUDA_GRAPH_OPTIONS | (OVERLAP_OPTIONS if on_mesh else {}) | (OFFLOAD_OPTIONS if offloads else {})


def options_of_step(given: dict[str, Any] | None, on_mesh: bool, offloads: bool) -> dict[str, Any]:
    """The options that a step is compiled with: those that its caller has `given`, or the default ones."""
    if not isinstance(given, dict | None):
        raise ValueError(f"compiler_options must be a dict or None, got {given!r}; name XLA's options")
    if given is not None:
        return given
    return default_options(on_mesh, offloads) if jax.default_backend() == "gpu" else {}


ROOM_BYTES = 16 * 2**20  # 64,000 scalars


def zero_metrics(skip_above: float | None = None, diagnostics: Any = None) -> dict[str, Any]:
    """What the metrics of a step are added to; they have the same names.

    To be donated: read to the end, its buffers are shared with nothing else.

    Args:
      skip_above: the limit of the loss, if there is one; the step reads it here.
      diagnostics: `Diagnostics` of zeros, if the step is to have them.
    """
    zeros = {"loss": np.float32(0), "nonfinite_amaxes": np.int32(0), "underflowing_amaxes": np.int32(0)}
    if skip_above is not None:
        zeros |= {"skipped": np.int32(0), "skip_above": np.float32(skip_above)}
    return zeros if diagnostics is None else zeros | {"diagnostics": diagnostics}


def make_room(near: jax.Array) -> list[jax.Array]:
    """Make room for small arrays on the GPUs of an array, for as long as what is returned is kept.

    The allocator takes the smallest free piece that is large enough. Of two arrays of one size the second lies right
    behind the first, or smaller pieces were free; without the first, small arrays have a place of their own either way.
    """
    devices = [device for device in near.sharding.addressable_devices if device.platform == "gpu"]
    contents = np.zeros(ROOM_BYTES if devices else 0, np.int8)
    _room, behind = ([jax.device_put(contents, device) for device in devices] for _ in range(2))
    return behind
