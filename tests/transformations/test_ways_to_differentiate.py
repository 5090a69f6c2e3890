"""A tiny GPT trained in every way that people differentiate: all end where `value_and_grad` ends.

What goes wrong without care is silent: an output gradient that keeps the scale 1 it began with is rounded to zero.
"""

import functools

import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
import reference
from flax import nnx

import jax_fp8 as fp8

pytestmark = pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")

STEPS, RECIPE = 80, fp8.DelayedScaling(amax_history_len=16)
CONFIG = fp8.GPTConfig(vocab_size=64, num_layers=1, num_heads=2, hidden_size=64, max_seq_len=32)
MODEL = fp8.GPT(CONFIG, recipe=RECIPE)
SHARE = 2.0**-8  # the batch is one of 256 in the mean: with a batch of this size alone, little would vanish
TX = optax.adamw(3e-3, eps=1e-12)


def loss_of(model):
    mean = fp8.next_token_loss(model)
    return lambda variables, tokens: SHARE * mean(variables, tokens)


LOSS = loss_of(MODEL)


def batches():
    """Sequences in which a token says which four may follow."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, 64, (64, 4))
    tokens = np.zeros((STEPS, 8, 33), np.int32)
    tokens[..., 0] = rng.integers(0, 64, (STEPS, 8))
    for at in range(32):
        tokens[..., at + 1] = successors[tokens[..., at], rng.integers(0, 4, (STEPS, 8))]
    return jnp.asarray(tokens)


BATCHES = batches()


@functools.cache
def start():
    variables = jax.jit(MODEL.init)(jax.random.key(0), BATCHES[0, :, :-1])
    return variables["params"], variables["fp8"], TX.init(variables["params"])


def query_gradient(grads):
    return grads["layer_0"]["attention"]["query"]["kernel"]


def last_loss(step, first_state=lambda params, state: state):
    """The mean loss of the last ten of 80 steps, and the last gradient of a query kernel."""
    params, state, opt_state = start()
    state, losses = first_state(params, state), []

    @jax.jit
    def train(params, state, opt_state, tokens):
        loss, grads, state = step(params, state, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss, query_gradient(grads)

    for tokens in BATCHES:
        params, state, opt_state, loss, gradient = train(params, state, opt_state, tokens)
        losses.append(float(loss))
    return np.mean(losses[-10:]) / SHARE, gradient


def recorded(params, state, tokens):
    loss, grads, state = fp8.value_and_grad(LOSS)({"params": params, "fp8": state}, tokens)
    return loss, grads, fp8.update_state(state, RECIPE)


def with_mutable(params, state, tokens):
    """As with Flax's batch statistics: the forward stages its amaxes, and `jax.grad` knows nothing of FP8."""

    def loss(params):
        logits, updated = MODEL.apply({"params": params, "fp8": state}, tokens[:, :-1], mutable=["fp8"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return SHARE * losses.mean(), updated["fp8"]

    (loss, staged), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return loss, grads, fp8.update_state(staged, RECIPE)


def plain(params, state, tokens):
    """The state is never updated: every scale but the kernels' is the one that it began with."""
    loss, grads = jax.value_and_grad(lambda params: LOSS({"params": params, "fp8": state}, tokens))(params)
    return loss, grads, state


@pytest.fixture(scope="module")
def expected():
    return last_loss(recorded)[0]


WARM_START = jax.jit(fp8.warm_start(LOSS, RECIPE))


def warmed(params, state):
    return WARM_START({"params": params, "fp8": state}, BATCHES[0])


@pytest.mark.parametrize("step", [recorded, with_mutable, plain])
def test_every_way_learns_the_same(step, expected):
    loss, gradient = last_loss(step, warmed)
    assert np.any(gradient), "a gradient of zeros"
    assert abs(loss / expected - 1) < 0.02


def test_bfloat16_learns_the_same_and_a_flushed_gradient_does_not(expected):
    """The scale of the comparison: what noise is, and what is lost where output gradients vanish."""
    model = fp8.GPT(CONFIG, recipe=None)
    loss = loss_of(model)

    def bfloat16(params, state, tokens):
        value, grads = jax.value_and_grad(lambda params: loss({"params": params}, tokens))(params)
        return value, grads, state

    def flushed(params, state, tokens):
        """What a plain gradient was before: the state's scale of 1 is believed."""
        value, grads, _ = fp8.value_and_grad(LOSS)({"params": params, "fp8": state}, tokens)
        return value, grads, state

    assert abs(last_loss(bfloat16)[0] / expected - 1) < 0.02
    lost, gradient = last_loss(flushed)
    assert not np.any(gradient)
    assert lost > 1.05 * expected


def test_through_an_nnx_bridge(expected):
    model = nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0)).lazy_init(BATCHES[0, :, :-1])
    params, _, _ = start()
    nnx.update(model, nnx.State(params))  # the same weights as in the other runs
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def loss(model, tokens):
        logits = model(tokens[:, :-1], mutable=["fp8"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return SHARE * losses.mean()

    @nnx.jit
    def train(model, optimizer, tokens):
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, grads)
        staged = nnx.state(model, is_fp8)
        updated = fp8.update_state(nnx.to_pure_dict(staged), RECIPE)
        nnx.replace_by_pure_dict(staged, updated)
        nnx.update(model, staged)
        return value, query_gradient(grads)[...]

    losses = []
    for tokens in BATCHES:
        value, gradient = train(model, optimizer, tokens)
        losses.append(float(value))
    assert np.any(gradient)
    assert abs(np.mean(losses[-10:]) / SHARE / expected - 1) < 0.02


def is_fp8(_path, variable):
    return type(variable).__name__ == "fp8"


def test_a_warm_start_is_the_first_step_of_current_scaling():
    """Its scales are those of the tensors of the pass, from current scaling; its history has them once."""
    x, weights = layers.inputs()
    module, tiny = layers.dense(), 2.0**-30
    variables = module.init(jax.random.key(0), x)
    warmed = jax.jit(fp8.warm_start(layers.weighted_sum(module), layers.RECIPE))(variables, x, tiny * weights)
    kernel = variables["params"]["kernel"]
    amaxes = [reference.amax(array) for array in (x, kernel, tiny * weights)]
    scales = [reference.scale_from_amax(a, d) for a, d in zip(amaxes, (fp8.E4M3, fp8.E4M3, fp8.E5M2), strict=True)]
    np.testing.assert_array_equal(warmed["scale"], np.float32(scales))
    np.testing.assert_array_equal(warmed["amax_history"][:, -1], np.float32(amaxes))
    np.testing.assert_array_equal(warmed["amax_history"][:, :-1], 0)
    _, grads, _ = jax.jit(fp8.value_and_grad(layers.weighted_sum(module)))(
        {**variables, "fp8": warmed}, x, tiny * weights
    )
    _, cold, _ = jax.jit(fp8.value_and_grad(layers.weighted_sum(module)))(variables, x, tiny * weights)
    assert np.any(grads["kernel"]) and not np.any(cold["kernel"])


def test_a_warm_start_keeps_what_was_calibrated_and_has_nothing_to_do_without_state():
    x, weights = layers.inputs()
    module = layers.dense()
    variables = module.init(jax.random.key(0), x)
    _, staged = module.apply(variables, 8 * x, mutable=["fp8"])
    calibrated = fp8.update_state(staged["fp8"], layers.RECIPE)
    warmed = fp8.warm_start(layers.weighted_sum(module), layers.RECIPE)({**variables, "fp8": calibrated}, x, weights)
    np.testing.assert_array_equal(warmed["scale"][:2], calibrated["scale"][:2])
    assert warmed["scale"][2] != calibrated["scale"][2]
    current = fp8.Dense(layers.FEATURES, recipe=fp8.CurrentScaling())
    loss = layers.weighted_sum(current)
    assert fp8.warm_start(loss, fp8.CurrentScaling())({"params": variables["params"]}, x, weights) == {}
