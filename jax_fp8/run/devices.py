"""The devices of a run: its mesh, and the processes that share it, on one host or on many.

Each process runs the whole program, on its own part of every batch. The first one writes and prints.
"""

import hashlib
import math

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fp8.parallel.mesh import AXES, DATA, FSDP, parse_axes
from jax_fp8.run.settings import Settings

TOLD = 2**14  # bytes that one process can tell the others
CANNOT = bytes(32)  # the fingerprint of a process that cannot run


# ---- the mesh --------------------------------------------------------------------------------------------------------


def make_mesh(text: str) -> Mesh:
    """`data=2,tensor=4` → a mesh with all AXES, of the first devices; with several processes, of all devices."""
    sizes, devices = parse_axes(text), jax.devices()
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"--mesh {text} must not exceed the {len(devices)} {devices[0].platform} device(s) jax sees; "
            "make it smaller"
        )
    if jax.process_count() > 1 and count < len(devices):
        raise ValueError(
            f"--mesh must have all {len(devices)} devices of the {jax.process_count()} processes, got {text}; "
            f"say data={len(devices)}, or split them over the axes"
        )
    # Auto: validation and sample are plain jitted functions, which the compiler splits as params and batch are.
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count])


def own_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that devices of this process have."""  # (rows,)
    of_devices = _by_sequence(mesh, 0).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in of_devices]))


def on_mesh(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """A batch (rows, seq), or several (count, rows, seq), on the mesh: of each, this process has its own rows.

    On one device as an array of no mesh, as params are: a step of another kind of batch would be compiled once more.
    """
    if mesh.size == 1:
        return jax.device_put(rows, mesh.devices.item())
    return jax.make_array_from_process_local_data(_by_sequence(mesh, rows.ndim - 2), rows)


def _by_sequence(mesh, dim) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, (DATA, FSDP)))


# ---- processes -------------------------------------------------------------------------------------------------------


def start(settings: Settings) -> None:
    """Find the other processes, before jax looks for devices. A run of one process finds nobody."""
    if settings.distributed:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                "--distributed needs Slurm, Open MPI or Kubernetes to say which processes there are, but jax found "
                f"nothing ({error}); give --coordinator, --num-processes and --process-id"
            ) from error
    elif settings.coordinator:
        jax.distributed.initialize(settings.coordinator, settings.num_processes, settings.process_id)


def is_first() -> bool:
    """Whether this process writes and prints; nobody is asked where there is only one."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def all_end(step: int) -> bool:
    """Whether all processes are to end after this step: jax agrees on one as soon as any of them gets a SIGTERM."""
    return multihost_utils.reached_preemption_sync_point(step)


def fingerprint(*parts: bytes) -> bytes:
    """32 bytes that are others where a part is."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def agree(own: bytes = CANNOT) -> None:
    """Wait for all processes, and raise unless they are about to do the same: one that trains on another text, or that
    ends here, would leave the others to a wrong loss, or waiting.

    Args:
      own: the `fingerprint` of what this process is about to do; without it, it cannot run, and has said why.
    """
    if not jax.distributed.is_initialized():
        return
    everyone = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))  # (processes, 32)
    if own == CANNOT:
        return
    others = [number for number, theirs in enumerate(everyone) if theirs.tobytes() != own]
    cannot = [number for number in others if everyone[number].tobytes() == CANNOT]
    if cannot:
        raise ValueError(f"all processes must be able to run, but process {cannot[0]} is not, and says why; mend that")
    if others:
        raise ValueError(
            "all processes must have the same options and the same text, "
            f"but those of process {others[0]} differ; give all of them the same --data"
        )


def tell_all(text: str) -> str:
    """What the first process says, in all of them."""
    if not jax.distributed.is_initialized():
        return text
    room = np.zeros(TOLD, np.uint8)
    said = np.frombuffer(text.encode(), np.uint8)
    room[: len(said)] = said
    return bytes(multihost_utils.broadcast_one_to_all(room)).rstrip(b"\0").decode()
