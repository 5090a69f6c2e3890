"""The collectives that a traced function writes itself, inside a `jax.shard_map`.

    jaxpr ─written→ WrittenCollective, one for each array and place ─merged→ equal ones as one ─table→ rows

The compiler adds collectives for arrays that it splits itself. These are in no jaxpr; `capture_report` finds them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jax_fp8.inspect.collectives import ring_bytes
from jax_fp8.jaxprs.collectives import COLLECTIVES, axes_of
from jax_fp8.jaxprs.equations import inner_jaxprs, turns

# The functions of jax.lax and their names in HLO.
_IN_HLO = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


@dataclass(frozen=True)
class WrittenCollective:
    """One array that a function sends to other devices.

    Args:
      name: of the function in `jax.lax`: "psum", "all_gather", "psum_scatter", "all_to_all", "ppermute", ...
      dtype, shape: of the result of an all_gather; of a ragged_all_to_all the smaller of operand and result; of the
        operand of any other.
      axes: the mesh axes over which it sends.
      devices: how many exchange data in one group.
      count: how often a call executes it.
      bytes_each: how much a device sends each time, on a ring.
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


def shaped(atom: Var | Literal) -> ShapedArray:
    """The shape and dtype of an operand or a result."""
    assert isinstance(atom.aval, ShapedArray), "an array"
    return atom.aval


def written(jaxpr: Jaxpr, sizes: Mapping[str, int] | None = None, count: int = 1) -> Iterator[WrittenCollective]:
    """The collectives of a jaxpr as it would run on CUDA, in program order. All branches of a conditional count, and a
    loop of unknown length counts as one turn.

    Args:
      jaxpr: of a function.
      sizes: of the mesh axes around it; None takes those of the mesh in the caller's context.
      count: how often a call executes it.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape) if sizes is None else sizes
    for equation in jaxpr.eqns:
        if equation.primitive.name in COLLECTIVES:
            yield from _collectives(equation, sizes, count)
            continue
        is_sharded = equation.primitive.name == "shard_map"
        inside = {**sizes, **equation.params["mesh"].shape} if is_sharded else sizes
        for inner in inner_jaxprs(equation, "cuda"):
            yield from written(inner, inside, count * turns(equation, unknown=1))


def _collectives(equation: JaxprEqn, sizes: Mapping[str, int], count: int) -> Iterator[WrittenCollective]:
    """One for each array that an equation sends over the mesh. A sum over an axis of `jax.vmap` sends nothing."""
    params = equation.params
    name = COLLECTIVES[equation.primitive.name]
    kind, axes = _IN_HLO[name], tuple(axis for axis in axes_of(equation) if axis in sizes)
    if not axes:
        return
    groups = params.get("axis_index_groups")
    devices = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    if all(source == target for source, target in params.get("perm", [(0, 1)])):
        devices = 1  # each device sends to itself: nothing goes over the wire
    arrays = equation.outvars if kind == "all-gather" else equation.invars
    if kind == "ragged-all-to-all":  # counted as in inspect/collectives.py
        arrays = [min(arrays[:2], key=lambda array: math.prod(shaped(array).shape))]
    for array in arrays:
        aval = shaped(array)
        bytes_each = ring_bytes(kind, math.prod(aval.shape) * aval.dtype.itemsize, devices)
        yield WrittenCollective(name, aval.dtype.name, aval.shape, axes, devices, count, bytes_each)


def merged(collectives: Iterable[WrittenCollective]) -> list[WrittenCollective]:
    """The collectives, with equal ones as one, whose count is their sum."""
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
