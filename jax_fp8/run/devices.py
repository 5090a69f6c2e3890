"""The devices of a run: its mesh, and the processes that share it, on one host or on many.

Each process runs the whole program on its own rows of every batch. Only the first process writes files and prints.
"""

import hashlib
import math

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_fp8.core.types import Batch
from jax_fp8.parallel.mesh import AXES, BATCH_AXES, parse_axes
from jax_fp8.run.batches import HostBatch
from jax_fp8.run.settings import Settings

MESSAGE_BYTES = 2**14  # of the message that the first process can broadcast
CANNOT = bytes(32)  # the fingerprint of a process that cannot run


# ---- the mesh --------------------------------------------------------------------------------------------------------


def make_mesh(text: str) -> Mesh:
    """`data=2,tensor=4` → a mesh with all AXES, of the first devices. Several processes must use all their devices."""
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
    # Auto: validation and sample are plain jitted functions, which XLA partitions by the shardings of params and batch.
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count])


def own_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """The rows of a batch that the devices of this process have."""  # (rows,)
    indices = _by_sequence(mesh, 0).addressable_devices_indices_map((batch_size,)).values()
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices]))


def on_mesh(mesh: Mesh, batch: HostBatch) -> Batch:
    """A batch (rows, seq), or several (count, rows, seq), as arrays of the whole mesh; the rows are those of this
    process.

    On one device the array has no mesh, and neither do the params: with another kind of sharding, jax would compile the
    step once more.
    """
    if mesh.size == 1:
        return jax.device_put(batch, mesh.devices.item())
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(_by_sequence(mesh, rows.ndim - 2), rows), batch
    )


def _by_sequence(mesh: Mesh, dim: int) -> NamedSharding:
    """Splits this dim, that of the sequences, over the axes that split a batch."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, BATCH_AXES))


# ---- processes -------------------------------------------------------------------------------------------------------


def start(settings: Settings) -> None:
    """Connect to the other processes, which must happen before jax looks for devices. A single process does nothing."""
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
    """Whether this process writes and prints. It does not ask jax for devices unless there are several processes."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def all_end(step: int) -> bool:
    """Whether all processes must end after this step: jax chooses one step for all as soon as one of them gets a
    SIGTERM.
    """
    return multihost_utils.reached_preemption_sync_point(step)


def fingerprint(*parts: bytes) -> bytes:
    """32 bytes that differ if any part differs."""
    return joined(*(hashlib.sha256(part).digest() for part in parts))


def joined(*digests: bytes) -> bytes:
    """32 bytes that differ if any of these SHA-256 digests differs."""
    return hashlib.sha256(b"".join(digests)).digest()


def agree(own: bytes = CANNOT) -> None:
    """Wait for all processes, and raise unless they have the same fingerprint. A process that trained on another text
    would make the loss of all wrong, and the others would wait for one that has ended.

    Args:
      own: the `fingerprint` of this process's options and text; `CANNOT` if it cannot run and has said why.
    """
    if not jax.distributed.is_initialized():
        return
    everyone = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))  # (processes, 32)
    if own == CANNOT:
        return
    others = [number for number, theirs in enumerate(everyone) if theirs.tobytes() != own]
    cannot = [number for number in others if everyone[number].tobytes() == CANNOT]
    if cannot:
        raise ValueError(
            f"all processes must be able to run, but process {cannot[0]} is not; it prints the reason, fix that"
        )
    if others:
        raise ValueError(
            "all processes must have the same options and the same text, "
            f"but those of process {others[0]} differ; give all of them the same --data"
        )


def tell_all(text: str) -> str:
    """Broadcast the text of the first process to all; `text` of the others is ignored."""
    if not jax.distributed.is_initialized():
        return text
    message = np.zeros(MESSAGE_BYTES, np.uint8)  # all processes must pass arrays of one shape
    content = np.frombuffer(text.encode(), np.uint8)
    message[: len(content)] = content
    return bytes(multihost_utils.broadcast_one_to_all(message)).rstrip(b"\0").decode()
