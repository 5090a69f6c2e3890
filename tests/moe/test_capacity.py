"""Experts with a capacity: which choices are dropped, what the others compute, and how much room that leaves; beside a
dense float32 computation in which a dropped choice has the weight 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import SEQ, assert_close, first_state, gpt, gradients_of, make_mesh, significant, tokens, train
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close as assert_array_close
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.ops.expert_rows import capacity_of, combine_rows, rows_needed, sort_tokens, take_rows, weights_of_rows
from jax_fp8.ops.expert_travel import most_rows

FEATURES, HIDDEN, EXPERTS, TOKENS, CHOICES = 32, 64, 4, 192, 2
X = np.random.default_rng(0).normal(size=(TOKENS, FEATURES)).astype(np.float32)
DELAYED = fp8.DelayedScaling(amax_history_len=4)
TX = optax.sgd(0.1)


def choices_of(seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int32)


def kept_choices(choices, capacity):
    """Which choices have a row, token by token."""
    seen, kept = np.zeros(EXPERTS, int), np.zeros(choices.shape, bool)
    for token, own in enumerate(choices):
        for number, expert in enumerate(own):
            kept[token, number] = seen[expert] < capacity
            seen[expert] += 1
    return kept


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.25])
def test_the_first_tokens_of_an_expert_have_rows(factor):
    choices = choices_of()
    where = jax.tree.map(
        np.asarray, jax.jit(functools.partial(sort_tokens, experts=EXPERTS, capacity_factor=factor))(choices)
    )
    capacity = capacity_of(factor, TOKENS, CHOICES, EXPERTS)
    kept = kept_choices(choices, capacity)
    assert where.dropped == np.sum(~kept) and (0 < np.sum(~kept) or factor > 1)
    assert ((where.rows == where.pairs.size) == ~kept).all()
    np.testing.assert_array_equal(where.pairs[where.rows[kept]], np.arange(choices.size).reshape(choices.shape)[kept])
    assert np.sum(where.pairs < choices.size) == np.sum(kept)
    numbers = np.bincount(choices[kept], minlength=EXPERTS)
    np.testing.assert_array_equal(where.starts, np.cumsum([0, *(-(-numbers // 128) * 128)]))
    assert where.pairs.size == rows_needed(choices.size, EXPERTS, capacity=capacity) >= where.starts[-1]


def test_rows_and_gradients_are_those_of_the_choices_that_are_left():
    choices, factor = choices_of(), 0.5
    kept = kept_choices(choices, capacity_of(factor, TOKENS, CHOICES, EXPERTS))
    where, whole = sort_tokens(choices, EXPERTS, None, factor), sort_tokens(choices, EXPERTS)
    weights = np.random.default_rng(1).random(choices.shape, np.float32)

    def of(where, x, weights):
        rows = jnp.tanh(take_rows(x, where)) * weights_of_rows(weights, where)[:, None]
        return jnp.sum(jnp.sin(combine_rows(rows, where)))

    found = jax.jit(jax.value_and_grad(functools.partial(of, where), (0, 1)))(X, weights)
    wanted = jax.jit(jax.value_and_grad(functools.partial(of, whole), (0, 1)))(X, weights * kept)
    assert_array_close(found[0], wanted[0], "float32")
    assert_array_close(found[1][0], wanted[1][0], "float32")
    assert_array_close(found[1][1], np.asarray(wanted[1][1]) * kept, "float32")
    assert not np.asarray(found[1][1])[~kept].any() and np.asarray(wanted[1][1])[~kept].any()


def layer_of(factor, recipe=None, dtype=jnp.float32):
    return fp8.LayerNormMoE(
        HIDDEN, EXPERTS, activation="swiglu", norm="rmsnorm", capacity_factor=factor, recipe=recipe, dtype=dtype
    )


@functools.cache
def variables():
    return jax.jit(layer_of(None).init)(jax.random.key(0), X)


@pytest.mark.parametrize("factor", [0.5, 0.9, None])
def test_the_layer_against_a_dense_computation(factor):
    layer, params = layer_of(factor), variables()["params"]
    y, sown = jax.jit(functools.partial(layer.apply, mutable=["intermediates"]))(variables(), X)
    x = np.asarray(X, np.float64)
    normalized = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    logits = normalized @ np.asarray(params["router"]["kernel"], np.float64)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :CHOICES]
    kept = kept_choices(chosen, np.inf if factor is None else capacity_of(factor, TOKENS, CHOICES, EXPERTS))
    shares = np.take_along_axis(np.exp(logits), chosen, -1)
    weights = shares / shares.sum(-1, keepdims=True) * kept
    gate, up, down = (np.asarray(params[name]["kernel"], np.float64) for name in ("gate", "up", "down"))
    wanted = np.zeros(X.shape)
    for token, row in enumerate(normalized):
        for number, expert in enumerate(chosen[token]):
            hidden = row @ gate[expert]
            wanted[token] += weights[token, number] * (
                (hidden / (1 + np.exp(-hidden)) * (row @ up[expert])) @ down[expert]
            )
    assert_array_close(y, wanted, "float32")
    sown = sown["intermediates"]
    if factor is None:
        assert "dropped_fraction" not in sown
    else:
        (dropped,) = sown["dropped_fraction"]
        assert float(dropped) == pytest.approx(np.mean(~kept)) and 0 < dropped < 1
        assert not np.allclose(y, without_capacity(), atol=1e-3)


@functools.cache
def without_capacity():
    return np.asarray(jax.jit(layer_of(None).apply)(variables(), X))


@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["none", "current"])
def test_a_capacity_that_suffices_changes_no_bit(recipe):
    dtype = jnp.float32 if recipe is None else jnp.bfloat16
    found, wanted = (jax.jit(layer_of(factor, recipe, dtype).apply)(variables(), X) for factor in (EXPERTS, None))
    assert_same_bits(found, wanted)


def test_padding_takes_no_capacity():
    lengths, x = np.array([48, 96], np.int32), X.reshape(2, 96, FEATURES)
    apply = functools.partial(layer_of(0.8).apply, mutable=["intermediates"])
    _, sown = jax.jit(apply)(variables(), x, lengths=lengths)
    (dropped,) = sown["intermediates"]["dropped_fraction"]
    assert dropped == 0  # 154 rows of tokens, at most 77 of an expert
    _, sown = jax.jit(apply)(variables(), x)
    assert sown["intermediates"]["dropped_fraction"][0] > 0


# ---- on several devices ----------------------------------------------------------------------------------------------


def steps(axes, factor):
    config = {"num_layers": 1, "num_experts": 4, "activation": "swiglu", "capacity_factor": factor}
    model = gpt(DELAYED, **config)
    state = first_state(model.init, jnp.zeros((1, SEQ), jnp.int32))
    return train(fp8.next_token_loss(model), state, tokens(), DELAYED, axes=axes, steps=2)


def test_devices_that_split_experts_drop_what_devices_of_data_drop():
    (found, losses), (wanted, of_data) = (steps(axes, 0.9) for axes in ({"expert": 4}, {"data": 4}))
    jax.tree.map(assert_same_bits, found[0].fp8, wanted[0].fp8)
    assert_close(significant(gradients_of(found[0])), significant(gradients_of(wanted[0])), 5e-4)
    np.testing.assert_allclose(losses, of_data, rtol=2e-5)
    _, without = steps({"expert": 4}, None)
    assert abs(losses[0] - without[0]) > 1e-4


def test_a_device_has_room_for_the_capacity_of_all_devices():
    devices, tokens, own = 8, 4096, 16
    capacity = capacity_of(1.25, tokens, 8, devices * own)
    room = rows_needed(most_rows(tokens, 8, own, devices), own, capacity=devices * capacity)
    assert room == own * 2560 == 1.25 * tokens * 8
    assert rows_needed(most_rows(tokens, 8, own, devices), own) > 6 * room


def test_each_device_of_an_explicit_mesh_has_a_capacity_of_its_own():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        found = jax.jit(layer_of(0.8).apply)(jax.device_put(variables(), NamedSharding(mesh, P())), x)
    wanted = np.concatenate([jax.jit(layer_of(0.8).apply)(variables(), half) for half in np.split(X, 2)])
    assert_array_close(found, wanted, "float32")


@pytest.mark.parametrize("axes", [None, {"expert": 4}], ids=["one device", "expert 4"])
def test_diagnostics_have_what_is_dropped_and_the_entropy(axes):
    config = {"num_layers": 1, "num_experts": 4, "activation": "swiglu"}
    found = {}
    for factor in (0.9, None):
        model = gpt(DELAYED, capacity_factor=factor, **config)
        mesh = None if axes is None else make_mesh(**axes)
        step = fp8.make_train_step(fp8.next_token_loss(model), TX, DELAYED, parallel=mesh, warm_start=False)
        state = first_state(model.init, jnp.zeros((1, SEQ), jnp.int32), TX)
        state = state if mesh is None else step.place(state, tokens())
        (found[factor],) = step(state, tokens(), diagnose=True)[1]["diagnostics"].rows()["experts"]
    assert 0.02 < found[0.9]["dropped"] < 0.5 and found[None]["dropped"] == 0
    assert found[0.9]["fractions"] == pytest.approx(found[None]["fractions"])  # as the router sends them


# ---- what is left out and refused ------------------------------------------------------------------------------------


def test_text_generation_drops_nothing():
    config = {"num_layers": 1, "num_experts": 4, "activation": "swiglu", "use_bias": False}
    prompt = tokens()[:4, :16]
    model = gpt(None, dtype=jnp.float32, **config)
    params = jax.jit(model.init)(jax.random.key(0), prompt)
    written = [
        fp8.generate(gpt(None, dtype=jnp.float32, capacity_factor=factor, **config), params, prompt, max_new_tokens=8)
        for factor in (0.1, None)
    ]
    assert_same_bits(*written)


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), "all", True])
def test_what_is_no_factor(factor):
    with pytest.raises(ValueError, match=r"capacity_factor must be a finite number above 0, or None, got"):
        layer_of(factor).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"capacity_factor must be a finite number above 0, or None, got"):
        fp8.GPTConfig.preset("tiny-moe", capacity_factor=factor)
