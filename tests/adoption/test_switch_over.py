"""Models written for Flax alone, switched to FP8: Linen by `dot_general_cls`, NNX by `convert`, and our own layers.

The models are those of Flax's examples in our words: an MLP, and a small language model whose layers are attention and
an MLP behind norms. From the same parameters, the ways that are the same operation have the same losses bit for bit,
and the others within noise, whose size bfloat16 shows.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx

RECIPE = fp8.DelayedScaling(amax_history_len=8)
STEPS, WIDTH, VOCABULARY, HEADS, LENGTH = 30, 64, 32, 4, 16
TX = optax.adamw(3e-3)
SHARE = 2.0**-8  # as one of 256 parts of a batch: without scales, such gradients vanish in FP8


class LinenMLP(nn.Module):
    dense: functools.partial

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.dense(2 * WIDTH, name="first")(x))
        return self.dense(WIDTH, name="second")(x)


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        options = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.first, self.second = nnx.Linear(WIDTH, 2 * WIDTH, **options), nnx.Linear(2 * WIDTH, WIDTH, **options)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class LinenBlock(nn.Module):
    product: functools.partial | None

    @nn.compact
    def __call__(self, x):
        own = {"qkv_dot_general_cls": self.product, "out_dot_general_cls": self.product}
        attention = nn.MultiHeadDotProductAttention(HEADS, dtype=x.dtype, name="attention", **own)
        x = x + attention(nn.LayerNorm(name="norm_1", dtype=x.dtype)(x), mask=nn.make_causal_mask(x[..., 0]))
        dense = functools.partial(nn.Dense, dtype=x.dtype, dot_general_cls=self.product)
        hidden = nn.gelu(dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm_2", dtype=x.dtype)(x)))
        return x + dense(WIDTH, name="down")(hidden)


class LinenLM(nn.Module):
    product: functools.partial | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="tokens", dtype=jnp.bfloat16)(tokens)
        x = x + nn.Embed(LENGTH, WIDTH, name="places", dtype=jnp.bfloat16)(jnp.arange(LENGTH))
        x = LinenBlock(self.product, name="block")(x)
        return nn.Dense(VOCABULARY, dtype=x.dtype, dot_general_cls=self.product, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        own = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, **own), nnx.LayerNorm(WIDTH, **own)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **own)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, **own), nnx.Linear(4 * WIDTH, WIDTH, **own)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NnxLM(nnx.Module):
    def __init__(self, rngs):
        own = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.tokens, self.places = nnx.Embed(VOCABULARY, WIDTH, **own), nnx.Embed(LENGTH, WIDTH, **own)
        self.block = NnxBlock(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, **own)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places(jnp.arange(LENGTH))
        return self.head(self.block(x))


def regression(function, batch):
    return SHARE * jnp.mean(jnp.square(function(batch) - jnp.roll(batch, 1, -1)).astype(jnp.float32))


def next_token(function, batch):
    logits = function(batch[:, :-1]).astype(jnp.float32)
    return SHARE * optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def sequences():
    """Tokens of which each says which two may follow."""
    rng = np.random.default_rng(0)
    successors, tokens = rng.integers(0, VOCABULARY, (VOCABULARY, 2)), np.zeros((STEPS, 16, LENGTH + 1), np.int32)
    tokens[..., 0] = rng.integers(0, VOCABULARY, (STEPS, 16))
    for at in range(LENGTH):
        tokens[..., at + 1] = successors[tokens[..., at], rng.integers(0, 2, (STEPS, 16))]
    return tokens


VECTORS = np.asarray(jax.random.normal(jax.random.key(0), (STEPS, 64, WIDTH), jnp.bfloat16))
TOKENS = sequences()


@functools.partial(jax.jit, static_argnums=(0, 1))
def init(model, seed, first):
    return model.init(jax.random.key(seed), first)


def of_linen(model, loss, batches, params, recipe=RECIPE):
    """Losses of a loop of one's own, and the last state."""
    first = batches[0] if loss is regression else batches[0, :, :-1]
    variables = {**init(model, 0, first), "params": params}

    def of_variables(variables, batch):
        return loss(functools.partial(model.apply, variables), batch)

    state = jax.jit(fp8.warm_start(of_variables, recipe))(variables, batches[0])

    @jax.jit
    def step(params, state, opt_state, batch):
        value, grads, state = fp8.value_and_grad(of_variables)({"params": params, "fp8": state}, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), fp8.update_state(state, recipe), opt_state, value

    opt_state, losses = jax.jit(TX.init)(params), []
    for batch in batches:
        params, state, opt_state, value = step(params, state, opt_state, batch)
        losses.append(float(value) / SHARE)
    return np.array(losses), state


