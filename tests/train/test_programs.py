"""The programs of a step on a mesh: where the state is made, where it stays, and what is lowered before it is there.
And a step that is skipped: it changes nothing but the step count.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from deltas import WARNS, by_deltas
from hybrid import gpt, make_mesh, run, tokens
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODEL = gpt(RECIPE, num_layers=1)
LOSS, TX, BATCH = fp8.next_token_loss(MODEL), fp8.fused_adamw(1e-2), tokens(4)
KEY, INPUTS = jax.random.key(0), jnp.asarray(BATCH[:, :-1])
HYBRID = {"parallel": fp8.Parallelism(make_mesh(fsdp=2, tensor=2), sequence_parallel=True)}


def make(**options):
    return fp8.make_train_step(LOSS, TX, RECIPE, **options)


def places(state):
    """Shape, dtype and place of every array; of a dim that is split nowhere, a spec may say so or end before it."""
    return jax.tree.map(lambda x: f"{x.dtype}{x.shape} {[axis for axis in x.sharding.spec if axis]}", state)


def test_a_state_is_made_where_it_is_described_and_stays_there():
    step = make(**HYBRID)
    described, state = step.state_shapes(MODEL.init, KEY, INPUTS), step.init_state(MODEL.init, KEY, INPUTS)
    made = places(state)
    assert jax.tree.leaves(places(described)) == jax.tree.leaves(made)
    up, moment = state.params["layer_0"]["mlp"]["up"]["kernel"], state.opt_state.mu["layer_0"]["mlp"]["up"]["kernel"]
    for array in (up, moment):
        assert array.sharding.spec == P("fsdp", "tensor") and array.addressable_shards[0].data.shape == (64, 256)
    assert state.params["embedding"].sharding.spec == P(("tensor", "fsdp"))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state.step, state.fp8)))
    after, _ = step(state, BATCH)
    assert jax.tree.leaves(places(after)) == jax.tree.leaves(made)


def test_a_state_is_that_of_one_device():
    of_one = make().init_state(MODEL.init, KEY, INPUTS)
    state = make(**HYBRID).init_state(MODEL.init, KEY, INPUTS)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-5, 1e-7), state, of_one)
    shapes = make().state_shapes(MODEL.init, KEY, INPUTS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), of_one)


def test_a_state_that_lies_elsewhere_is_placed():
    step, of_one = make(**HYBRID), make().init_state(MODEL.init, KEY, INPUTS)
    placed = step.place(of_one, BATCH)
    assert jax.tree.leaves(places(placed)) == jax.tree.leaves(places(step.state_shapes(MODEL.init, KEY, INPUTS)))
    assert make().place(of_one, BATCH) is of_one


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["one device", "mesh"])
def test_a_step_is_lowered_from_shapes(options):
    step = make(**options)
    shapes = step.state_shapes(MODEL.init, KEY, INPUTS)
    text = step.lower(shapes, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)).as_text()
    assert ("all_gather" in text) == ("reduce_scatter" in text) == bool(options)
    assert step.trace(shapes, BATCH).out_info[0].step.shape == ()


def test_a_second_step_makes_no_new_program():
    step = make(parallel=make_mesh(data=2))
    run(step, step.init_state(MODEL.init, KEY, INPUTS), BATCH)
    assert step._step._cache_size() == 1 and step._warm._cache_size() == 1


def test_pieces_of_a_step_are_those_of_the_whole_on_one_device():
    """`start`, `accumulate_step` and `apply_step` did not change when a step learned of meshes."""
    tx = optax.sgd(0.1)
    step = fp8.make_train_step(LOSS, tx, RECIPE, 2, warm_start=False)
    whole, _ = step(step.init_state(MODEL.init, KEY, INPUTS), BATCH)
    state = step.init_state(MODEL.init, KEY, INPUTS)
    pending = step.start(state)
    for i in range(2):
        pending = step.accumulate_step(state, pending, BATCH[i::2], is_first_microbatch=i == 0)
    state, _, metrics = step.apply_step(state, pending)
    assert metrics["microbatches"] == 2
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-5, 1e-6), state.params, whole.params)


DENSE, FEATURES = fp8.Dense(32, recipe=RECIPE), 32
X = jax.random.normal(jax.random.key(0), (64, FEATURES))
BAD = X.at[0, 0].set(jnp.nan)
SKIPPING = fp8.fused_adamw(1e-2, skip_nonfinite=True)
TWO = {"kernel": "one", "bias": "other"}  # of which only one may see what is not finite
CHAINS = {
    "alone": SKIPPING,
    "with a trace": optax.chain(optax.trace(0.9), SKIPPING),
    "with an average": optax.chain(optax.ema(0.9), SKIPPING),
    "injected": optax.inject_hyperparams(fp8.fused_adamw)(optax.linear_schedule(1e-2, 0.0, 10), skip_nonfinite=True),
    "with noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), SKIPPING),
    "with a schedule": optax.chain(optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 5)), SKIPPING),
    "in two parts": optax.multi_transform({"one": SKIPPING, "other": fp8.fused_adamw(1e-2, skip_nonfinite=True)}, TWO),
    "in two parts, one of which skips": optax.multi_transform({"one": SKIPPING, "other": fp8.fused_adamw(1e-2)}, TWO),
    "of several steps": optax.MultiSteps(SKIPPING, 2),
}
CHAINS |= {f"{name}, by deltas": by_deltas(CHAINS[name]) for name in ("alone", "with a trace", "injected")}


def squares(variables, x):
    """Whose gradients are not finite in the kernel, and are in the bias, where a row of zeros alone is not."""
    y = DENSE.apply(variables, x)
    return jnp.mean(jnp.where(jnp.isnan(y), 0, y - x).astype(jnp.float32) ** 2) + 0 * jnp.sum(
        x[0, 0] * variables["params"]["kernel"]
    )


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(jax.random.key_data(x) if _is_key(x) else x) for path, x in leaves}


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def by_whole_steps(step, state, x):
    return step(state, x)[0]


def by_pieces(step, state, x):
    pending = step.accumulate_step(state, step.start(state), x, is_first_microbatch=True)
    return step.apply_step(state, pending)[0]


def changed(before, after):
    return {path for path in before if not np.array_equal(before[path], after[path], equal_nan=True)}


def small_state(tx, **collections):
    variables = DENSE.init(jax.random.key(1), X)
    if collections:
        variables |= {"fp8_cache": fp8.cast_weights(variables, RECIPE)}
    return fp8.TrainState.create(variables=variables, tx=tx)


@WARNS
@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "advance", "options"),
    [
        *((name, by_whole_steps, {}) for name in CHAINS),
        *((name, by_pieces, {}) for name in ("with a trace", "in two parts")),
        ("with a trace", by_whole_steps, {"parallel": make_mesh(data=2)}),
    ],
)
def test_a_step_that_is_skipped_changes_nothing_but_the_step_count(name, advance, options):
    tx = CHAINS[name]
    step = fp8.make_train_step(squares, tx, RECIPE, warm_start=False, **options)
    state = small_state(tx, fp8_cache=True)
    state = step.place(advance(step, step.place(state, X), X), X)  # so that there are moments to lose
    before = bits(state)
    state = advance(step, state, BAD)
    skipped = bits(state)
    assert changed(before, skipped) == {".step"}
    after = bits(advance(step, state, X))  # the control: of a step that is taken, nearly all
    assert len(changed(skipped, after)) > (0.5 if name == "of several steps" else 0.7) * len(before)
    assert all(np.isfinite(array).all() for path, array in after.items() if ".cache" not in path)


@pytest.mark.versions
def test_a_limit_of_the_loss_and_gradients_that_are_not_finite_skip_by_one_rule():
    tx = CHAINS["with a trace"]
    step = fp8.make_train_step(squares, tx, RECIPE, warm_start=False)
    state, _ = step(small_state(tx), X)
    before = bits(state)
    for x, limit in ((BAD, 1e9), (X, 1e-9)):
        state, metrics = step(state, x, skip_above=limit)
        assert metrics["skipped"] == 1 and changed(before, bits(state)) == {".step"}
    state, metrics = step(state, X, skip_above=1e9)
    assert metrics["skipped"] == 0 and len(changed(before, bits(state))) > 5


@pytest.mark.versions
def test_the_step_count_saturates():
    largest = np.iinfo(np.int32).max
    step = fp8.make_train_step(squares, SKIPPING, RECIPE, warm_start=False)
    state = small_state(SKIPPING).replace(step=jnp.int32(largest - 1))
    for advance in (by_whole_steps, by_pieces, by_whole_steps, by_pieces):
        before = bits(state)
        state = advance(step, state, X)
        assert int(state.step) == largest
        assert ".params['kernel']" in changed(before, bits(state))
    pending = step.accumulate_step(state, step.start(state), X, is_first_microbatch=True)
    state, pending, _ = step.apply_step(state, pending)
    _, _, metrics = step.apply_step(state, pending)  # the same sums a second time, at the same count
    assert metrics["microbatches"] == 0 and np.isnan(metrics["loss"])
