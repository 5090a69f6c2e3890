"""Whether devices have room for a run, before anything is computed: each check raises a ValueError of one sentence."""

import math
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_fp8.models.config import GPTConfig
from jax_fp8.parallel.mesh import DATA, EXPERT, FSDP, PIPE, TENSOR
from jax_fp8.plan.arithmetic import memory_of
from jax_fp8.plan.gpt_plans import shape_of
from jax_fp8.plan.setting import Setting
from jax_fp8.run.settings import Settings
from jax_fp8.state.train_state import TrainState


def check_memory(settings: Settings, mesh: Mesh, model: GPTConfig) -> None:
    """Raise if a device has no room for params and optimizer state alone; a step needs more than these. Where params
    are frozen, the optimizer has less, and `check_state` counts it.
    """
    if settings.lora or settings.freeze:
        return
    axes = {axis: mesh.shape[axis] for axis in (PIPE, FSDP, TENSOR)}
    copies = mesh.shape[DATA] * mesh.shape[EXPERT]  # of all that is counted, which is without experts
    memory = memory_of(Setting(shape=shape_of(model), batch=1, sequence=model.max_seq_len, data=copies, **axes))
    moments = sum(jnp.dtype(dtype).itemsize for dtype in (settings.mu_dtype, settings.nu_dtype))
    needed, room = memory.params + memory.optimizer * moments / 8, _memory(mesh)  # `memory_of` takes float32 moments
    _check_fits(needed, room)


def check_state(state: TrainState, mesh: Mesh) -> None:
    """Raise if a device has no room for its part of a state, given as shapes with their shardings."""

    def bytes_of(leaf: jax.ShapeDtypeStruct) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    _check_fits(sum(map(bytes_of, jax.tree.leaves(state))), _memory(mesh))


def _check_fits(needed: float, room: float) -> None:
    if needed > room:
        raise ValueError(
            f"params and optimizer state must fit into {room / 2**30:.1f} GiB of a device, got "
            f"{needed / 2**30:,.1f} GiB; take a smaller model, or more devices by --mesh fsdp=8"
        )


def _memory(mesh: Mesh) -> float:
    """Bytes of a device; CPU devices share their host's memory."""
    devices = mesh.local_devices
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
