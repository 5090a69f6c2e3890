"""CrossAttention against Flax's own in float32; padding and documents of either side; a model that reads by it."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import assert_close

import jax_fp8 as fp8

RECIPES = {"bf16": None, "delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}
HEADS, HEAD_DIM = 4, 16


def inputs(dtype=jnp.float32):
    """x (batch, seq, width) and a context, longer and narrower."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(4, 8, 64)).astype(dtype), rng.normal(size=(4, 12, 48)).astype(dtype)


@partial(jax.jit, static_argnums=3)
def flaxs(params, x, context, kv_heads, mask=None):
    """The same by Flax, in float32: (in, heads, head_dim) are its kernels, keys and values repeated for their group."""

    def projection(name):
        kernel, bias = (params[name][leaf].astype(np.float32) for leaf in ("kernel", "bias"))
        repeats = 1 if name == "query" else HEADS // kv_heads
        kernel, bias = kernel.reshape(len(kernel), -1, HEAD_DIM), bias.reshape(-1, HEAD_DIM)
        return {"kernel": kernel.repeat(repeats, axis=1), "bias": bias.repeat(repeats, axis=0)}

    theirs = {name: projection(name) for name in ("query", "key", "value")}
    out = jax.tree.map(lambda leaf: leaf.astype(np.float32), dict(params["out"]))
    theirs["out"] = out | {"kernel": out["kernel"].reshape(HEADS, HEAD_DIM, -1)}
    module = nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * HEAD_DIM, out_features=x.shape[-1])
    return module.apply({"params": theirs}, x.astype(jnp.float32), context.astype(jnp.float32), mask=mask)


def made(module, *args):
    return jax.jit(module.init)(jax.random.key(1), *args)


FAST = {"bf16": (4, 2, 1), "delayed": (2,), "current": (1,), "block": (4, 1)}


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        pytest.param(name, kv_heads, marks=() if kv_heads in FAST[name] else pytest.mark.slow)
        for name in RECIPES
        for kv_heads in (4, 2, 1)
    ],
)
def test_it_is_flaxs(name, kv_heads):
    recipe = RECIPES[name]
    x, context = inputs(jnp.bfloat16)
    module = fp8.CrossAttention(HEADS, kv_heads, recipe=recipe, bias_init=nn.initializers.normal(0.3))
    variables = made(module, x, context)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes["query"]["kernel"] == (64, 64) and shapes["out"]["kernel"] == (64, 64)
    assert shapes["key"]["kernel"] == shapes["value"]["kernel"] == (48, kv_heads * HEAD_DIM)
    if recipe is not None and recipe.has_state:
        assert set(variables["fp8"]) == {"query", "key+value", "out"}
        changed = jax.jit(partial(module.apply, mutable=["fp8"]))(variables, x, context)[1]  # calibrated
        update = jax.jit(partial(fp8.update_state, recipe=recipe))
        variables = variables | {"fp8": update(changed["fp8"])}
    found, kind = jax.jit(module.apply)(variables, x, context), "block" if recipe else "bfloat16"
    assert_close(found, flaxs(variables["params"], x, context, kv_heads), kind)
    params = variables["params"]
    swapped = params | {"key": params["value"], "value": params["key"]}
    for wrong in (flaxs(params, x, context[::-1], kv_heads), flaxs(swapped, x, context, kv_heads)):
        with pytest.raises(AssertionError, match="relative error"):  # negative controls
            assert_close(found, wrong, kind)


def test_gradients_are_flaxs():
    (x, context), module = inputs(), fp8.CrossAttention(HEADS, 2, recipe=None, dtype=jnp.float32)
    params = made(module, x, context)["params"]

    def loss(of, x, context):
        return jnp.sum(jnp.sin(of(x, context)))

    def gradients(of):
        return jax.jit(jax.grad(lambda *args: loss(of, *args), (0, 1)))(x, context)

    ours = gradients(lambda *args: module.apply({"params": params}, *args))
    theirs = gradients(lambda *args: flaxs(params, *args, 2))
    for got, wanted in zip(ours, theirs, strict=True):
        assert_close(got, wanted, "float32")


