"""A model with batch statistics and dropout beside FP8 layers, trained in a step, against a loop that is written out:
the same losses, statistics and params for one pass, microbatches, and devices that split the batch.
"""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2)
ROWS, STEPS, SEED = 64, 2, jax.random.key(3)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(ROWS, 16)).astype(np.float32), "y": RNG.normal(size=(ROWS, 16)).astype(np.float32)}
BATCH["x"] *= np.linspace(0.5, 2, ROWS, dtype=np.float32)[:, None]  # parts of it have other statistics


class Model(nn.Module):
    rate: float = 0.25

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8, name="norm")(nn.Dense(32)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return fp8.Dense(16, recipe=RECIPE)(nn.gelu(x))


MODEL, TX = Model(), optax.sgd(0.05)


def loss_fn(variables, batch, rngs):
    y, updates = MODEL.apply(variables, batch["x"], rngs=rngs, mutable=["batch_stats"])
    squares = jnp.mean(jnp.square(y.astype(jnp.float32) - batch["y"]))
    return squares, {**updates, "largest": jnp.max(batch["x"]), "positive": jnp.sum(batch["y"] > 0)}


@cache
def first_variables():
    """With scales of a part of this batch, so that no gradient vanishes in FP8, and none is cut off."""
    rngs = {"dropout": SEED}
    variables = jax.jit(MODEL.init)({"params": jax.random.key(0), **rngs}, BATCH["x"])
    warm = fp8.warm_start(lambda variables, batch: loss_fn(variables, batch, rngs), RECIPE, has_aux=True)
    return {**variables, "fp8": jax.jit(warm)(variables, {name: x[:16] for name, x in BATCH.items()})}


def written_out(parts, first_rows, devices=1, average=True):
    """Losses and the last variables of a loop over parts of the batch, which all start from the same statistics. Each
    of the devices has a share of the loss, so that scales of output gradients are those of the mean.
    """

    @jax.jit
    def pass_of(variables, part, step, row):
        key = jax.random.fold_in(jax.random.fold_in(SEED, step), row)

        def share(variables, part):
            loss, aux = loss_fn(variables, part, {"dropout": key})
            return loss / devices, aux

        (loss, aux), grads, fp8_state = fp8.value_and_grad(share, has_aux=True)(variables, part)
        return loss * devices, jax.tree.map(lambda gradient: gradient * devices, grads), aux["batch_stats"], fp8_state

    variables, losses, opt_state = first_variables(), [], TX.init(first_variables()["params"])
    for step in range(STEPS):
        found, staged = [], variables
        for rows, row in zip(parts, first_rows, strict=True):
            *of_part, fp8_state = pass_of(staged, {name: x[rows] for name, x in BATCH.items()}, step, row)
            staged = {**staged, "fp8": fp8_state}
            found.append(of_part)
        loss, grads, stats = jax.tree.map(lambda *of_parts: sum(of_parts) / len(of_parts), *found)
        updates, opt_state = TX.update(grads, opt_state, variables["params"])
        variables = {
            "params": optax.apply_updates(variables["params"], updates),
            "fp8": fp8.update_state(staged["fp8"], RECIPE),
            "batch_stats": stats if average else found[-1][2],
        }
        losses.append(float(loss))
    return losses, variables


def trained(**options):
    step = fp8.make_train_step(loss_fn, TX, RECIPE, has_aux=True, rngs={"dropout": SEED}, warm_start=False, **options)
    state, losses = fp8.TrainState.create(variables=first_variables(), tx=TX), []
    state = step.place(state, BATCH)
    for _ in range(STEPS):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state, metrics["aux"]


def mesh(axis_type=AxisType.Auto, **axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes), devices=devices)


WHOLE = [slice(None)]
STRIDED = [slice(part, None, 4) for part in range(4)]
BLOCKS = [slice(16 * part, 16 * part + 16) for part in range(4)]
WAYS = {
    "whole": ({}, WHOLE, [0]),
    "tensor": ({"parallel": {"tensor": 2}}, WHOLE, [0]),
    "microbatches": ({"microbatches": 4}, STRIDED, range(4)),
    "data": ({"parallel": {"data": 4}}, BLOCKS, [0, 16, 32, 48]),
    "fsdp": ({"parallel": {"data": 2, "fsdp": 2}}, BLOCKS, [0, 16, 32, 48]),
    "explicit": ({"parallel": {"data": 4, "axis_type": AxisType.Explicit}}, BLOCKS, [0, 16, 32, 48]),
    "mesh and microbatches": (
        {"parallel": {"data": 2}, "microbatches": 2},
        [slice(32 * device + part, 32 * device + 32, 2) for device in range(2) for part in range(2)],
        [0, 1, 32, 33],
    ),
}


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
def test_a_step_has_the_numbers_of_a_loop(way):
    options, parts, first_rows = WAYS[way]
    options = options | ({"parallel": mesh(**options["parallel"])} if "parallel" in options else {})
    losses, state, aux = trained(**options)
    expected_losses, expected = written_out(parts, first_rows, len(parts) // options.get("microbatches", 1))
    np.testing.assert_allclose(losses, expected_losses, 1e-5)
    stats = state.collections["batch_stats"]
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-6, 1e-6), stats, expected["batch_stats"]
    )
    jax.tree.map(
        lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-3, 1e-4), state.params, expected["params"]
    )
    largest = np.mean([BATCH["x"][rows].max() for rows in parts])
    np.testing.assert_allclose(aux["largest"], largest, 1e-6)
    assert int(aux["positive"]) == (BATCH["y"] > 0).sum() and set(aux) == {"largest", "positive"}


