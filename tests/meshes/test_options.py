"""Everything else that a step can be, on a mesh beside one device: options of models and of steps, own models, stacked
layers.

Where nothing is split over `tensor`, the first gradients are those of one device but for sums in another order. With
`tensor` they differ by the noise of FP8 where a rounding falls on the other side; test_step.py measures that it
is no more of it. Here a gradient must point where one device's does: of leaves that matter it is within `NOISE` of it,
and what was doubled, halved, permuted or left out is farther off.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import (
    SEQ,
    SHOWING,
    VOCAB,
    assert_close,
    errors,
    first_state,
    gpt,
    gradients_of,
    make_mesh,
    run,
    significant,
    tokens,
    train,
)
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

import jax_fp8 as fp8

SUMS, ROUNDED, NOISE = 5e-4, 0.05, 0.25
RECIPE, CURRENT = fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling()
FSDP, TENSOR, MIXED = {"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}


def assert_same_step(ours, of_one, tolerance):
    """The first step of both: losses and gradients, and where sums alone differ the FP8 state."""
    (states, losses), (expected, of_one_losses) = ours, of_one
    np.testing.assert_allclose(losses[0], of_one_losses[0], 1e-5 if tolerance <= SUMS else 1e-3)
    wanted = significant(gradients_of(expected[0]))
    assert all(np.any(gradient) for gradient in wanted.values())  # zeros, of a scale that is too large, show nothing
    assert_close(significant(gradients_of(states[0])), wanted, tolerance)
    if tolerance == SUMS:
        jax.tree.map(assert_same_bits, states[0].fp8, expected[0].fp8)


@functools.cache
def first_state_of(config, recipe):
    """That of every GPT with these, whatever else it is."""
    return first_state(fp8.GPT(config, recipe=recipe).init, tokens()[:, :-1])


@functools.cache
def of_one_layer():
    """A GPT of one layer, its state, and a step of it on one device."""
    model = gpt(RECIPE, num_layers=1)
    state = first_state_of(model.config, RECIPE)
    return model, state, train(fp8.next_token_loss(model), state, tokens(), RECIPE)


class Warm(nn.Module):
    """Logits times a param of its own."""

    @nn.compact
    def __call__(self, tokens):
        return gpt(RECIPE, num_layers=1)(tokens) * self.param("temperature", nn.initializers.constant(2.0), ())


# ---- GPT -------------------------------------------------------------------------------------------------------------

LLAMA = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2, "use_bias": False,
    "tie_embeddings": False,
}  # fmt: skip
# Fields of the model, the mesh, options of the step, and how close.
MODELS = {
    "like Llama": (LLAMA, MIXED, {"sequence_parallel": True}, NOISE),
    "like Llama, fsdp": (LLAMA, FSDP, {}, SUMS),
    "an untied head": ({"tie_embeddings": False}, TENSOR, {}, NOISE),
    "a head in FP8": ({"head_recipe": CURRENT}, TENSOR, {"sequence_parallel": True}, NOISE),
    "a head in FP8, data": ({"head_recipe": CURRENT}, {"data": 2}, {}, SUMS),
    "recompute": ({"recompute": True}, MIXED, {"sequence_parallel": True}, NOISE),
    "plain bfloat16": ({"recipe": None}, MIXED, {"sequence_parallel": True}, ROUNDED),
    "plain float32": ({"recipe": None, "dtype": jnp.float32}, MIXED, {"sequence_parallel": True}, 1e-4),
    "plain float32, like Llama": (
        {"recipe": None, "dtype": jnp.float32, **LLAMA}, {"data": 2, "tensor": 4}, {}, 1e-4,
    ),
    "keys and values left whole by a rule": (
        {"recipe": None, "dtype": jnp.float32}, TENSOR, {"rules": [("/(key|value)/", P())]}, 1e-4,
    ),
    "gradients in bfloat16": ({}, {"data": 2, "fsdp": 2}, {"gradient_dtype": jnp.bfloat16}, 0.02),
    "weights gathered for each microbatch": ({}, FSDP, {"cache_weights": False, "microbatches": 2}, SUMS),
    "a warm start": ({}, FSDP, {"warm_start": True}, SUMS),
    "a warm start, like Llama": (LLAMA, MIXED, {"sequence_parallel": True, "warm_start": True}, NOISE),
    "a row for each device": ({}, {"data": 8}, {}, SUMS),
}  # fmt: skip


SLOW = {
    "like Llama, fsdp", "an untied head", "a head in FP8, data", "recompute", "plain bfloat16",
    "plain float32, like Llama", "a warm start", "a warm start, like Llama", "a row for each device",
}  # fmt: skip


def marked(cases, slow) -> list:
    """Those that others cover as a rule are slow."""
    return [pytest.param(case, marks=pytest.mark.slow if case in slow else ()) for case in cases]


@pytest.mark.parametrize("case", marked(MODELS, SLOW))
def test_models_and_options(case):
    fields, axes, options, tolerance = MODELS[case]
    fields = {"recipe": RECIPE, "num_layers": 1, **fields}
    on_one = {name: value for name, value in options.items() if name in ("microbatches", "warm_start")}
    if MODELS[case][0] or on_one:
        model = gpt(**fields)
        state = first_state_of(model.config, model.recipe)
        of_one = train(fp8.next_token_loss(model), state, tokens(), model.recipe, **on_one)
    else:
        model, state, of_one = of_one_layer()
    ours = train(fp8.next_token_loss(model), state, tokens(), model.recipe, axes=axes, **options)
    assert_same_step(ours, of_one, tolerance)


def test_an_auto_mesh_with_axes_of_one_device():
    model, state, of_one = of_one_layer()
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((1, 2, 1), ("tensor", "fsdp", "data"), axis_types=auto, devices=jax.devices()[:2])
    assert_same_step(train(fp8.next_token_loss(model), state, tokens(), RECIPE, parallel=mesh), of_one, SUMS)


def test_a_param_after_the_logits():
    """Every device of `tensor` has all logits, and its gradient is not doubled."""
    model = Warm()
    state = first_state(model.init, tokens()[:, :-1])
    of_one, ours = (
        train(fp8.next_token_loss(model), state, tokens(), RECIPE, axes=axes)
        for axes in (None, {"tensor": 2, "data": 2})
    )
    assert_same_step(ours, of_one, NOISE)


def test_recompute_has_the_bits_of_what_was_kept():
    states = []
    for recompute in (False, True):
        model, state = gpt(RECIPE, num_layers=1, recompute=recompute), of_one_layer()[1]
        states.append(train(fp8.next_token_loss(model), state, tokens(), RECIPE, axes=TENSOR, sequence_parallel=True))
    (kept, kept_losses), (again, losses) = states
    assert losses == kept_losses
    assert_close(significant(gradients_of(again[0])), significant(gradients_of(kept[0])), 1e-5)
    jax.tree.map(assert_same_bits, again[0].fp8, kept[0].fp8)


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_loss_of_logits(sequence):
    """The logits are those of the whole vocabulary, alike on all devices of `tensor`."""
    model, state, of_one = of_one_layer()

    def loss_fn(variables, batch):
        logits = jnp.asarray(model.apply(variables, batch[:, :-1]), jnp.float32)
        assert logits.shape[-1] == VOCAB
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    ours = train(loss_fn, state, tokens(), RECIPE, axes=TENSOR, sequence_parallel=sequence)
    assert_same_step(ours, of_one, NOISE)


@pytest.mark.parametrize("axes", [{"data": 4}, pytest.param(MIXED, marks=pytest.mark.slow)], ids=str)
def test_ignored_tokens_are_no_part_of_the_mean_over_all_devices(axes):
    """Every device has another number of them, one has none that counts."""
    model = gpt(RECIPE, num_layers=1)
    batch = tokens()
    for row, kept in enumerate([SEQ, 3, 0, 0, 20, 1, 9, 30]):
        batch[row, 1 + kept :] = -1
    loss_fn = fp8.next_token_loss(model, ignore_label=-1, z_loss=1e-4)
    state = of_one_layer()[1]
    of_one, ours = (train(loss_fn, state, batch, RECIPE, axes=where) for where in (None, axes))
    assert_same_step(ours, of_one, NOISE if "tensor" in axes else SUMS)
    of_means = np.mean([jax.jit(loss_fn)(state.variables, part) for part in np.split(batch, 4)])
    assert abs(of_means - of_one[1][0]) > 0.1  # negative control: the mean of the devices' means is another


# ---- models of one's own ---------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """A layer split by columns and one by rows, between layers of Flax that every device has."""

    split: bool = True
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="into")(x)
        by_columns = {"tensor_split": "columns" if self.split else None, "recipe": RECIPE, "name": "up"}
        x = (fp8.LayerNormDense if self.norm else fp8.Dense)(128, **by_columns)(x)
        x = fp8.Dense(64, tensor_split="rows" if self.split else None, recipe=RECIPE, name="down")(nn.gelu(x))
        return nn.Dense(10, name="out")(x.astype(jnp.float32))


X = {
    "x": np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32),
    "labels": (np.arange(64) % 10).astype(np.int32),
}


def loss_of(model):
    def loss_fn(variables, batch):
        logits = jnp.asarray(model.apply(variables, batch["x"]), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    return loss_fn


BY_RULES = [("up/kernel", P(None, "tensor")), ("up/bias", P("tensor")), ("down/kernel", P("tensor", None))]


@pytest.mark.parametrize(
    ("norm", "by_rules"),
    [
        pytest.param(True, False, id="LayerNormDense, fields"),
        pytest.param(False, True, id="Dense, rules"),
        pytest.param(False, False, id="Dense, fields", marks=pytest.mark.slow),
        pytest.param(True, True, id="LayerNormDense, rules", marks=pytest.mark.slow),
    ],
)
def test_layers_of_ones_own_are_split_by_fields_or_by_rules(norm, by_rules):
    model = TwoLayers(split=not by_rules, norm=norm)
    rules = BY_RULES if by_rules else ()
    state = first_state(model.init, X["x"])
    of_one = train(loss_of(model), state, X, RECIPE)
    parallel = fp8.Parallelism(make_mesh(data=2, tensor=2), rules)
    step = fp8.make_train_step(loss_of(model), SHOWING, RECIPE, parallel=parallel, warm_start=False)
    placed = step.place(jax.tree.map(jnp.copy, state), X)
    specs = {name: placed.params[name]["kernel"].sharding.spec for name in ("into", "up", "down")}
    assert specs == {"into": P(), "up": P(None, "tensor"), "down": P("tensor")}
    assert_same_step(run(step, placed, X, 1), of_one, NOISE)


def test_layers_that_say_nothing_are_whole_and_their_gradients_are_not_doubled():
    model = TwoLayers(split=False)
    state = first_state(model.init, X["x"])
    of_one, ours = (train(loss_of(model), state, X, RECIPE, axes=axes) for axes in (None, {"data": 2, "tensor": 2}))
    assert_same_step(ours, of_one, SUMS)


class TwoRecipes(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fp8.Dense(64, recipe=RECIPE, name="delayed")(x)
        return fp8.Dense(32, recipe=fp8.CurrentScaling(power_2_scale=True), name="current")(nn.gelu(x))


@pytest.mark.parametrize("recipe", [RECIPE, None], ids=["delayed", "none"])
def test_layers_with_another_recipe_than_the_step(recipe):
    """They cast their kernels themselves, by their own recipe."""
    model = TwoRecipes() if recipe else fp8.Dense(64, recipe=CURRENT)
    state = first_state(model.init, X["x"])
    of_one, ours = (train(loss_of(model), state, X, recipe, axes=axes) for axes in (None, FSDP))
    assert_same_step(ours, of_one, SUMS)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = fp8.SelfAttention(4, norm="layernorm", residual=True, recipe=RECIPE, name="attention")(x)
        return fp8.LayerNormMLP(128, residual=True, recipe=RECIPE, name="mlp")(x), None


class Stacked(nn.Module):
    """Layers stacked by `nn.scan`, each with a slice of every param."""

    remat: bool = False
    sees_cache: bool = True

    @nn.compact
    def __call__(self, x):
        body = nn.remat(Block, prevent_cse=False) if self.remat else Block
        axes = {"params": 0, "fp8": 0} | ({"fp8_cache": 0} if self.sees_cache else {})
        scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]


def squares(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32) - 1))


STACKED = {
    "fsdp": (FSDP, 1, False, SUMS), "fsdp, microbatches": (FSDP, 2, False, SUMS), "tensor": (TENSOR, 1, False, NOISE),
    "remat": (MIXED, 1, True, NOISE),
}  # fmt: skip


@pytest.mark.parametrize("case", marked(STACKED, {"fsdp", "remat"}))
def test_stacked_layers(case):
    axes, microbatches, remat, tolerance = STACKED[case]
    x, model = jax.random.normal(jax.random.key(1), (8, 16, 64), jnp.bfloat16), Stacked(remat)
    state = first_state(model.init, x)
    of_one, ours = (
        train(squares(model), state, x, RECIPE, axes=where, microbatches=microbatches) for where in (None, axes)
    )
    assert_same_step(ours, of_one, tolerance)


def test_stacked_layers_that_see_no_weight_cache():
    """What a layer must cast itself is gathered as it is, and this is said."""
    x, model = jax.random.normal(jax.random.key(1), (8, 16, 64), jnp.bfloat16), Stacked(sees_cache=False)
    state = first_state(model.init, x)
    of_one = train(squares(model), state, x, RECIPE)
    with pytest.warns(UserWarning, match=r"in their own dtype, and not in FP8: .*layers/mlp/up, .* do not; give nn"):
        ours = train(squares(model), state, x, RECIPE, axes=FSDP)
    assert_same_step(ours, of_one, SUMS)


def test_what_would_be_noticed():
    """Negative control of `NOISE`: a gradient that is doubled, halved, left out, or another's."""
    g = np.random.default_rng(0).normal(size=(2, 64))
    for wrong in (2 * g[0], g[0] / 2, 0 * g[0], g[1], g[0][::-1]):
        assert errors({"g": wrong}, {"g": g[0]})["['g']"] > NOISE