@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["bf16", "current"])
def test_a_norm_of_x_and_its_residual(recipe):
    x, context = inputs(jnp.bfloat16)
    module = fp8.CrossAttention(HEADS, norm="layernorm", residual=True, recipe=recipe)
    params = made(module, 4 * x, context)["params"]
    normed = jax.jit(nn.LayerNorm().apply)({"params": params["norm"]}, 4 * x.astype(np.float32))
    expected = 4 * x.astype(np.float32) + np.asarray(flaxs(params, normed, context, HEADS))
    found = jax.jit(module.apply)({"params": params}, 4 * x, context)
    assert_close(found, expected, "bfloat16")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(found, expected - 4 * x, "bfloat16")


def test_norms_of_heads():
    (x, context), module = inputs(), fp8.CrossAttention(HEADS, qk_norm=True, recipe=None, dtype=jnp.float32)
    params = made(module, x, context)["params"]
    assert params["query_norm"]["scale"].shape == params["key_norm"]["scale"].shape == (HEAD_DIM,)
    apply = jax.jit(lambda params: module.apply({"params": params}, x, context))
    found = np.asarray(apply(params))
    larger = params | {"key": jax.tree.map(lambda leaf: 9 * np.asarray(leaf), params["key"])}
    assert_close(apply(larger), found, "float32")
    scaled = params | {"key_norm": {"scale": 3 * np.asarray(params["key_norm"]["scale"])}}
    assert np.abs(apply(scaled) - found).max() > 1e-2


def test_padding_and_documents_of_either_side():
    (x, context), module = inputs(), fp8.CrossAttention(HEADS, recipe=None, dtype=jnp.float32)
    variables, apply = made(module, x, context), jax.jit(module.apply)
    lengths, context_lengths = np.int32([3, 8, 5, 8]), np.int32([12, 2, 7, 1])
    found = apply(variables, x, context, lengths=lengths, context_lengths=context_lengths)
    is_own = np.arange(12) < np.asarray(context_lengths)[:, None]
    mask = np.broadcast_to(is_own[:, None, None], (4, 1, 8, 12))
    expected = flaxs(variables["params"], x, context, HEADS, mask)
    is_token = (np.arange(8) < np.asarray(lengths)[:, None])[..., None]
    assert_close(np.where(is_token, found, 1), np.where(is_token, expected, 1), "float32")
    bias = variables["params"]["out"]["bias"]
    np.testing.assert_array_equal(np.where(is_token, bias, found), np.broadcast_to(bias, found.shape))

    segment_ids = np.tile(np.int32([1, 1, 1, 2, 2, 2, 2, 2]), (4, 1))
    of_context = np.tile(np.repeat(np.int32([2, 1]), [4, 8]), (4, 1))
    found = np.asarray(apply(variables, x, context, segment_ids, of_context))
    mask = (segment_ids[:, :, None] == of_context[:, None])[:, None]
    assert_close(found, flaxs(variables["params"], x, context, HEADS, mask), "float32")
    with pytest.raises(AssertionError):
        assert_close(found, flaxs(variables["params"], x, context, HEADS), "float32")
    alone = apply(variables, x[0], context[0], segment_ids[0], of_context[0])
    assert_close(alone, found[0], "float32")


class Reader(nn.Module):
    """It writes the tokens that an encoder has read, the last one first: position by position, by its reading alone."""

    recipe: fp8.DelayedScaling | None

    @nn.compact
    def __call__(self, tokens, lengths):
        table = self.param("embedding", nn.initializers.normal(1.0), (16, 64))
        places = self.param("places", nn.initializers.normal(1.0), (2, tokens.shape[1], 64))
        context = fp8.LayerNormMLP(64, recipe=self.recipe, residual=True, name="encoder")(table[tokens] + places[0])
        x = jnp.broadcast_to(places[1], context.shape).astype(context.dtype)
        x = fp8.CrossAttention(4, norm="layernorm", residual=True, recipe=self.recipe)(x, context, lengths=lengths)
        return fp8.LayerNormDense(16, recipe=self.recipe)(x)


