"""Layers that drop: what they add to the residual stream, and when."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

X = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
CONTEXT = jax.random.normal(jax.random.key(1), (2, 16, 32), jnp.bfloat16)
RNGS = {"dropout": jax.random.key(2)}
RECIPES = [None, fp8.CurrentScaling()]
LAYERS = {
    "attention": (fp8.SelfAttention, (4,), {"norm": "rmsnorm", "residual": True}, (X,)),
    "cross": (fp8.CrossAttention, (4,), {"norm": "rmsnorm", "residual": True}, (X, CONTEXT)),
    "mlp": (fp8.LayerNormMLP, (128,), {"residual": True}, (X,)),
    "mlp alone": (fp8.LayerNormMLP, (128,), {}, (X,)),
    "experts": (fp8.LayerNormMoE, (128, 4), {"residual": True}, (X,)),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=["bf16", "current"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_adds_is_dropped(name, recipe):
    cls, args, fields, inputs = LAYERS[name]
    plain = cls(*args, **{**fields, "residual": False}, recipe=recipe)
    layer = cls(*args, **fields, recipe=recipe, dropout_rate=0.5)
    params = plain.init(jax.random.key(3), *inputs)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, layer.init(jax.random.key(3), *inputs, deterministic=True)
    )
    branch = np.asarray(plain.apply(params, *inputs), np.float32)
    found = np.asarray(layer.apply(params, *inputs, deterministic=False, rngs=RNGS), np.float32)
    x = np.asarray(X, np.float32) if "residual" in fields else np.zeros_like(found)
    is_kept = found != x
    assert 0.4 < is_kept.mean() < 0.6
    expected = np.where(is_kept, np.asarray(jnp.asarray(x + 2 * branch, jnp.bfloat16), np.float32), x)
    np.testing.assert_array_equal(found, expected)
    fixed = layer.apply(params, *inputs, deterministic=True)
    np.testing.assert_array_equal(fixed, cls(*args, **fields, recipe=recipe).apply(params, *inputs))
    again, other = (
        layer.apply(params, *inputs, deterministic=False, rngs={"dropout": jax.random.key(n)}) for n in (2, 4)
    )
    np.testing.assert_array_equal(again, jnp.asarray(found, jnp.bfloat16))
    assert (other != again).any()


@pytest.mark.parametrize("fields", [{}, {"dropout_rate": 0.0, "deterministic": False}], ids=["default", "rate 0"])
def test_nothing_dropped_is_the_program_of_today(fields):
    def program(**fields):
        block = fp8.TransformerBlock(4, 128, recipe=fp8.CurrentScaling(), **fields)
        variables = jax.eval_shape(block.init, jax.random.key(0), X)
        return str(jax.make_jaxpr(jax.grad(lambda v: block.apply(v, X).astype(jnp.float32).sum()))(variables))

    assert program(**fields) == program(dropout_rate=0.3, deterministic=True)
    assert "random_bits" not in program(**fields)


def block(**fields):
    return fp8.TransformerBlock(4, 128, recipe=fp8.CurrentScaling(), dropout_rate=0.5, **fields)


def test_a_block_drops_both_branches_each_with_its_mask():
    layer = block(deterministic=False)
    variables = layer.init(jax.random.key(3), X)
    found, kept = layer.apply(variables, X, rngs=RNGS, capture_intermediates=True)
    (attended,), (whole,) = (
        kept["intermediates"][name]["__call__"] if name else kept["intermediates"]["__call__"]
        for name in ("attention", "")
    )
    of_attention, of_mlp = attended != X, whole != attended
    assert 0.4 < of_attention.mean() < 0.6 and 0.4 < of_mlp.mean() < 0.6
    assert (of_attention != of_mlp).any()
    np.testing.assert_array_equal(found, block().apply(variables, X, deterministic=False, rngs=RNGS))


class Stack(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return block(deterministic=False)(x), None

        rngs = {"params": True, "dropout": True}
        layer = nn.remat(Layer) if self.remat else Layer
        return nn.scan(layer, variable_axes={"params": 0}, split_rngs=rngs, length=3)(name="layers")(x, None)[0]


def test_under_scan_and_remat():
    """A forward that is computed again has the mask of the first."""
    variables = Stack(False).init(jax.random.key(3), X)

    def gradients(remat):
        def loss(variables):
            return jnp.mean(jnp.square(Stack(remat).apply(variables, X, rngs=RNGS).astype(jnp.float32)))

        return jax.jit(jax.grad(loss))(variables)

    for one, other in zip(*(jax.tree.leaves(gradients(remat)) for remat in (False, True)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3 * np.abs(one).max())


@pytest.mark.parametrize(
    ("fields", "called", "message"),
    [
        ({}, {}, r"dropout_rate=0.5 needs deterministic as .*got neither; pass deterministic=False in training"),
        ({"deterministic": True}, {"deterministic": False}, "needs deterministic as its field or .*got both"),
        ({"deterministic": 1}, {}, "deterministic must be True or False, got 1"),
        ({"dropout_rate": 1.0}, {"deterministic": True}, "of at least 0 and below 1, got 1.0"),
        ({"dropout_rate": "a"}, {"deterministic": True}, "of at least 0 and below 1, got 'a'"),
    ],
)
def test_what_is_refused(fields, called, message):
    with pytest.raises(ValueError, match=message):
        fp8.LayerNormMLP(128, **{"dropout_rate": 0.5, **fields}).init(jax.random.key(0), X, **called)
    with pytest.raises(ValueError, match=r"dropout_rate must be a finite number of at least 0 and below 1, got -0\.1"):
        fp8.GPTConfig.preset("tiny", dropout_rate=-0.1)


WEIGHTS = {name: LAYERS[name] for name in ("attention", "cross")} | {
    "block": (fp8.TransformerBlock, (4, 128), {}, (X,)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_attention_are_dropped(name):
    """With masks of the stream, and none where nothing is dropped; both rates together are one after the other."""
    cls, args, fields, inputs = WEIGHTS[name]
    fields = fields | {"recipe": fp8.CurrentScaling()}
    plain, layer = cls(*args, **fields), cls(*args, **fields, attention_dropout_rate=0.5)
    variables = plain.init(jax.random.key(3), *inputs)

    def dropped(seed, of=layer):
        return np.asarray(of.apply(variables, *inputs, deterministic=False, rngs={"dropout": jax.random.key(seed)}))

    np.testing.assert_array_equal(layer.apply(variables, *inputs, deterministic=True), plain.apply(variables, *inputs))
    np.testing.assert_array_equal(dropped(2), dropped(2))
    assert (dropped(2) != dropped(4)).mean() > 0.5 and (dropped(2) != plain.apply(variables, *inputs)).mean() > 0.5
    both = cls(*args, **fields, attention_dropout_rate=0.5, dropout_rate=0.5)
    assert (dropped(2, both) != dropped(2)).mean() > 0.2
    with pytest.raises(ValueError, match=r"attention_dropout_rate=0.5 needs deterministic as .*got neither"):
        layer.apply(variables, *inputs)


@pytest.mark.parametrize("cls", [fp8.SelfAttention, fp8.CrossAttention])
def test_weights_that_cudnn_would_drop(cls):
    inputs = (X,) if cls is fp8.SelfAttention else (X, CONTEXT)
    layer = cls(4, attention_dropout_rate=0.1, implementation="cudnn")
    with pytest.raises(ValueError, match=r'Attention: cuDNN.s attention cannot drop .*needs implementation="xla"'):
        layer.init(jax.random.key(0), *inputs, deterministic=False)