def test_without_the_mean_statistics_are_others():
    """Negative control: those of the last part alone, and those of before."""
    _, expected = written_out(STRIDED, range(4))
    _, last = written_out(STRIDED, range(4), average=False)
    wanted = expected["batch_stats"]["norm"]["var"]
    for other in (last, first_variables()):
        assert np.abs(wanted - other["batch_stats"]["norm"]["var"]).max() > 1e-3


def by_hand(axis_type, loss_fn=loss_fn, **options):
    """A step without `mesh`, whose batch and state somebody has placed."""
    on = mesh(axis_type, data=4)
    batch = jax.device_put(BATCH, NamedSharding(on, P("data")))
    state = jax.device_put(fp8.TrainState.create(variables=first_variables(), tx=TX), NamedSharding(on, P()))
    step = fp8.make_train_step(loss_fn, TX, RECIPE, has_aux=True, warm_start=False, **options)
    return step(state, batch)[0].collections["batch_stats"]


def without_dropout(variables, batch):
    y, updates = MODEL.clone(rate=0.0).apply(variables, batch["x"], mutable=["batch_stats"])
    return jnp.mean(jnp.square(y.astype(jnp.float32) - batch["y"])), updates


@pytest.mark.versions
def test_by_placement_alone_statistics_are_those_of_all_rows():
    """With Auto axes; Flax's dropout cannot be where a mesh of Explicit axes is set, with layers of jax_fp8 or without,
    and a step sets it. All else can.
    """
    expected = jax.jit(lambda: loss_fn(first_variables(), BATCH, {"dropout": SEED}))()[1]["batch_stats"]
    for stats in (by_hand(AxisType.Auto, rngs={"dropout": SEED}), by_hand(AxisType.Explicit, without_dropout)):
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-6, 1e-6), stats, expected)
    with pytest.raises(Exception, match="select `which` must be scalar or have the same sharding"):
        by_hand(AxisType.Explicit, rngs={"dropout": SEED})
    on = mesh(AxisType.Explicit, data=4)
    x, dropout = jax.device_put(BATCH["x"], NamedSharding(on, P("data"))), nn.Dropout(0.25, deterministic=False)
    with jax.set_mesh(on), pytest.raises(Exception, match="select `which` must be scalar or have the same sharding"):
        jax.jit(lambda x: dropout.apply({}, x, rngs={"dropout": SEED}))(x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_collections_are_whole_on_every_device(axis_type):
    """Also where they have the names and shapes of params that are split, as their average does."""

    def init_fn(key, x):
        params = {"dense": {"kernel": jnp.full((16, 16), 2.0)}}
        return {"params": params, "average": jax.tree.map(jnp.zeros_like, params)}

    def averaging(variables, x):
        average = jax.tree.map(lambda old, new: 0.5 * (old + new), variables["average"], variables["params"])
        return jnp.mean(x @ variables["params"]["dense"]["kernel"]), {"average": average}

    on = mesh(axis_type, data=2, fsdp=2)
    step = fp8.make_train_step(averaging, TX, None, has_aux=True, parallel=on)
    state = step.init_state(init_fn, jax.random.key(0), BATCH["x"])
    assert jax.tree.map(
        lambda x: x.sharding, step.state_shapes(init_fn, jax.random.key(0), BATCH["x"])
    ) == jax.tree.map(lambda x: x.sharding, state)
    for expected in (1.0, 1.5):
        assert not state.params["dense"]["kernel"].is_fully_replicated
        state, _ = step(state, np.zeros((64, 16), np.float32))
        kernel = state.collections["average"]["dense"]["kernel"]
        assert kernel.is_fully_replicated
        np.testing.assert_array_equal(kernel, np.full((16, 16), expected))
