"""Layers that attend in FP8: their states, wherever they run, and what they refuse."""

import dataclasses
from functools import cache, partial
from operator import itemgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_close

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=4)
WIDTH, SEQ = 64, 128
X = np.random.default_rng(0).normal(size=(2, SEQ, WIDTH)).astype(jnp.bfloat16)
CONTEXT = np.random.default_rng(1).normal(size=(2, 2 * SEQ, 32)).astype(jnp.bfloat16)
LAYERS = {"self": (fp8.SelfAttention, (X,)), "cross": (fp8.CrossAttention, (X, CONTEXT))}
STATES = ("~scores", "~values", "~gradients")


def layer_of(name="self", fp8_attention=True, **fields):
    options = {"head_dim": 128, "num_kv_heads": 1, "norm": "rmsnorm", "residual": True, "recipe": RECIPE}
    return LAYERS[name][0](2, **{**options, "fp8_attention": fp8_attention, **fields})


def loss_of(layer, inputs):
    cotangent = np.random.default_rng(2).normal(size=X.shape).astype(np.float32)
    return lambda variables: jnp.mean(layer.apply(variables, *inputs).astype(jnp.float32) * cotangent)


def warmed(loss, variables):
    return {**variables, "fp8": jax.jit(fp8.warm_start(loss, RECIPE))(variables)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_layer_of_16_bits(name):
    """Result and gradients of all params, and the amaxes of every tensor that the states have a row for."""
    (layer, plain), inputs = (layer_of(name, of) for of in (True, False)), LAYERS[name][1]
    variables, of_plain = (jax.jit(of.init)(jax.random.key(3), *inputs) for of in (layer, plain))
    jax.tree.map(np.testing.assert_array_equal, variables["params"], of_plain["params"])
    assert set(variables["fp8"]) - set(of_plain["fp8"]) == {*STATES}
    assert jax.tree.map(jnp.shape, variables["fp8"]["~scores"]) == {"scale": (3,), "amax_history": (3, 4)}
    variables, of_plain = warmed(loss_of(layer, inputs), variables), warmed(loss_of(plain, inputs), of_plain)
    assert_close(jax.jit(layer.apply)(variables, *inputs), jax.jit(plain.apply)(of_plain, *inputs), "block")
    (_, grads, state), (_, expected, _) = (
        jax.jit(fp8.value_and_grad(loss_of(of, inputs)))(known) for of, known in ((layer, variables), (plain, of_plain))
    )
    for path, gradient in jax.tree_util.tree_leaves_with_path(grads["params"] if "params" in grads else grads):
        wanted = expected["params"] if "params" in expected else expected
        for key in path:
            wanted = wanted[key.key]
        if path[0].key != "key" or path[-1].key != "bias":  # the gradient of a bias of keys is zero but for rounding
            assert_close(gradient, wanted, "block_gradient")
    staged = {name: np.asarray(state[name]["amax_history"])[:, 0] for name in STATES}
    assert all(row > 0 for row in [*staged["~scores"], *staged["~gradients"], *staged["~values"][1:]])
    assert staged["~values"][0] == 0  # of weights, whose scale is a constant


class Two(nn.Module):
    """Two layers, each used twice in ways that transformations know."""

    how: str

    @nn.compact
    def __call__(self, x):
        if self.how == "scan":
            layers = nn.scan(_Scanned, variable_axes={"params": 0, "fp8": 0}, split_rngs={"params": True}, length=2)
            return layers(name="layers")(x, None)[0]
        a = (nn.remat(fp8.SelfAttention) if self.how == "remat" else fp8.SelfAttention)(**FIELDS, name="a")
        b = fp8.SelfAttention(**FIELDS, name="b")
        if self.how == "vmap" and not self.is_initializing():
            return jax.vmap(lambda x: b(a(x)))(x)
        if self.how == "cond" and not self.is_initializing():
            return jax.lax.cond(x[0, 0, 0] < 1e3, lambda x: b(a(x)), lambda x: x, x)
        return b(a(x))


FIELDS = {"num_heads": 1, "head_dim": 128, "residual": True, "norm": "rmsnorm", "recipe": RECIPE, "fp8_attention": True}


class _Scanned(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return fp8.SelfAttention(**FIELDS, name="layer")(x), None


@cache
def one_after_the_other():
    """The variables of two layers, and loss, gradients and state."""
    plain = Two("loop")
    variables = warmed(loss_of(plain, (X,)), jax.jit(plain.init)(jax.random.key(3), X))
    return variables, jax.jit(fp8.value_and_grad(loss_of(plain, (X,))))(variables)


@pytest.mark.parametrize("how", ["remat", "vmap", "cond", "scan"])
def test_wherever_a_layer_runs(how):
    """The loss, the gradients and the amaxes of all rows are those of the layers one after the other."""
    variables, expected = one_after_the_other()
    if how == "scan":
        variables = {
            name: {"layers": {"layer": jax.tree.map(lambda *of: np.stack(of), tree["a"], tree["b"])}}
            for name, tree in variables.items()
        }
    loss, grads, state = jax.jit(fp8.value_and_grad(loss_of(Two(how), (X,))))(variables)
    if how == "scan":
        grads, state = (
            {name: jax.tree.map(itemgetter(index), tree["layers"]["layer"]) for index, name in enumerate("ab")}
            for tree in jax.device_get((grads, state))
        )
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-3)
    jax.tree.map(lambda one, other: assert_close(one, other, "bfloat16"), grads, expected[1])
    amaxes, wanted = ({of: tree[of]["~gradients"]["amax_history"] for of in "ab"} for tree in (state, expected[2]))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-2), amaxes, wanted)
    assert all(np.all(np.asarray(history)[:, 0] > 0) for history in amaxes.values())


