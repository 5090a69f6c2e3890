"""Which keys a loss draws from: of their own for each step, microbatch and device, and the same when a run goes on."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.core.layered_loss import WholeBatchLoss
from jax_fp8.train.rngs import DrawingLoss, DrawnBatch, drawn, drawn_whole

SEEDS = {"dropout": jax.random.key(5), "noise": jax.random.key(6)}
BATCH, ROWS = {"x": jnp.ones((8, 4)), "scalar": jnp.float32(1)}, 8
STATE = fp8.TrainState.create(variables={"params": {"w": jnp.ones((4, 4))}}, tx=optax.sgd(0.0))


def number(rngs):
    """Of both streams, to the bit."""
    return sum(2.0**place * jax.random.uniform(rngs[name]) for place, name in enumerate(sorted(SEEDS)))


def loss_fn(variables, batch, rngs):
    return number(rngs) + 0 * jnp.sum(batch["x"] @ variables["params"]["w"])


def expected(step, rows, seeds=SEEDS):
    """The mean over parts of a batch that begin with these rows."""
    of_row = [
        {name: jax.random.fold_in(jax.random.fold_in(key, step), row) for name, key in seeds.items()} for row in rows
    ]
    return float(np.mean([number(rngs) for rngs in of_row]))


def losses(steps=2, batch=BATCH, state=STATE, seeds=SEEDS, **options):
    step = fp8.make_train_step(loss_fn, optax.sgd(0.0), None, rngs=seeds, **options)
    state, found = step.place(jax.tree.map(jnp.copy, state), batch), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found, state


def mesh(**axes):
    count = int(np.prod([*axes.values()]))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count])


def test_every_step_has_its_own():
    found, _ = losses(3)
    assert found == pytest.approx([expected(step, [0]) for step in range(3)], abs=1e-6)
    assert len({*found}) == 3 and found[0] != pytest.approx(losses(1, seeds=SEEDS | {"noise": jax.random.key(7)})[0][0])


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"microbatches": 2}, [0, 1]),  # strided
        ({"parallel": {"data": 4}}, [0, 2, 4, 6]),
        ({"parallel": {"data": 2, "tensor": 2}}, [0, 4]),
        ({"parallel": {"data": 2, "fsdp": 2}, "microbatches": 2}, None),
    ],
    ids=str,
)
def test_every_part_has_its_own(options, rows):
    batch = {"x": BATCH["x"]}
    if "parallel" in options:
        options = options | {"parallel": mesh(**options["parallel"])}
    found, _ = losses(batch=batch, **options)
    if rows is None:  # of 4 devices in 2 microbatches every row but none is the first of a part
        rows = range(ROWS)
    assert found == pytest.approx([expected(step, rows) for step in range(2)], abs=1e-6)
    assert found[0] != pytest.approx(expected(0, [0]), abs=1e-3)  # negative control: one key for all


def test_a_run_that_goes_on_draws_what_it_would_have_drawn():
    whole, _ = losses(4)
    first, state = losses(2)
    assert first + losses(2, state=state)[0] == whole
    assert losses(2, state=state.replace(step=jnp.int32(0)))[0] != whole[2:]  # negative control


def test_microbatches_of_ones_own():
    step = fp8.make_train_step(loss_fn, optax.sgd(0.0), None, microbatches=2, rngs=SEEDS)
    state, found = jax.tree.map(jnp.copy, STATE), []
    pending = step.start(state)
    for _ in range(2):
        for part in range(2):
            pending = step.accumulate_step(state, pending, {"x": BATCH["x"]}, is_first_microbatch=part == 0)
        state, pending, metrics = step.apply_step(state, pending)
        found.append(float(metrics["loss"]))
    assert found == pytest.approx([expected(number, [0, ROWS]) for number in range(2)], abs=1e-6)


def test_what_a_step_says_of_itself_draws_too():
    step = fp8.make_train_step(loss_fn, optax.sgd(0.0), None, rngs=SEEDS)
    batch = {"x": BATCH["x"]}
    diagnosed = step(jax.tree.map(jnp.copy, STATE), batch, diagnose=True)[1]
    assert float(diagnosed["loss"]) == losses(1)[0][0]
    step.diagnose(STATE, batch)


def test_without_rngs_a_batch_is_what_it_was():
    assert drawn(loss_fn, STATE, BATCH) is BATCH
    with_rows = drawn(DrawingLoss(loss_fn, SEEDS), STATE, BATCH)
    assert isinstance(with_rows, DrawnBatch) and with_rows.rows.tolist() == [[0, row] for row in range(ROWS)]


@pytest.mark.parametrize(
    ("rngs", "message"),
    [
        ({}, "rngs must be a dict of random keys by the names of their streams, got"),
        (jax.random.key(0), "rngs must be a dict of random keys"),
        ({"dropout": 0}, r"rngs\['dropout'\] must be one random key, got a int; pass jax.random.key"),
        ({"dropout": jax.random.split(jax.random.key(0))}, "must be one random key, got"),
        ({"dropout": jax.random.PRNGKey(0)}, r"must be one random key, got uint32\[2\]"),
    ],
)
def test_what_is_refused(rngs, message):
    with pytest.raises(ValueError, match=message):
        fp8.make_train_step(loss_fn, optax.sgd(0.0), None, rngs=rngs)
    with pytest.raises(ValueError, match="with rngs a batch must have rows"):
        losses(1, batch={"scalar": jnp.float32(1)})


def test_a_loss_sees_the_whole_batch_before_it_is_split():
    loss = WholeBatchLoss(lambda _, batch: jnp.mean(batch), Mock(side_effect=lambda batch: 2 * batch))
    x = BATCH["x"]
    assert jnp.array_equal(drawn_whole(loss, STATE, x, 2), 2 * x)
    with_rows = drawn_whole(DrawingLoss(loss, SEEDS), STATE, x, 2)
    assert jnp.array_equal(with_rows.batch, 2 * x) and with_rows.rows.shape == (ROWS, 2)
    assert loss.whole_batch.call_count == 2
    assert drawn_whole(loss, STATE, x, 1) is x and drawn_whole(loss_fn, STATE, x, 2) is x
    with pytest.raises(
        ValueError, match="microbatches must divide the batch size, got microbatches=3 and a batch of 8"
    ):
        drawn_whole(loss, STATE, x, 3)
    assert loss.whole_batch.call_count == 2
