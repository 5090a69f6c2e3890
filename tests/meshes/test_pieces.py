"""Microbatches that the caller drives, on a mesh: the losses, params and FP8 state of the step as a whole.

Within a step each device adds up its own gradients before they are summed over devices; in pieces they are summed for
every microbatch. So float32 sums are added up in another order. Amaxes are maxima, and the same bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import assert_close, gpt, gradients_of, make_mesh, showing, significant, spread, tokens
from jax.sharding import AxisType
from reference import assert_same_bits

import jax_fp8 as fp8

SUMS_IN_ANOTHER_ORDER, LOSS = 1e-5, 1e-6  # 2e-6 and 1e-7 seen
MICROBATCHES, BATCH = 2, tokens(8)
TX = showing(optax.adamw(1e-2, eps=1e-2))
RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=2), "current": fp8.CurrentScaling()}
MIXED, SEQUENCE = {"fsdp": 2, "tensor": 2}, {"sequence_parallel": True}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
WAYS = {
    "data": ({"data": 2}, {}, AUTO), "fsdp": ({"fsdp": 2}, {}, EXPLICIT), "tensor": ({"tensor": 2}, {}, AUTO),
    "sequence": ({"tensor": 2}, SEQUENCE, EXPLICIT), "fsdp, sequence": (MIXED, SEQUENCE, EXPLICIT),
    "fsdp, sequence, Auto": (MIXED, SEQUENCE, AUTO),
}  # fmt: skip


def new_step(way, recipe, cache_weights=True):
    return _new_step(way, recipe, cache_weights)


@functools.cache
def _new_step(way, recipe, cache_weights):
    axes, options, axis_type = WAYS[way]
    model = gpt(RECIPES[recipe], num_layers=1)
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), devices=make_mesh(**axes).devices.flatten()
    )
    options = spread(mesh, warm_start=False, cache_weights=cache_weights, **options)
    return fp8.make_train_step(fp8.next_token_loss(model), TX, RECIPES[recipe], MICROBATCHES, **options)


@functools.cache
def first_variables(recipe):
    return jax.tree.map(np.asarray, jax.jit(gpt(RECIPES[recipe], num_layers=1).init)(jax.random.key(0), BATCH[:, :-1]))


def first_state(way, recipe):
    state = fp8.TrainState.create(variables=first_variables(recipe), tx=TX)
    return new_step(way, recipe).place(state, BATCH)


def rows(i):
    return BATCH[i::MICROBATCHES]


@functools.cache
def whole(way, recipe, steps=2):
    """The last state of steps as a whole, and the losses."""
    step, state, losses = new_step(way, recipe), first_state(way, recipe), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def driven(way, recipe, cache_weights=True, steps=2, first=lambda i: i == 0, rows=rows):
    step, state, losses = new_step(way, recipe, cache_weights), first_state(way, recipe), []
    pending = step.start(state)
    for _ in range(steps):
        for i in range(MICROBATCHES):
            pending = step.accumulate_step(state, pending, rows(i), first(i))
        state, pending, metrics = step.apply_step(state, pending)
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_same(ours, theirs):
    (state, losses), (expected, expected_losses) = ours, theirs
    jax.tree.map(assert_same_bits, state.fp8, expected.fp8)
    np.testing.assert_allclose(losses, expected_losses, LOSS)
    for of in (gradients_of, lambda state: state.params):
        assert_close(significant(of(state)), significant(of(expected)), SUMS_IN_ANOTHER_ORDER)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)


FAST = {("fsdp, sequence", "delayed", True)}
CASES = [
    pytest.param(way, recipe, kept, marks=() if (way, recipe, kept) in FAST else pytest.mark.slow)
    for way in WAYS
    for recipe in RECIPES
    for kept in (True, False)
]


@pytest.mark.parametrize(("way", "recipe", "cache_weights"), CASES)
def test_pieces_are_the_step(way, recipe, cache_weights):
    assert_same(driven(way, recipe, cache_weights), whole(way, recipe))
    step = new_step(way, recipe, cache_weights)
    if WAYS[way][2] == AUTO:  # on an Explicit mesh jax counts P() and P(None) as two
        assert [program._cache_size() for program in (step._start, step._accumulate, step._apply)] == [0, 1, 1]


def test_another_microbatch_would_be_noticed():
    """Negative control: the first one twice. And a forgotten flag is no mistake."""
    way, recipe = "fsdp, sequence", "delayed"
    with pytest.raises(AssertionError):
        assert_same(driven(way, recipe, rows=lambda i: rows(0)), whole(way, recipe))
    assert_same(driven(way, recipe, first=lambda i: jnp.bool_(False)), whole(way, recipe))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_step_takes_all_its_microbatches_or_none(count):
    step, state = new_step("fsdp, sequence", "delayed"), first_state("fsdp, sequence", "delayed")
    before, pending = jax.tree.map(np.asarray, state), step.start(state)
    for i in range(count):
        pending = step.accumulate_step(state, pending, rows(i % 2), i == 0)
    state, pending, metrics = step.apply_step(state, pending)
    assert np.isnan(metrics["loss"]) and int(metrics["microbatches"]) == count
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
    for i in range(2):  # and it can go on
        pending = step.accumulate_step(state, pending, rows(i), False)
    state, _, metrics = step.apply_step(state, pending)
    assert int(state.step) == 1 and np.isfinite(metrics["loss"])


def halve_scales(x):
    return x / 2 if x.dtype == jnp.float32 else x


def test_weights_are_gathered_once_and_again_for_other_params():
    """What a microbatch finds in `pending` it uses: other weights there make another loss, until it begins anew."""
    step, state = new_step("fsdp, sequence", "delayed"), first_state("fsdp, sequence", "delayed")
    pending = step.accumulate_step(state, step.start(state), rows(0), True)
    kept = jax.tree.map(jnp.copy, pending)
    halved = {**kept.cache, "layer_0": jax.tree.map(halve_scales, kept.cache["layer_0"])}
    losses = {}
    for name, cache, first in (("kept", kept.cache, False), ("other", halved, False), ("anew", halved, True)):
        given = jax.tree.map(jnp.copy, dataclasses.replace(kept, cache=cache))
        after = step.accumulate_step(state, given, rows(1), first)
        losses[name] = float(after.loss) - (0 if first else float(kept.loss))  # of the second microbatch
    np.testing.assert_allclose(losses["kept"], losses["anew"], 1e-5)
    assert abs(losses["other"] - losses["kept"]) > 1e-3

    params = jax.tree.map(lambda p: 1.25 * p, state.params)
    again = step.accumulate_step(state.replace(params=params), pending, rows(1), False)
    assert (int(kept.count), int(again.count)) == (1, 1)  # the first belongs to other params
    assert not np.array_equal(kept.cache["params_version"], again.cache["params_version"])


def test_pending_gradients_lie_as_the_params_do():
    step, state = new_step("fsdp, sequence", "delayed"), first_state("fsdp, sequence", "delayed")
    pending = step.start(state)
    after = step.accumulate_step(state, pending, rows(0), True)
    for given in (pending, after):
        for total, param in zip(jax.tree.leaves(given.gradients), jax.tree.leaves(state.params), strict=True):
            assert total.dtype == jnp.float32 and total.sharding.is_equivalent_to(param.sharding, param.ndim)
    assert all(total.is_deleted() for total in jax.tree.leaves(pending.gradients))
    up = after.cache["layer_0"]["mlp"]["up"]["kernel"].rowwise.values  # of one device: all rows, half of the columns
    assert up.shape == (4, 128, 256) and up.addressable_shards[0].data.shape == (1, 128, 256)


def test_rows_and_places_are_checked():
    step = new_step("data", "current")
    state = first_state("data", "current")
    with pytest.raises(ValueError, match="2 parts of a batch on the mesh data=2, got 3 rows of batch; pass a multiple"):
        step.accumulate_step(state, step.start(state), BATCH[:3], True)
    with pytest.raises(ValueError, match="must lie on the 2 devices of the step's mesh"):
        step.start(fp8.TrainState.create(variables=first_variables("current"), tx=TX))
    other = fp8.make_train_step(
        lambda variables, batch: 0.0, TX, RECIPES["current"], MICROBATCHES, parallel=make_mesh(data=2)
    )
    with pytest.raises(ValueError, match=r"must know the shardings of params, .* call accumulate_step first"):
        other.apply_step(state, step.start(state))
