"""What was traced, read back: what an equation holds, and what the shards of a `jax.shard_map` send to each other.

    jaxpr ─written→ WrittenCollective, one for each array and place ─merged→ equal ones as one ─table→ rows

Here stands what was written. What the compiler adds for arrays that it splits itself is in no jaxpr.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_fp8.tools.collectives import ring_bytes

# Primitive: its name in jax.lax, and in HLO. Those that only cast between varying and invariant send nothing.
_COLLECTIVES = {
    "psum": ("psum", "all-reduce"),
    "psum_invariant": ("psum", "all-reduce"),
    "unreduced_psum": ("psum", "all-reduce"),
    "pmax": ("pmax", "all-reduce"),
    "unreduced_pmax": ("pmax", "all-reduce"),
    "pmin": ("pmin", "all-reduce"),
    "unreduced_pmin": ("pmin", "all-reduce"),
    "all_gather": ("all_gather", "all-gather"),
    "all_gather_invariant": ("all_gather", "all-gather"),
    "all_gather_reduced": ("all_gather", "all-gather"),
    "reduce_scatter": ("psum_scatter", "reduce-scatter"),
    "unreduced_reduce_scatter": ("psum_scatter", "reduce-scatter"),
    "all_to_all": ("all_to_all", "all-to-all"),
    "ragged_all_to_all": ("ragged_all_to_all", "ragged-all-to-all"),
    "ppermute": ("ppermute", "collective-permute"),
    "pbroadcast": ("pbroadcast", "collective-broadcast"),
}


@dataclass(frozen=True)
class WrittenCollective:
    """One array that a function sends to other devices, as it is written.

    Args:
      name: of the function in `jax.lax`: "psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", ...
      dtype, shape: of what an all_gather makes; of the operand of any other.
      axes: of the mesh, over which it goes.
      devices: that take part in one group.
      count: how often a call executes it.
      bytes_each: that a device sends each time, on a ring.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    devices: int
    count: int
    bytes_each: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one call."""
        return self.count * self.bytes_each


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs that an equation holds; of what depends on the platform, the one for CUDA."""
    params = equation.params
    if params.get("branches_platforms") is not None:  # made by lax.platform_dependent
        platforms = params["branches_platforms"]
        cuda = next((i for i, names in enumerate(platforms) if names and "cuda" in names), len(platforms) - 1)
        return [_open(params["branches"][cuda])]
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [_open(value) for value in values if hasattr(_open(value), "eqns")]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def times(equation: Any) -> int:
    """How often an equation executes what it holds; a loop of unknown length once."""
    return equation.params["length"] if equation.primitive.name == "scan" else 1


def written(jaxpr: Any, sizes: Mapping[str, int] | None = None, count: int = 1) -> Iterator[WrittenCollective]:
    """The collectives of a jaxpr, in program order; those of a conditional in all its branches.

    Args:
      jaxpr: of a function.
      sizes: of the axes of the mesh around it.
      count: how often a call executes it.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape) if sizes is None else sizes
    for equation in jaxpr.eqns:
        if equation.primitive.name in _COLLECTIVES:
            yield from _collectives(equation, sizes, count)
            continue
        is_sharded = equation.primitive.name == "shard_map"
        inside = {**sizes, **equation.params["mesh"].shape} if is_sharded else sizes
        for inner in inner_jaxprs(equation):
            yield from written(inner, inside, count * times(equation))


def _collectives(equation: Any, sizes: Mapping[str, int], count: int) -> Iterator[WrittenCollective]:
    """One for each array that goes over a mesh; what is summed over a mapped axis stays on the device."""
    params = equation.params
    name, kind = _COLLECTIVES[equation.primitive.name]
    named = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if axis in sizes)
    if not axes:
        return
    groups = params.get("axis_index_groups")
    devices = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if all(source == target for source, target in params.get("perm", [(0, 1)])):
        devices = 1  # each keeps its own
    arrays = equation.outvars if kind == "all-gather" else equation.invars
    for aval in (array.aval for array in arrays[: 1 if kind == "ragged-all-to-all" else None]):
        bytes_each = ring_bytes(kind, math.prod(aval.shape) * aval.dtype.itemsize, devices)
        yield WrittenCollective(name, aval.dtype.name, aval.shape, axes, devices, count, bytes_each)


def merged(collectives: Iterable[WrittenCollective]) -> list[WrittenCollective]:
    """Those that differ in nothing, as one; their counts are added."""
    counts: dict[WrittenCollective, int] = {}
    for collective in collectives:
        same = replace(collective, count=0)
        counts[same] = counts.get(same, 0) + collective.count
    return [replace(same, count=count) for same, count in counts.items()]


def table(collectives: Iterable[WrittenCollective]) -> list[str]:
    """The rows of a printed explanation; none without collectives."""
    kinds = merged(collectives)
    if not kinds:
        return []
    rows = [("", "array", "dtype", "axes", "devices", "MiB sent")]
    for kind in kinds:
        shape = f"({', '.join(map(str, kind.shape))})"
        sent = f"{kind.wire_bytes / 2**20:.2f}"
        rows.append((f"x{kind.count} {kind.name}", shape, kind.dtype, ", ".join(kind.axes), str(kind.devices), sent))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    total = sum(kind.wire_bytes for kind in kinds) / 2**20
    return [
        f"over the wire, a device sends {total:.2f} MiB a call:",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]