SHAPE = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "hidden_size": WIDTH}
CONFIG = fp8.GPTConfig(**SHAPE, max_seq_len=256, positions="rotary")
TOKENS = np.asarray(jax.random.randint(jax.random.key(4), (4, SEQ + 1), 0, 64))
TX = fp8.fused_adamw(3e-3)


def step_of(mesh=None, fp8_attention=True, microbatches=1, warm_start=False, config=CONFIG, **fields):
    model = fp8.GPT(config, RECIPE, fp8_attention=fp8_attention, **fields)
    options = {"compiler_options": None, "parallel": mesh, "warm_start": warm_start}
    return model, fp8.make_train_step(fp8.next_token_loss(model), TX, RECIPE, microbatches, **options)


def trained(step, state, steps=3):
    losses, fp8_states = [], []
    for _ in range(steps):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
        fp8_states.append(jax.device_get(state.fp8))
    assert metrics["nonfinite_amaxes"] == metrics["underflowing_amaxes"] == 0
    return losses, fp8_states


@cache
def warm():
    """A step, and the variables that have scales."""
    model, step = step_of()
    state = step.init_state(model.init, jax.random.key(5), TOKENS[:, :-1])
    return step, jax.device_get(step.warm_start(state, TOKENS).variables)


def warm_state():
    return fp8.TrainState.create(variables=jax.tree.map(jnp.asarray, warm()[1]), tx=TX)


@cache
def trained_alone():
    return trained(warm()[0], warm_state(), 6)


def test_a_gpt_learns_as_with_16_bits():
    _, step = step_of(fp8_attention=False)
    state = warm_state()
    attention = {name: of for name, of in state.fp8["layer_0"]["attention"].items() if name not in STATES}
    plain = dataclasses.replace(state, fp8={**state.fp8, "layer_0": {**state.fp8["layer_0"], "attention": attention}})
    (found, states), (expected, _) = trained_alone(), trained(step, plain, 6)
    assert found == pytest.approx(expected, rel=5e-3) and found[-1] < found[0] - 0.2 and found != expected
    history = states[-1]["layer_0"]["attention"]["~gradients"]["amax_history"]
    assert (history[:, 1:] > 0).all() and len(np.unique(history[0, 1:])) == 3  # one a step, of each step its own


@pytest.mark.parametrize("how", [{"microbatches": 2}, {"remat": "full"}, {"remat": "norms"}], ids=str)
def test_a_step_records_once(how):
    (found, states), (expected, wanted) = trained(step_of(**how)[1], warm_state()), trained_alone()
    expected = expected[:3]
    assert found == pytest.approx(expected, rel=5e-3)
    for name in STATES:
        histories = (of[2]["layer_0"]["attention"][name]["amax_history"] for of in (states, wanted))
        # A microbatch's gradients count as much as a batch's: with two of them each is twice as large.
        np.testing.assert_allclose(*histories, rtol=1.5 if "microbatches" in how else 1e-2)
    if "microbatches" not in how:
        assert found == expected


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "fsdp": 2}], ids=str)
def test_on_a_mesh(axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[: int(np.prod([*axes.values()]))])
    model, step = step_of(mesh, warm_start="fsdp" in axes)
    if "fsdp" in axes:
        state = step.init_state(model.init, jax.random.key(5), TOKENS[:, :-1])
    else:
        state = step.place(warm_state(), TOKENS)
    found, states = trained(step, state)
    assert found == pytest.approx(trained_alone()[0][:3], rel=3e-3)
    assert (states[-1]["layer_0"]["attention"]["~scores"]["amax_history"][:, -1] > 0).all()