def batch(number, shuffled=False):
    tokens = np.random.default_rng(number).integers(0, 16, (64, 8), np.int32)
    labels = np.roll(tokens[:, ::-1], shuffled, axis=0)
    return {"tokens": tokens, "lengths": np.full(64, 8, np.int32), "labels": labels}


@cache
def step_of(recipe, mesh=None):
    """A step, and how to make the state that it begins with."""
    model = Reader(recipe)

    def loss_fn(variables, batch):
        logits = jnp.asarray(model.apply(variables, batch["tokens"], batch["lengths"]), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    step, args = fp8.make_train_step(loss_fn, fp8.fused_adamw(1e-2), recipe, parallel=mesh), batch(0)
    return step, partial(step.init_state, model.init, jax.random.key(2), args["tokens"], args["lengths"])


def losses(recipe, steps=30, shuffled=False, mesh=None):
    """Of steps on tokens that are new each time; shuffled: the labels are another row's."""
    step, make = step_of(recipe, mesh)
    state, found = make(), []
    for number in range(steps):
        state, metrics = step(state, batch(number, shuffled))
        found.append(float(metrics["loss"]))
    return found


def test_an_encoder_and_a_decoder_learn():
    recipe = fp8.DelayedScaling(amax_history_len=4)
    learned, plain = losses(recipe), losses(None)
    assert learned[0] > 2.5 and learned[-1] < 0.1 and plain[-1] < 0.1
    assert losses(recipe, shuffled=True)[-1] > 2.5  # negative control


@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2, "tensor": 2}, *(pytest.param({axis: 2}, marks=pytest.mark.slow) for axis in ("data", "tensor"))],
    ids=str,
)
def test_on_a_mesh(axes):
    recipe = fp8.DelayedScaling(amax_history_len=4)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[: int(np.prod([*axes.values()]))])
    expected = losses(recipe, steps=4)
    found = losses(recipe, steps=4, mesh=mesh)
    assert found[0] == pytest.approx(expected[0], rel=2e-3)
    assert found == pytest.approx(expected, rel=2e-2) and expected[3] < 0.9 * expected[0]


def test_more_devices_than_key_and_value_heads_are_refused():
    module = fp8.CrossAttention(HEADS, 1, recipe=None)
    x, context = inputs()
    variables = made(module, x, context)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])

    def loss_fn(variables, batch):
        return jnp.mean(jnp.asarray(module.apply(variables, *batch), jnp.float32))

    with pytest.raises(ValueError, match="tensor=2 must divide the key and value heads of key"):
        jax.jit(fp8.value_and_grad(loss_fn, parallel=mesh))(variables, (x, context))


@pytest.mark.parametrize(
    ("args", "told", "message"),
    [
        ((64, (3, 12, 48)), {}, r"must have equally many sequences, got float32\[4, 8, 64\] and float32\[3, "),
        ((64, (12, 48)), {}, r"CrossAttention, context needs an array of 3 dims, got float32\[12, 48\]"),
        ((66, (4, 12, 48)), {}, "num_heads must divide the width, got num_heads=4 and width 66"),
        ((64, (4, 12, 48)), {"segment_ids": jnp.ones((4, 8), int)}, "segment_ids belong together, got one of them"),
        ((64, (4, 12, 48)), {"context_lengths": jnp.ones(3, int)}, r"context: lengths must be an integer array \(4,\)"),
    ],
)
def test_what_is_refused(args, told, message):
    width, shape = args
    with pytest.raises(ValueError, match=message):
        init = partial(fp8.CrossAttention(HEADS).init, **told)
        jax.eval_shape(init, jax.random.key(0), np.ones((4, 8, width), "f4"), np.ones(shape, "f4"))
