"""The mesh a run is spread over: `--mesh data=2,fsdp=1,tensor=2` → devices, and what each process gives them to read.

    data     splits the batch
    fsdp     splits the batch, and params with their optimizer state
    tensor   splits the layers
    pipe     has some of the layers on each of its devices

Every complaint is a ValueError of one sentence: what must hold, what arrived, what to do. All of them come before
anything is compiled.
"""

import math
import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from settings import Settings

import jax_fp8 as fp8
from jax_fp8.gpt_plans import shape_of
from jax_fp8.tools.arithmetic import Setting, memory_of

AXES = ("pipe", "data", "fsdp", "tensor")  # the last ones are neighbours: devices of one host, if its axis fits there
BATCH_AXES = ("data", "fsdp")


def parse_axes(text: str) -> dict[str, int]:
    """`data=2,tensor=4` → devices along every axis; 1 where none is named."""
    sizes = {}
    for part in text.split(","):
        axis, _, number = part.strip().partition("=")
        if axis not in AXES:
            raise ValueError(f"--mesh may have the axes {', '.join(AXES)}, got {axis!r} in {text!r}; leave it out")
        if axis in sizes:
            raise ValueError(f"--mesh must name an axis once, got {axis} twice in {text!r}; leave one out")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--mesh must give {axis} a size of at least 1, got {text!r}; write {axis}=1")
        sizes[axis] = int(number)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def check_settings(sizes: dict[str, int], settings: Settings) -> None:
    """Raise unless every device gets an equal part of a microbatch, and options have the axes they are about."""
    parts, tensor = sizes["data"] * sizes["fsdp"], sizes["tensor"]
    sequences = settings.batch_size // settings.microbatches
    if sequences % parts:
        raise ValueError(
            f"--mesh {settings.mesh} has data x fsdp = {parts}, which must divide the {sequences} sequences of a "
            "microbatch; change --batch-size"
        )
    if sequences // parts * settings.seq_len % 16:
        raise ValueError(
            f"each device must have a multiple of 16 tokens of a microbatch, got {sequences // parts} x "
            f"{settings.seq_len} with --mesh {settings.mesh}; change --seq-len"
        )
    if settings.sequence_parallel and tensor == 1:
        raise ValueError(
            f"--sequence-parallel splits what is between layers over tensor, got --mesh {settings.mesh}; add tensor=2"
        )
    if settings.sequence_parallel and settings.recipe == "block":
        raise ValueError(
            "--sequence-parallel gathers activations in FP8, and needs one scale a tensor, got --recipe block; leave "
            "it out, or choose --recipe delayed or --recipe current"
        )
    if settings.sequence_parallel and settings.seq_len % tensor:
        raise ValueError(
            f"--sequence-parallel with tensor={tensor} must divide a sequence, got --seq-len {settings.seq_len}; "
            "change one of them"
        )
    if settings.gradient_dtype != "float32" and parts * sizes["pipe"] == 1:
        raise ValueError(
            f"--gradient-dtype is that of sums over data, fsdp and pipe, got --mesh {settings.mesh}; add one of them"
        )
    check_stages(sizes["pipe"], settings)


def check_stages(stages: int, settings: Settings) -> None:
    """Raise unless a schedule runs: as many layers on each stage of a pipeline, and enough microbatches."""
    if stages == 1:
        if settings.schedule or settings.chunks:
            flag = "--schedule" if settings.schedule else "--chunks"
            raise ValueError(f"{flag} is about the axis pipe, got --mesh {settings.mesh}; add pipe=2, or leave it out")
        return
    if settings.remat.startswith("offload"):
        raise ValueError(
            f"the layers of a pipeline keep on their device, got --remat {settings.remat} and --mesh {settings.mesh}; "
            "take another remat, or leave out pipe"
        )
    if settings.dropout:
        raise ValueError(
            f"the layers of a pipeline do not drop, got --dropout {settings.dropout} and --mesh {settings.mesh}; "
            "leave out --dropout, or pipe"
        )
    if settings.fp8_attention:
        raise ValueError(
            f"the layers of a pipeline attend in bfloat16, got --fp8-attention and --mesh {settings.mesh}; "
            "leave out --fp8-attention, or pipe"
        )
    interleaved = settings.schedule == "interleaved"
    if settings.chunks and not interleaved:
        raise ValueError(f"--chunks is about --schedule interleaved, got {settings.schedule or '1f1b'}; leave it out")
    if settings.chunks == 1:
        raise ValueError("--schedule interleaved needs several chunks, got --chunks 1; say 2, or take 1f1b")
    if settings.microbatches < stages:
        raise ValueError(
            f"pipe={stages} needs at least {stages} microbatches, got --microbatches {settings.microbatches}; "
            "change one of them"
        )
    if interleaved and settings.microbatches % stages:
        raise ValueError(
            f"--schedule interleaved needs a multiple of pipe={stages} microbatches, got --microbatches "
            f"{settings.microbatches}; change one of them"
        )
    chunks = (settings.chunks or 2) if interleaved else 1
    if settings.num_layers % (stages * chunks):
        in_chunks = f" with {chunks} chunks each" if chunks > 1 else ""
        raise ValueError(
            f"each device of pipe={stages}{in_chunks} must have as many layers, got --num-layers "
            f"{settings.num_layers}; make it a multiple of {stages * chunks}"
        )