def of_nnx(model, loss, batches, params):
    nnx.update(model, params)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    nnx.jit(fp8.nnx.warm_start(loss))(model, batches[0])

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = fp8.nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return value

    losses = [float(step(model, optimizer, batch)) / SHARE for batch in batches]
    return np.array(losses), fp8.nnx.fp8_state(model)


def converted(kind):
    model = nnx.jit(lambda: kind(nnx.Rngs(0)))()
    fp8.nnx.convert(model, RECIPE)
    return model


def product(recipe=RECIPE):
    return functools.partial(fp8.DotGeneral, recipe=recipe)


@pytest.mark.versions
def test_an_mlp_in_three_ways_bit_for_bit():
    theirs = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
    ours = LinenMLP(functools.partial(fp8.Dense, use_bias=False, recipe=RECIPE))
    plain, switched = LinenMLP(theirs), LinenMLP(functools.partial(theirs, dot_general_cls=product()))
    params = init(plain, 1, VECTORS[0])["params"]
    expected, state = of_linen(ours, regression, VECTORS, params)
    for losses, found in (
        of_linen(switched, regression, VECTORS, params),
        of_nnx(converted(NnxMLP), regression, VECTORS, params),
    ):
        np.testing.assert_array_equal(losses, expected)
        jax.tree.map(np.testing.assert_array_equal, found, state)
    bfloat16, _ = of_linen(plain, regression, VECTORS, params, None)
    assert np.any(bfloat16 != expected)  # the control: another product has other losses
    assert np.max(np.abs(expected / bfloat16 - 1)) < 0.02 and expected[-1] < 0.9 * expected[0]


def flushed(params):
    """What is lost where an output gradient is cast at the scale of 1 that a state begins with."""
    model = LinenLM(product())
    variables = {**init(model, 0, TOKENS[0, :, :-1]), "params": params}
    loss = lambda v, batch: 2.0**-20 * next_token(functools.partial(model.apply, v), batch)  # noqa: E731
    _, grads, _ = jax.jit(fp8.value_and_grad(loss))(variables, TOKENS[0])
    return grads["block"]["up"]["kernel"]


def test_a_language_model_within_noise():
    params = init(LinenLM(), 1, TOKENS[0, :, :-1])["params"]
    bfloat16, _ = of_linen(LinenLM(), next_token, TOKENS, params, None)
    by_product, state = of_linen(LinenLM(product()), next_token, TOKENS, params)
    of_model, nnx_state = of_nnx(converted(NnxLM), next_token, TOKENS, params)
    assert bfloat16[-5:].mean() < 0.8 * bfloat16[0]
    for losses in (by_product, of_model):
        assert abs(losses[-5:].mean() / bfloat16[-5:].mean() - 1) < 0.02
        assert np.any(losses != bfloat16)
    assert not np.any(flushed(params))  # the control: what such a loss looks like without its scales
    scales = state["block"]["up"]["scale"], nnx_state["block"]["up"]["scale"]
    np.testing.assert_allclose(*scales, rtol=0.2)
    assert np.all(scales[0] != 1)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_language_model_in_make_train_step(microbatches):
    """Both in the program of our own layers, with microbatches, and the optimizer in place."""
    params = init(LinenLM(), 1, TOKENS[0, :, :-1])["params"]
    linen, model = LinenLM(product()), converted(NnxLM)
    nnx.update(model, params)
    _, merge = fp8.nnx.split(model)
    losses = []
    for variables, function in (
        (
            {**init(linen, 0, TOKENS[0, :, :-1]), "params": params},
            lambda v: functools.partial(linen.apply, v),
        ),
        (fp8.nnx.split(model)[0], merge),
    ):
        tx = fp8.fused_adamw(3e-3)
        state = fp8.TrainState.create(variables=jax.tree.map(jnp.array, variables), tx=tx)
        step = fp8.make_train_step(
            lambda v, batch, function=function: next_token(function(v), batch), tx, RECIPE, microbatches=microbatches
        )
        for batch in TOKENS[:10]:
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert abs(losses[0] / losses[1] - 1) < 0.02
    assert losses[0] < 0.9 * SHARE * np.log(VOCABULARY)
