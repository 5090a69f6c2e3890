"""The programs of a step on a mesh: where the state is made, where it stays, and what is lowered before it is there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import gpt, make_mesh, run, tokens
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODEL = gpt(RECIPE, num_layers=1)
LOSS, TX, BATCH = fp8.next_token_loss(MODEL), fp8.fused_adamw(1e-2), tokens(4)
KEY, INPUTS = jax.random.key(0), jnp.asarray(BATCH[:, :-1])
HYBRID = {"mesh": make_mesh(fsdp=2, tensor=2), "sequence_parallel": True}


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
    step = make(mesh=make_mesh(data=2))
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
