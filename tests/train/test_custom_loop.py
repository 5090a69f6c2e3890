"""A training loop of one's own on a mesh has the bits of the step that `make_train_step` makes there: inside, both are
one program. How close that is to one device is asked in tests/meshes/test_step.py.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import gpt, gradients_of, showing, tokens
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODEL = gpt(RECIPE, num_layers=1)
LOSS, TX, BATCH = fp8.next_token_loss(MODEL), showing(optax.adamw(1e-2, eps=1e-2)), tokens(4)
KEY, INPUTS = jax.random.key(0), jnp.asarray(BATCH[:, :-1])
SEQUENCE = {"sequence_parallel": True}
MIXED = {"fsdp": 2, "tensor": 2}


def make_mesh(axis_type=AxisType.Auto, **axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes), devices=devices)


@functools.cache
def first_variables():
    return jax.tree.map(np.asarray, jax.jit(MODEL.init)(KEY, INPUTS))


def place(parallel):
    return jax.device_put(first_variables(), fp8.shardings(MODEL.init, KEY, INPUTS, parallel=parallel))


def train_by_step(parallel, steps=2, warm_start=False):
    """The last state, and the losses."""
    step = fp8.make_train_step(LOSS, TX, RECIPE, warm_start=warm_start, parallel=parallel)
    state, losses = step.place(fp8.TrainState.create(variables=first_variables(), tx=TX), BATCH), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def train_by_oneself(parallel, batch=BATCH, steps=2):
    gradient = fp8.value_and_grad(LOSS, parallel=parallel)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(variables, opt_state, batch):
        loss, grads, fp8_state = gradient(variables, batch)
        updates, opt_state = TX.update(grads, opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, "fp8": fp8.update_state(fp8_state, RECIPE)}, opt_state, loss

    variables, losses = place(parallel), []
    opt_state = TX.init(variables["params"])
    for _ in range(steps):
        variables, opt_state, loss = step(variables, opt_state, batch)
        losses.append(float(loss))
    return fp8.TrainState(jnp.int32(steps), variables["params"], variables["fp8"], opt_state), losses


def assert_same_training(ours, theirs):
    """Losses, the gradients of the last step, and the FP8 state to the bit; all lies where it did."""
    (state, losses), (expected, expected_losses) = ours, theirs
    assert losses == expected_losses and losses[-1] < losses[0]
    for tree, wanted in ((state.fp8, expected.fp8), (gradients_of(state), gradients_of(expected))):
        jax.tree.map(assert_same_bits, tree, wanted)
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-6, 1e-7), state.params, expected.params)
    for leaf, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)


WAYS = {
    "data": ({"data": 2}, {}), "fsdp": ({"fsdp": 2}, {}), "tensor": ({"tensor": 2}, {}),
    "sequence": ({"tensor": 2}, SEQUENCE), "fsdp, sequence": (MIXED, SEQUENCE),
}  # fmt: skip
FAST = {("fsdp, sequence", AxisType.Auto)}
CASES = [
    pytest.param(way, kind, marks=() if (way, kind) in FAST else pytest.mark.slow, id=f"{way}-{kind.name}")
    for way in WAYS
    for kind in (AxisType.Auto, AxisType.Explicit)
]


def parallelism(way, axis_type):
    axes, options = WAYS[way]
    return fp8.Parallelism(make_mesh(axis_type, **axes), **options)


@functools.cache
def by_step(way, axis_type):
    return train_by_step(parallelism(way, axis_type))


@pytest.mark.parametrize(("way", "axis_type"), CASES)
def test_a_loop_of_ones_own_is_the_step(way, axis_type):
    assert_same_training(train_by_oneself(parallelism(way, axis_type)), by_step(way, axis_type))


def test_another_token_would_be_noticed():
    """Negative control: of four sequences, one has another token."""
    other, (expected, expected_losses) = BATCH.copy(), by_step("fsdp, sequence", AxisType.Auto)
    other[3, 5] = (other[3, 5] + 1) % 128
    state, losses = train_by_oneself(parallelism("fsdp, sequence", AxisType.Auto), other)
    assert all(ours != theirs for ours, theirs in zip(losses, expected_losses, strict=True))
    for ours, theirs in ((state.fp8, expected.fp8), (gradients_of(state), gradients_of(expected))):
        with pytest.raises(AssertionError, match="elements differ"):
            jax.tree.map(assert_same_bits, ours, theirs)


@pytest.mark.slow
def test_a_warm_start_of_ones_own_is_that_of_the_step():
    parallel = parallelism("fsdp, sequence", AxisType.Auto)
    warm = jax.jit(fp8.warm_start(LOSS, RECIPE, parallel=parallel))(place(parallel), BATCH)
    step = fp8.make_train_step(LOSS, TX, RECIPE, parallel=parallel)
    placed = step.place(fp8.TrainState.create(variables=first_variables(), tx=TX), BATCH)
    expected = step.warm_start(placed, BATCH)
    jax.tree.map(assert_same_bits, warm, expected.fp8)
    with pytest.raises(AssertionError, match="elements differ"):  # negative control: before it
        jax.tree.map(assert_same_bits, warm, first_variables()["fp8"])


def lowered(model, variables, *batch, **options):
    parallel = fp8.Parallelism(make_mesh(fsdp=2), **options)
    gradient = fp8.value_and_grad(fp8.next_token_loss(model), parallel=parallel)
    return jax.jit(gradient).lower(variables, *batch).as_text()


def test_kernels_are_gathered_in_fp8():
    """By the recipe that their layers say. Negative control: those of a model without one are gathered as they are."""
    plain = gpt(None, num_layers=1)
    variables = {"delayed": first_variables(), "plain": {"params": first_variables()["params"]}}
    gathers = {
        name: [line for line in lowered(model, variables[name], BATCH).splitlines() if "all_gather" in line]
        for name, model in (("delayed", MODEL), ("plain", plain))
    }
    in_fp8 = {name: sum("f8E4M3FN" in line for line in lines) for name, lines in gathers.items()}
    assert in_fp8 == {"delayed": 4, "plain": 0}
    assert len(gathers["plain"]) == len(gathers["delayed"]) + 2  # queries, keys and values are one in FP8


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_gradients_go_over_the_wire_in_the_dtype_that_is_asked_for(dtype):
    text = lowered(MODEL, first_variables(), BATCH, gradient_dtype=dtype)
    sums = re.findall(r"tensor<128x512x\w+>\) -> tensor<64x512x(\w+)>", text)  # of the gradient of a kernel
    assert sums == ["f32" if dtype is None else "bf16"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_variables_are_made_where_they_belong(axis_type):
    """By jit, with the moments of an optimizer beside them, and where a step has them."""
    mesh, rules = make_mesh(axis_type, **MIXED), [("mlp/.*kernel", P("fsdp", None)), ("mlp/.*bias", P())]

    def init(key, inputs):
        variables = MODEL.init(key, inputs)
        return {**variables, "opt_state": optax.adam(1e-3).init(variables["params"])}

    parallel = fp8.Parallelism(mesh, rules)
    places = fp8.shardings(init, KEY, INPUTS, parallel=parallel)
    adam = places["opt_state"][0]
    for tree in (places["params"], adam.mu):
        assert tree["layer_0"]["mlp"]["up"]["kernel"].spec == P("fsdp")
        assert tree["layer_0"]["attention"]["out"]["kernel"].spec == P(("tensor", "fsdp"))
    assert all(place.spec == P() for place in jax.tree.leaves((places["fp8"], adam.count)))
    step = fp8.make_train_step(LOSS, TX, RECIPE, parallel=parallel)
    assert places["params"] == jax.tree.map(lambda x: x.sharding, step.state_shapes(MODEL.init, KEY, INPUTS).params)
    inputs, dense = (KEY, jnp.ones((1, 8))), nn.Dense(16)
    variables = jax.jit(dense.init, out_shardings=fp8.shardings(dense.init, *inputs, parallel=mesh))(*inputs)
    assert variables["params"]["kernel"].addressable_shards[0].data.shape == (4, 16)


def gradient(**options):
    return fp8.value_and_grad(LOSS, **{"parallel": make_mesh(data=2)} | options)


SHAPES = jax.eval_shape(MODEL.init, KEY, INPUTS)
REFUSED = {
    "aux of a loss by its layers": (lambda: gradient(has_aux=True), "needs a function that .* got a LayeredLoss"),
    "aux of a warm start": (
        lambda: fp8.warm_start(LOSS, RECIPE, True, parallel=make_mesh(data=2)), "a function that .*LayeredLoss",
    ),
    "another has_aux": (lambda: fp8.value_and_grad(LOSS, 1), "has_aux must be True or False, got 1"),
    "no mesh": (lambda: gradient(parallel=(2, 2)), "parallel must be a jax.sharding.Mesh or .*, got a tuple"),
    "no mesh of a warm start": (lambda: fp8.warm_start(LOSS, RECIPE, parallel="data=2"), "must be .* got a str; make"),
    "no mesh of a step": (lambda: fp8.make_train_step(LOSS, TX, RECIPE, parallel={"data": 2}), "must be .* got a dict"),
    "no mesh of shardings": (
        lambda: fp8.shardings(MODEL.init, KEY, INPUTS, parallel=None), "are those on a mesh, got parallel=None; pass a",
    ),
    "arrays": (lambda: gradient()(first_variables(), BATCH), "must be taken under jax.jit, got arrays; call jax.jit"),
    "arguments by name": (
        lambda: jax.eval_shape(gradient(), SHAPES, batch=BATCH),
        "must be positional on a mesh, where their arrays are split, got batch=...; pass them by position, or bind",
    ),
    "rows": (lambda: jax.eval_shape(gradient(), SHAPES, BATCH[:3]), r"2 parts of a .* got 3 rows of batch\[0\]; pass"),
    "no rows": (lambda: jax.eval_shape(gradient(), SHAPES, BATCH[:0]), "a batch must have at least one row, got batch"),
    "no params": (lambda: jax.eval_shape(gradient(), {"fp8": {}}, BATCH), 'variable dict with "params" first, got'),
    "shardings of something else": (
        lambda: fp8.shardings(lambda x: x, jnp.ones(3), parallel=make_mesh(data=2)),
        r'init_fn must return a dict with "params", got float32\[3\]; pass model.init',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_several_arguments_are_all_split():
    """Arrays by their first dim; a scalar is the same on all devices."""

    seen = []

    def loss_fn(variables, x, scale, labels):
        seen.append((x.shape, jnp.shape(scale), labels["y"].shape))
        return jnp.mean(jnp.square(scale * x @ variables["params"]["kernel"] - labels["y"]))

    x, y = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    variables, batch = {"params": {"kernel": x[:, :1]}}, (x, 2.0, {"y": y[:, :1]})
    loss, grads, fp8_state = jax.jit(fp8.value_and_grad(loss_fn, parallel=make_mesh(data=4)))(variables, *batch)
    assert set(seen) == {((8, 8), (), (8, 1)), ((2, 8), (), (2, 1))}  # as on one device, and on each of four
    expected, expected_grads = jax.value_and_grad(loss_fn)(variables, *batch)
    np.testing.assert_allclose(loss, expected, 1e-6)
    np.testing.assert_allclose(grads["kernel"], expected_grads["params"]["kernel"], 1e-5, 1e-5)
    assert fp8_state == {}


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "fsdp": 2}, {"tensor": 2}], ids=str)
def test_aux_and_collections_of_all_devices(axes):
    """Floats are means, counts are sums, statistics begin alike on all; each as `make_train_step` has it."""

    def loss_fn(variables, x):
        mean = 0.5 * variables["batch_stats"]["mean"] + 0.5 * jnp.mean(x)
        aux = {"batch_stats": {"mean": mean}, "rows": x.shape[0], "largest": jnp.max(x)}
        return jnp.mean(x) * jnp.sum(variables["params"]["kernel"]), aux

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    variables = {"params": {"kernel": jnp.ones((8, 8))}, "batch_stats": {"mean": jnp.float32(1)}}
    gradient = fp8.value_and_grad(loss_fn, has_aux=True, parallel=make_mesh(**axes))
    (loss, aux), grads, _ = jax.jit(gradient)(variables, x)
    parts = 1 if "tensor" in axes else 4
    assert float(loss) == 64 * 31.5 and set(aux) == {"batch_stats", "rows", "largest"} and int(aux["rows"]) == 8
    assert float(aux["batch_stats"]["mean"]) == 0.5 + 0.5 * 31.5
    assert float(aux["largest"]) == np.mean([part.max() for part in np.split(x, parts)])
    np.testing.assert_array_equal(grads["kernel"], np.full((8, 8), 31.5))
    with pytest.raises(ValueError, match="aux must have shapes that do not depend on the number of rows"):
        jax.eval_shape(fp8.value_and_grad(lambda v, x: (x[0, 0], x), True, parallel=make_mesh(data=2)), variables, x)