def test_what_generate_writes_is_attended_to_in_16_bits():
    model, plain = (fp8.GPT(CONFIG, RECIPE, fp8_attention=of) for of in (True, False))
    written = [fp8.generate(of, warm()[1], TOKENS[:, :5], max_new_tokens=4) for of in (model, plain)]
    jax.tree.map(np.testing.assert_array_equal, *written)


RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.mark.parametrize(
    ("fields", "told", "message"),
    [
        ({"recipe": None}, {}, r"SelfAttention: FP8 attention needs DelayedScaling, .*got recipe=None; change the"),
        ({"recipe": fp8.CurrentScaling()}, {}, r"needs DelayedScaling, .*got recipe=CurrentScaling"),
        ({"implementation": "xla"}, {}, r'FP8 attention is cuDNN.s on a GPU, got implementation="xla"'),
        (
            {"sliding_window": 8},
            {},
            "has no windows, padding, documents, dropout, scale or cap, got sliding_window; leave that out",
        ),
        ({}, {"lengths": jnp.int32([3, 4])}, "got lengths; leave that out, or use fp8_attention=False"),
        ({}, {"segment_ids": jnp.ones((2, SEQ), jnp.int32)}, "got segment_ids"),
        (
            {"attention_dropout_rate": 0.1, "deterministic": False},
            {},
            "scale or cap, got dropout_rate and dropout_key",
        ),
        ({"head_dim": 64}, {}, "SelfAttention: FP8 attention needs a head_dim of 128, .*got 64"),
        ({"fp8_attention": 1}, {}, "fp8_attention must be True or False, got 1"),
    ],
)
def test_what_is_refused(fields, told, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(layer_of(**fields).init, **told), RNGS, X)


def test_other_lengths_are_refused():
    """But while variables are made, which are those of any length."""
    variables = jax.jit(Two("loop").init)(jax.random.key(0), X[:, :5])
    jax.tree.map(np.testing.assert_array_equal, variables, jax.jit(Two("loop").init)(jax.random.key(0), X))
    with pytest.raises(ValueError, match=r"a: FP8 attention needs sequences of whole blocks of 128 tokens, got 100"):
        jax.eval_shape(Two("loop").apply, variables, X[:, :100])
    of_cross = jax.eval_shape(layer_of("cross").init, jax.random.key(0), X, CONTEXT)
    with pytest.raises(ValueError, match="got 128 tokens that attend to 200"):
        jax.eval_shape(layer_of("cross").apply, of_cross, X, CONTEXT[:, :200])
    alone = jax.jit(layer_of().init)(jax.random.key(0), X)
    apply = jax.jit(layer_of().apply)
    assert_close(apply(alone, X[0]), np.asarray(apply(alone, X))[0], "bfloat16")


def test_a_pipeline_has_no_place_for_its_state():
    mesh = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"got layer_0/attention/~gradients; attend with fp8_attention=False"):
        model, step = step_of(mesh, microbatches=2, config=dataclasses.replace(CONFIG, num_layers=2))
        step(step.init_state(model.init, jax.random.key(5), TOKENS[:, :-1]), TOKENS)


def test_a_step_that_is_diagnosed():
    """It looks at GEMMs, of which these states are none."""
    _, metrics = warm()[0](warm_state(), TOKENS, diagnose=True)
    described = str(jax.tree.map(jnp.shape, metrics))
    assert metrics["nonfinite_amaxes"] == 0 and "query+key+value" in described and "~scores" not in described


def test_with_weights_cast_before_and_gradients_made_afterwards():
    """Whoever goes from a state to its kernels leaves these states out."""
    loss, variables = fp8.next_token_loss(fp8.GPT(CONFIG, RECIPE, fp8_attention=True)), warm()[1]
    expected, grads, state = jax.jit(fp8.value_and_grad(loss))(variables, TOKENS)
    delayed = jax.jit(fp8.value_and_grad(loss, delay_wgrad_compute=True))
    found, others, after, deferred = delayed(variables, TOKENS)
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, after, state)
    others = jax.tree.map(np.add, others, jax.jit(fp8.backward_dw)(deferred))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), others, grads)
    cache = jax.jit(partial(fp8.cast_weights, recipe=RECIPE))(variables)
    assert sorted(cache["layer_0"]["attention"]) == ["out", "query+key+value"]
    assert jax.jit(loss)({**variables, "fp8_cache": cache}, TOKENS) == expected
