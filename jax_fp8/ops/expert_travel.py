"""Rows of a mixture of experts travel: each to the device that has its expert, and what the expert makes of it back.

    device of a token: rows sorted by expert ─send_rows→ device of an expert: groups of rows, one an expert
                                             ←return_rows─

A mesh axis `expert` splits experts and tokens: with n devices each has experts / n of them, and its own tokens. Every
device knows how many rows each device sends to each expert, from one small all-gather. So each knows where its rows lie
in the groups of the others: behind those of the devices before it. A group then has its rows in the order of one device
that has all tokens, and the same zeros behind them.

Every row comes: none is dropped, whatever the router does. So groups have room for as many rows as all
devices can send to one, `most_rows`. Only rows that are there are sent.

On GPUs this is one `lax.ragged_all_to_all`. Elsewhere jax has none: rows of all devices are gathered, and each device
takes those that are sent to it. `send_rows` and `return_rows` are each other's gradient.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.shards import ExpertParallel
from jax_fp8.kernels.grouped_gemm import GROUP_ROWS

# XLA's kernel for up to eight GPUs of one process has one small block for each slice that a device sends to another.
# So it needs as many slices to use the links. Elsewhere each slice is a message, and more of them cost time.
SLICES_OF_A_DEVICE, MOST_DEVICES_OF_KERNEL = 512, 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slices:
    """Slices of rows that a device sends, each to one device: those for device 0, then those for device 1, ...

    Args:
      starts: i32[slices], the first row of each slice among the rows that are sent.
      sizes: i32[slices], its rows.
      targets: i32[slices], the row where the slice begins among those of the device that gets it.
      arriving: i32[slices], the sizes of the slices that come to this device: those of device 0, then of 1, ...
    """

    starts: jax.Array
    sizes: jax.Array
    targets: jax.Array
    arriving: jax.Array

    def in_pieces(self, count: int) -> "Slices":
        """The same rows, each slice in so many pieces, which may be empty."""

        def ends(sizes: jax.Array) -> jax.Array:  # slices, pieces and one more
            pieces, each, more = jnp.arange(count + 1, dtype=jnp.int32), sizes[:, None] // count, sizes[:, None] % count
            return each * pieces + jnp.minimum(pieces, more)

        before = ends(self.sizes)[:, :-1]
        starts, targets = self.starts[:, None] + before, self.targets[:, None] + before
        sizes, arriving = jnp.diff(ends(self.sizes)), jnp.diff(ends(self.arriving))
        return Slices(*(x.reshape(-1) for x in (starts, sizes, targets, arriving)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Travel:
    """How the rows of a mixture travel; `there` to the experts and `back`.

    Args:
      own_rows, group_rows: the rows of this device's tokens, and of its experts, with their padding; static.
    """

    there: Slices
    back: Slices
    axis: str = field(metadata={"static": True})
    own_rows: int = field(metadata={"static": True})
    group_rows: int = field(metadata={"static": True})


def most_rows(tokens: int, choices: int, own_experts: int, devices: int) -> int:
    """The most rows that come to a device, if every device has so many tokens. The choices of a token differ."""
    return devices * tokens * min(choices, own_experts)


def plan_travel(counts: jax.Array, own_rows: int, group_rows: int, experts: ExpertParallel) -> tuple[Travel, jax.Array]:
    """How rows travel that are sorted by expert, without gaps between experts.

    Args:
      counts: i32[experts of all devices], the rows of each.
      own_rows, group_rows: as in `Travel`.

    Returns:
      The travel, and i32[own experts + 1], the first row of each group, and where the last one ends.
    """
    own = lax.axis_index(experts.axis)
    sent = lax.all_gather(counts, experts.axis).reshape(experts.size, experts.size, -1)  # from, to, expert there
    filled = (jnp.sum(sent, axis=0) + GROUP_ROWS - 1) // GROUP_ROWS * GROUP_ROWS  # to, expert there
    ends = jnp.cumsum(filled, axis=1)
    of_groups = jnp.pad(ends, ((0, 0), (1, 0)))  # to, expert there: the first row of a group
    targets = of_groups[None, :, :-1] + _before(sent, axis=0)  # from, to, expert there
    sources = _before(sent.reshape(experts.size, -1), axis=1).reshape(sent.shape)
    there = Slices(*(x.reshape(-1) for x in (sources[own], sent[own], targets[own], sent[:, own])))
    back = Slices(*(x.reshape(-1) for x in (targets[:, own], sent[:, own], sources[:, own], sent[own])))
    return Travel(there, back, experts.axis, own_rows, group_rows), of_groups[own]


def _before(counts: jax.Array, axis: int) -> jax.Array:
    """The sum of what comes before along an axis."""
    return jnp.cumsum(counts, axis=axis) - counts


@jax.custom_vjp
def send_rows(rows: jax.Array, travel: Travel) -> jax.Array:
    """Each row to its expert: (own_rows, features) → (group_rows, features) in groups, with zeros between them."""
    return _exchange(rows, travel.there, travel.axis, travel.group_rows)


@jax.custom_vjp
def return_rows(rows: jax.Array, travel: Travel) -> jax.Array:
    """Each row of a group to the device of its token: (group_rows, features) → (own_rows, features)."""
    return _exchange(rows, travel.back, travel.axis, travel.own_rows)


send_rows.defvjp(
    lambda rows, travel: (send_rows(rows, travel), travel), lambda travel, drows: (return_rows(drows, travel), None)
)
return_rows.defvjp(
    lambda rows, travel: (return_rows(rows, travel), travel), lambda travel, drows: (send_rows(drows, travel), None)
)


def _exchange(rows: jax.Array, slices: Slices, axis: str, arriving: int) -> jax.Array:
    """The rows (arriving, ...) that come to this device; zeros where none comes."""
    return lax.platform_dependent(
        rows, slices, cuda=partial(_ragged, axis, arriving), default=partial(_from_all, axis, arriving)
    )


def _ragged(axis: str, arriving: int, rows: jax.Array, slices: Slices) -> jax.Array:
    rows, nothing = _with_zeros(rows, arriving)
    devices = lax.axis_size(axis)
    if jax.process_count() == 1 and devices <= MOST_DEVICES_OF_KERNEL:
        slices = slices.in_pieces(math.ceil(SLICES_OF_A_DEVICE * devices / slices.sizes.size))
    return lax.ragged_all_to_all(
        rows, nothing, slices.starts, slices.sizes, slices.targets, slices.arriving, axis_name=axis
    )


def _with_zeros(rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The rows, and so many of zeros, which are made once the rows are there. Otherwise XLA makes those of all layers
    at once, in one kernel, and they wait in memory.
    """
    zero, rows = lax.optimization_barrier((jnp.zeros((), rows.dtype), rows))
    return rows, jnp.broadcast_to(zero, (count, *rows.shape[1:]))


def _from_all(axis: str, arriving: int, rows: jax.Array, slices: Slices) -> jax.Array:
    everything = lax.all_gather(rows, axis)  # (devices, rows, ...)
    devices, count = everything.shape[:2]
    own = lax.axis_index(axis)

    def to_here(x: jax.Array) -> jax.Array:
        """Of each slice that comes to this device: from, slice."""
        return lax.all_gather(x.reshape(devices, -1)[:, None], axis)[:, own, 0]

    starts, sizes, targets = map(to_here, (slices.starts, slices.sizes, slices.targets))
    starts += jnp.arange(devices, dtype=starts.dtype)[:, None] * count
    row = jnp.arange(arriving, dtype=jnp.int32)[:, None]
    number = row - targets.reshape(-1)[None]
    is_in = (number >= 0) & (number < sizes.reshape(-1)[None])
    source = jnp.sum(jnp.where(is_in, starts.reshape(-1)[None] + number, 0), axis=1)
    source = jnp.where(jnp.any(is_in, axis=1), source, devices * count)
    return everything.reshape(-1, *rows.shape[1:]).at[source].get(mode="fill", fill_value=0)
