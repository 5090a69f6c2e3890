"""Several processes of one run, on one host or on many: jax starts them together, and every device sees one mesh.

Each process runs the whole script, on its own part of every batch. What is written and printed is the first one's.
"""

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from settings import Settings

TOLD = 2**14  # bytes that one process can tell the others
CANNOT = bytes(32)  # the fingerprint of a process that cannot run


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
