"""Steps with experts on several devices, whose tokens travel, beside steps on one device.

Amaxes are maxima, products of FP8 values are exact, and a group has its rows in the order of one device. So the FP8
state has the bits of one device. Sums of float32 over tokens are added up by device first, and differ by their
rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_steps import (
    FIRST_SUMS,
    LOSS,
    MODELS,
    RECIPES,
    assert_same_trees,
    model_of,
    on_one_device,
    state_of,
    trained,
)
from hybrid import (
    SEQ,
    SHOWING,
    assert_close,
    errors,
    first_state,
    gpt,
    gradients_of,
    make_mesh,
    significant,
    tokens,
    train,
)
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.ops import expert_mlp, expert_rows
from jax_fp8.parallel import transfers

AXES = {
    "expert 2": {"expert": 2}, "expert 4": {"expert": 4}, "data 2, expert 2": {"data": 2, "expert": 2},
    "fsdp 2, expert 2": {"fsdp": 2, "expert": 2}, "fsdp 2, expert 4": {"fsdp": 2, "expert": 4},
}  # fmt: skip


def assert_is_that_of_one_device(found, wanted):
    (states, losses), (of_one, losses_of_one) = found, wanted
    assert_same_trees(states[0].fp8, of_one[0].fp8)
    assert_close(significant(gradients_of(states[0])), significant(gradients_of(of_one[0])), FIRST_SUMS)
    np.testing.assert_allclose(losses, losses_of_one, rtol=LOSS)


FAST = {
    ("expert 2", "delayed", "softmax"), ("expert 4", "current", "softmax"), ("data 2, expert 2", "block", "softmax"),
    ("fsdp 2, expert 2", "delayed", "shared"), ("fsdp 2, expert 4", "none", "softmax"),
    ("expert 4", "delayed", "few tokens"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "recipe", "model"),
    [
        pytest.param(axes, recipe, model, marks=() if (axes, recipe, model) in FAST else pytest.mark.slow)
        for axes in AXES
        for recipe in RECIPES
        for model in MODELS
    ],
)
@pytest.mark.filterwarnings("ignore:each device must have whole tiles")  # of small kernels, over fsdp
def test_steps_are_those_of_one_device(axes, recipe, model):
    assert_is_that_of_one_device(trained(recipe, AXES[axes], model), on_one_device(recipe, model=model))


def test_steps_of_microbatches_are_those_of_one_device():
    found = trained("delayed", AXES["data 2, expert 2"], microbatches=2)
    assert_is_that_of_one_device(found, on_one_device("delayed", microbatches=2))


@pytest.mark.parametrize("axes", ["expert 4", "data 2, expert 2", "fsdp 2, expert 2"])
def test_microbatches_that_the_caller_drives_are_those_of_a_step(axes):
    loss, recipe, batch = fp8.next_token_loss(model_of("delayed")), RECIPES["delayed"], tokens()
    step = fp8.make_train_step(loss, SHOWING, recipe, 2, parallel=make_mesh(**AXES[axes]), warm_start=False)
    state, again = (step.place(jax.tree.map(jnp.copy, state_of("delayed")), batch) for _ in range(2))
    whole, _ = step(state, batch)
    pending = step.start(again)
    for i in range(2):
        pending = step.accumulate_step(again, pending, batch[i::2], i == 0)
    driven, _, _ = step.apply_step(again, pending)
    assert_same_trees(driven.fp8, whole.fp8)
    assert_close(significant(gradients_of(driven)), significant(gradients_of(whole)), 1e-5)


@pytest.mark.parametrize("recipe", ["delayed", "block", "none"])
def test_recomputed_rows_travel_again(recipe):
    wanted = trained(recipe, AXES["expert 2"], steps=1)
    found = trained(recipe, AXES["expert 2"], steps=1, recompute=True)
    assert_same_trees(found[0][0].fp8, wanted[0][0].fp8)
    assert_close(significant(gradients_of(found[0][0])), significant(gradients_of(wanted[0][0])), FIRST_SUMS)


def test_a_step_repeats_its_bits():
    first, second = (trained("delayed", AXES["expert 4"], steps=1)[0][0] for _ in range(2))
    assert_same_trees(second, first)


def with_router(state, change):
    params = dict(state.params)
    layer = dict(params["layer_0"])
    mlp = dict(layer["mlp"])
    mlp["router"] = {"kernel": change(mlp["router"]["kernel"])}
    return state.replace(params=params | {"layer_0": layer | {"mlp": mlp}})


def test_all_tokens_may_go_to_the_experts_of_one_device():
    """With equal logits `top_k` takes experts 0 and 1. With two devices these are all experts of the first one."""
    state = with_router(state_of("delayed"), jnp.zeros_like)
    found, wanted = (trained("delayed", axes, state=state, steps=1) for axes in (AXES["expert 2"], None))
    assert_is_that_of_one_device(found, wanted)
    gradients = gradients_of(found[0][0])["layer_0"]["mlp"]
    for name in ("gate", "up", "down"):
        norms = np.linalg.norm(gradients[name]["kernel"], axis=(1, 2))
        assert norms[0] > 0 and norms[1] > 0 and not norms[2:].any()


def test_padding_does_not_travel():
    batch = {"tokens": tokens(), "lengths": np.array([SEQ + 1, 9, 3, SEQ + 1, 1, 2, 30, 17], np.int32)}
    found, wanted = (trained("delayed", axes, batch=batch) for axes in (AXES["expert 4"], None))
    assert_is_that_of_one_device(found, wanted)


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def is_far(found, wanted) -> bool:
    """Whether a gradient is."""
    got, exact = (significant(gradients_of(states[0])) for states, _ in (found, wanted))
    return max(errors(got, exact).values()) > 10 * FIRST_SUMS


def test_a_lost_row_is_noticed(monkeypatch):
    plan = expert_rows.plan_travel

    def losing(counts, *sizes):
        return plan(counts.at[jnp.argmax(counts)].add(-1), *sizes)

    monkeypatch.setattr(expert_rows, "plan_travel", losing)
    assert is_far(trained("delayed", AXES["expert 2"], steps=1), on_one_device("delayed"))


def test_swapped_rows_are_noticed(monkeypatch):
    back = expert_rows.return_rows
    monkeypatch.setattr(
        expert_rows, "return_rows", lambda rows, travel: back(rows, travel).at[:2].set(back(rows, travel)[1::-1])
    )
    assert is_far(trained("delayed", AXES["expert 2"], steps=1), on_one_device("delayed"))


def test_a_gradient_that_is_counted_twice_is_noticed(monkeypatch):
    monkeypatch.setattr(transfers, "axes_of_sum", lambda parallel, place: transfers.summed_axes(parallel))
    assert is_far(trained("delayed", AXES["expert 2"], steps=1), on_one_device("delayed"))


def test_rows_in_another_dtype_than_fp8_are_noticed(monkeypatch):
    """The dtypes that `explain` lists: input rows in E4M3, output gradients in E5M2, the sums of GEMMs in bfloat16, and
    the weights of rows and their gradients in float32.
    """

    def dtypes():
        model = model_of("delayed")
        step = fp8.make_train_step(
            fp8.next_token_loss(model), optax.sgd(0.1), RECIPES["delayed"], parallel=make_mesh(expert=2)
        )
        shapes = step.state_shapes(model.init, jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))
        found = fp8.explain(step, shapes, jax.ShapeDtypeStruct((8, SEQ + 1), jnp.int32)).collectives
        return sorted(x.dtype for x in found if x.name == "ragged_all_to_all" for _ in range(x.count))

    assert dtypes() == ["bfloat16", "bfloat16", "float32", "float32", "float8_e4m3fn", "float8_e5m2"]
    monkeypatch.setattr(expert_mlp, "_is_by_tile", lambda *_: True)
    assert dtypes() == ["bfloat16"] * 4 + ["float32"] * 2


# ---- where things lie ------------------------------------------------------------------------------------------------


def test_a_device_stores_its_experts_alone_and_a_state_moves_between_meshes():
    loss, tx = fp8.next_token_loss(model_of("delayed")), fp8.fused_adamw(1e-3)
    step, on_data = (
        fp8.make_train_step(loss, tx, RECIPES["delayed"], parallel=make_mesh(**axes))
        for axes in ({"fsdp": 2, "expert": 4}, {"data": 2})
    )
    state = fp8.TrainState.create(variables=jax.tree.map(jnp.copy, state_of("delayed").variables), tx=tx)
    placed = step.place(state, tokens())
    of_experts = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path((placed.params, placed.opt_state))
        if any(name in jax.tree_util.keystr(path) for name in ("gate", "up", "down")) and np.ndim(leaf) == 3
    ]
    assert len(of_experts) >= 3 * 3  # params and moments
    for leaf in of_experts:
        experts, rows, _ = leaf.shape
        assert {shard.data.shape[:2] for shard in leaf.addressable_shards} == {(experts // 4, rows // 2)}
    after, metrics = step(placed, tokens())
    moved = on_data.place(jax.tree.map(np.asarray, after), tokens())
    assert_same_trees(moved, after)
    _, next_metrics = on_data(moved, tokens())
    assert float(next_metrics["loss"]) < float(metrics["loss"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", ["expert 4", "fsdp 2, expert 2"])
def test_the_state_of_a_step_is_evaluated_and_generates_as_it_lies(axes, axis_type):
    sizes, loss = AXES[axes], fp8.next_token_loss(model_of("delayed"))
    mesh = make_mesh(**sizes)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * len(sizes))
    step = fp8.make_train_step(loss, SHOWING, RECIPES["delayed"], parallel=mesh, warm_start=False)
    state = state_of("delayed")
    placed = step.place(jax.tree.map(jnp.copy, state), tokens())
    evaluate = jax.jit(loss)
    np.testing.assert_allclose(evaluate(placed.variables, tokens()), evaluate(state.variables, tokens()), rtol=LOSS)
    write = functools.partial(fp8.generate, model_of("delayed"), max_new_tokens=4)
    np.testing.assert_array_equal(*(write(variables=of.variables, prompt=tokens()[:4, :8]) for of in (placed, state)))


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"expert=8 must divide the experts of layer_0/mlp/.*, got 4 in shape"):
        trained("delayed", {"expert": 8}, steps=1)


def test_gradients_on_a_mesh_are_those_of_a_step():
    """As in a loop of one's own: `value_and_grad` with the mesh."""
    loss, state, batch = fp8.next_token_loss(model_of("current")), state_of("current"), tokens()
    take = jax.jit(fp8.value_and_grad(loss, parallel=make_mesh(expert=4)))
    _, found, _ = take(jax.tree.map(jnp.copy, state.variables), batch)
    assert_close(significant(found), significant(gradients_of(on_one_device("current")[0][0])), FIRST_SUMS)


def test_a_model_without_experts_has_one_more_axis_of_data():
    loss, batch = fp8.next_token_loss(gpt(RECIPES["delayed"], num_layers=1)), tokens()
    state = first_state(gpt(RECIPES["delayed"], num_layers=1).init, jnp.zeros((1, SEQ), jnp.int32), SHOWING)
    found, wanted = (train(loss, state, batch, RECIPES["delayed"], axes=axes) for axes in ({"expert": 2}, {"data": 2}))
    assert_same_trees(found[0][0].params, wanted[0][0].params)
