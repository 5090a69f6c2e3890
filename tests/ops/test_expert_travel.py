"""Rows travel to the devices of their experts and back: by the reference, by what a ragged all-to-all is told, and as
gradients.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax.sharding import PartitionSpec as P

from jax_fp8.core.formats import E4M3
from jax_fp8.core.shards import ExpertParallel
from jax_fp8.kernels.grouped_gemm import GROUP_ROWS
from jax_fp8.ops.expert_rows import rows_needed
from jax_fp8.ops.expert_travel import Slices, most_rows, plan_travel, return_rows, send_rows

pytestmark = pytest.mark.versions

FEATURES, TOKENS, CHOICES = 3, 40, 2
OWN_ROWS = TOKENS * CHOICES
EVERY = P("expert")
# Of four devices: rows to each of eight experts, at most 80 of a device.
COUNTS = {
    "even": np.full((4, 8), 10),
    "uneven": np.random.default_rng(0).multinomial(OWN_ROWS, np.arange(8) / 28, 4),
    "some padding": np.random.default_rng(1).multinomial(OWN_ROWS - 13, np.ones(8) / 8, 4),
    "one device": np.array([[40, 40, 0, 0, 0, 0, 0, 0]] * 4),
    "one sends": np.array([[0] * 8] * 3 + [[0, 0, 0, 0, 40, 0, 0, 40]]),
    "nothing": np.zeros((4, 8), int),
}


def room(devices, experts=8):
    own = experts // devices
    return rows_needed(most_rows(TOKENS, CHOICES, own, devices), own)


def rows_of(counts, dtype=jnp.float32):
    """(devices, OWN_ROWS, FEATURES) of numbers that no two rows share; zeros are no rows."""
    devices = len(counts)
    numbers = np.arange(1, devices * OWN_ROWS + 1).reshape(devices, OWN_ROWS, 1) + np.arange(FEATURES) / 4
    return jnp.asarray(numbers * (np.arange(OWN_ROWS)[None, :, None] < counts.sum(1)[:, None, None]), dtype)


def on_each(function, counts, *arrays, change=lambda travel: travel):
    """`function(travel, starts, *arrays)` on each device, whose arrays and results are stacked."""
    devices = len(counts)

    def local(counts, *arrays):
        split = ExpertParallel("expert", devices)
        travel, starts = plan_travel(counts[0], OWN_ROWS, room(devices), split)
        return jax.tree.map(lambda x: x[None], function(change(travel), starts, *(x[0] for x in arrays)))

    given = jnp.asarray(counts, jnp.int32), *arrays
    return on_devices(local, *given, in_specs=EVERY, out_specs=EVERY, expert=devices)


def groups_of(counts, rows):
    """What comes to each device, in NumPy: for each of its experts the rows of device 0, of device 1, ..."""
    devices, experts = counts.shape
    own = experts // devices
    firsts = np.cumsum(counts, axis=1) - counts
    found, starts = np.zeros((devices, room(devices), rows.shape[-1]), np.float32), []
    for device in range(devices):
        at = [0]
        for expert in range(device * own, (device + 1) * own):
            parts = [rows[i, firsts[i, expert] : firsts[i, expert] + counts[i, expert]] for i in range(devices)]
            group = np.concatenate(parts)
            found[device, at[-1] : at[-1] + len(group)] = group
            at.append(at[-1] + -(-len(group) // GROUP_ROWS) * GROUP_ROWS)
        starts.append(at)
    return found, np.array(starts)


def sent(counts, rows, change=lambda travel: travel):
    return on_each(lambda travel, starts, own: (send_rows(own, travel), starts), counts, rows, change=change)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, E4M3], ids=["float32", "bfloat16", "E4M3"])
@pytest.mark.parametrize("name", COUNTS)
def test_rows_come_in_groups_in_the_order_of_devices_and_return(name, dtype):
    counts, rows = COUNTS[name], rows_of(COUNTS[name], dtype)
    groups, starts = sent(counts, rows)
    wanted, wanted_starts = groups_of(counts, np.asarray(rows, np.float32))
    assert groups.dtype == dtype
    np.testing.assert_array_equal(np.asarray(groups, np.float32), wanted)
    np.testing.assert_array_equal(starts, wanted_starts)
    back = on_each(lambda travel, _, groups: return_rows(groups, travel), counts, groups)
    np.testing.assert_array_equal(np.asarray(back, np.float32), np.asarray(rows, np.float32))


def exchange_in_numpy(rows, slices: Slices, arriving):
    """What the documentation of `lax.ragged_all_to_all` says that it does, on all devices."""
    devices = len(rows)
    found = np.zeros((devices, arriving, rows.shape[-1]), rows.dtype)
    starts, sizes, targets, expected = (np.asarray(x).reshape(devices, devices, -1) for x in vars(slices).values())
    np.testing.assert_array_equal(sizes, expected.swapaxes(0, 1))  # what one sends the other expects
    for source in range(devices):
        for device in range(devices):
            for start, size, target in zip(*(x[source, device] for x in (starts, sizes, targets)), strict=True):
                assert not found[device, target : target + size].any()  # no two slices lie in one place
                found[device, target : target + size] = rows[source, start : start + size]
    return found


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("name", COUNTS)
def test_a_ragged_exchange_would_do_the_same(name, pieces):
    counts, rows = COUNTS[name], np.asarray(rows_of(COUNTS[name]))
    there, back = on_each(lambda travel, _: (travel.there.in_pieces(pieces), travel.back.in_pieces(pieces)), counts)
    assert there.sizes.shape == (4, 8 * pieces) and there.sizes.max() <= -(-counts.max() // pieces)
    groups = exchange_in_numpy(rows, there, room(4))
    np.testing.assert_array_equal(groups, groups_of(counts, rows)[0])
    np.testing.assert_array_equal(exchange_in_numpy(groups, back, OWN_ROWS), rows)


def test_planted_mistakes_are_noticed():
    counts, rows = COUNTS["uneven"], rows_of(COUNTS["uneven"])
    wanted, _ = groups_of(counts, np.asarray(rows))
    changes = {
        "lost": lambda there: replace(there, sizes=there.sizes.at[3].add(-1)),
        "swapped": lambda there: replace(there, starts=there.starts.at[2].set(there.starts[3])),
        "shifted": lambda there: replace(there, targets=there.targets + 1),
    }
    for name, change in changes.items():
        groups, _ = sent(counts, rows, change=lambda travel, change=change: replace(travel, there=change(travel.there)))
        assert not np.array_equal(groups, wanted), name


@pytest.mark.parametrize("name", ["uneven", "some padding", "one device"])
def test_each_is_the_gradient_of_the_other(name):
    counts, rows = COUNTS[name], rows_of(COUNTS[name])
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(4, room(4), FEATURES)), jnp.float32)

    def gradients(travel, _, own, weights):
        there = jax.grad(lambda own: jnp.vdot(send_rows(own, travel), weights))(own)
        back = jax.grad(lambda groups: jnp.vdot(return_rows(groups, travel), own))(weights)
        return there, return_rows(weights, travel), back, send_rows(own, travel)

    there, returned, back, forth = on_each(gradients, counts, rows, weights)
    np.testing.assert_array_equal(there, returned)
    np.testing.assert_array_equal(back, forth)
    assert np.any(there) and np.any(back)
    # ⟨send x, w⟩ = ⟨x, return w⟩, of all devices
    np.testing.assert_allclose(np.vdot(forth, weights), np.vdot(rows, returned), rtol=1e-5)


def test_room_for_all_rows_that_can_come():
    assert most_rows(TOKENS, CHOICES, own_experts=4, devices=2) == 2 * TOKENS * CHOICES
    assert most_rows(TOKENS, 8, own_experts=1, devices=4) == 4 * TOKENS  # a token goes to an expert once
    assert room(4) % GROUP_ROWS == 0 and room(4) >= 4 * OWN_ROWS


def test_on_gpus_it_is_one_ragged_exchange(monkeypatch):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))

    def local(counts, rows):
        travel, _ = plan_travel(counts[0], OWN_ROWS, room(4), ExpertParallel("expert", 4))
        return return_rows(send_rows(rows[0], travel), travel)[None]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EVERY, out_specs=EVERY, check_vma=False))
    given = jax.ShapeDtypeStruct((4, 8), jnp.int32), jax.ShapeDtypeStruct((4, OWN_ROWS, FEATURES), jnp.bfloat16)
    text = mapped.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line and "bf16" in line]
    assert text.count("ragged_all_to_all") == 2 and not gathers
    assert text.count("tensor<2048xi32>)") == 2  # 512 slices to each of four devices
    elsewhere = mapped.lower(*given).as_text()
    assert "ragged_all_to_all" not in elsewhere
