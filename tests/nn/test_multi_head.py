"""What self-attention and cross-attention have in common: fields, projections, and the way back to the residual."""

import jax
import jax.numpy as jnp
import pytest
import reference

import jax_fp8 as fp8

LAYERS = pytest.mark.parametrize("layer", [fp8.SelfAttention, fp8.CrossAttention])


def others(layer):
    """What a layer reads beside `x`."""
    return (jnp.ones((2, 32, 48), jnp.bfloat16),) if layer is fp8.CrossAttention else ()


@LAYERS
@pytest.mark.parametrize("norm", [None, "rmsnorm"])
@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["bf16", "current"])
def test_the_residual_is_the_input_as_it_came(layer, recipe, norm):
    x, rest = 8 * jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16), others(layer)
    without, module = (layer(4, norm=norm, recipe=recipe, residual=residual) for residual in (False, True))
    params = module.init(jax.random.key(1), x, *rest)
    y, branch = module.apply(params, x, *rest), without.apply(params, x, *rest)
    reference.assert_close(y, branch.astype(jnp.float32) + x.astype(jnp.float32), "bfloat16")
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(y, branch, "bfloat16")


@LAYERS
def test_biases_of_projections_and_of_out(layer):
    x, rest = jnp.ones((2, 16, 64), jnp.bfloat16), others(layer)
    for use_bias, use_qkv_bias, with_bias in (
        (True, None, "qkvo"),
        (False, True, "qkv"),
        (True, False, "o"),
        (False, None, ""),
    ):
        module = layer(4, use_bias=use_bias, use_qkv_bias=use_qkv_bias, recipe=None)
        params = jax.eval_shape(module.init, jax.random.key(0), x, *rest)["params"]
        assert {name[0] for name, of in params.items() if "bias" in of} == {*with_bias}


@LAYERS
@pytest.mark.parametrize(
    ("sizes", "fields", "sentence"),
    [
        ((3,), {}, "num_heads must divide the width, got num_heads=3 and width 64"),
        ((4, 3), {}, "num_kv_heads must divide num_heads, got num_kv_heads=3 and num_heads=4"),
        ((4,), {"use_qkv_bias": 1}, "use_qkv_bias must be True or False, got 1"),
        ((4,), {"qk_norm": None}, "qk_norm must be True or False, got None"),
        ((4,), {"implementation": "flash"}, 'implementation must be "cudnn", "xla" or None, got \'flash\''),
    ],
)
def test_fields_that_are_refused(layer, sizes, fields, sentence):
    with pytest.raises(ValueError, match=f"{layer.__name__}: {sentence}"):
        layer(*sizes, **fields).init(jax.random.key(0), jnp.ones((2, 16, 64)), *others(layer))


def test_what_has_no_obvious_place_has_to_be_named():
    with pytest.raises(TypeError, match="positional arguments"):
        fp8.SelfAttention(4, 2, "rmsnorm", True)