def check_model(sizes: dict[str, int], model: fp8.GPTConfig, fp8_head: bool) -> None:
    """Raise unless `tensor` splits a model into parts that FP8 GEMMs can multiply."""
    tensor, heads = sizes["tensor"], model.num_heads
    if tensor == 1:
        return
    kv_heads = model.kv_heads
    if heads % tensor:
        raise ValueError(f"tensor={tensor} must divide the {heads} attention heads; change --num-heads or --mesh")
    if kv_heads % tensor and tensor % kv_heads:
        raise ValueError(
            f"tensor={tensor} must divide the {kv_heads} key and value heads, or be a multiple of them; change --mesh"
        )
    widths = {
        "--hidden-size": model.hidden_size,
        "the width of queries": model.features_of_head * heads,
        "the width of the MLP": model.mlp_hidden_size or 4 * model.hidden_size,
    }
    if kv_heads % tensor == 0:  # with fewer of them, each device has all
        widths["the width of keys and values"] = model.features_of_head * kv_heads
    for name, width in widths.items():
        if width % (16 * tensor):
            raise ValueError(
                f"{name} must be a multiple of 16 on each of tensor={tensor} devices, got {width} in all; "
                "change --hidden-size or --mesh"
            )
    multiple = 16 * tensor if fp8_head else tensor
    if model.vocab_size % multiple:
        raise ValueError(
            f"the vocabulary must be a multiple of {multiple} with tensor={tensor}, got {model.vocab_size} tokens; "
            "change --mesh"
        )


def check_tiles(sizes: dict[str, int], settings: Settings, model: fp8.GPTConfig) -> None:
    """Raise unless each device has whole tiles of kernels by block scaling: validation casts them where they lie."""
    tensor = sizes["tensor"]
    parts = sizes["pipe"] * sizes["fsdp"] * tensor
    if settings.recipe != "block" or parts == 1:
        return
    widths = {
        "--hidden-size": (model.hidden_size, parts),
        "the width of the MLP": (model.mlp_hidden_size or 4 * model.hidden_size, parts),
        "the width of queries": (model.features_of_head * model.num_heads, parts),
        "the width of keys and values": (model.features_of_head * model.kv_heads, tensor),
    }
    for name, (width, devices) in widths.items():
        if width % (128 * devices):
            raise ValueError(
                f"--recipe block needs whole tiles of 128 x 128 on each device, and {name} a multiple of "
                f"{128 * devices} with --mesh {settings.mesh}, got {width}; change one of them"
            )


def check_memory(mesh: Mesh, model: fp8.GPTConfig) -> None:
    """Raise where not even params and optimizer state have room, whatever else a step needs."""
    axes = {axis: mesh.shape[axis] for axis in AXES}
    found = memory_of(Setting(shape=shape_of(model), batch=1, sequence=model.max_seq_len, **axes))
    needed, room = found.params + found.optimizer, _memory(mesh)
    if needed > room:
        raise ValueError(
            f"params and optimizer state must fit into {room / 2**30:.1f} GiB of a device, got "
            f"{needed / 2**30:,.1f} GiB; take a smaller model, or more devices by --mesh fsdp=8"
        )


def _memory(mesh) -> float:
    """Bytes of a device; CPU devices share those of their host."""
    devices = mesh.local_devices
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """A mesh of the first devices; with several processes, of all."""
    count, devices = math.prod(sizes.values()), jax.devices()
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
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
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count])


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
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, BATCH_AXES))
