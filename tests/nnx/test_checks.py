"""What NNX layers refuse, in a sentence."""

import functools

import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, RECIPE, X

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions


def layer(cls=fp8.nnx.Linear, sizes=(FEATURES, HIDDEN), **options):
    return functools.partial(cls, *sizes, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (layer(sizes=(24, 32)), r"Linear\(24, 32\): FP8 needs in features divisible by 16, got 24; pad them"),
        (
            layer(fp8.nnx.LayerNormMLP, (32, 24)),
            r"LayerNormMLP\(32, 24\): FP8 needs out features divisible by 16, got 24",
        ),
        (layer(sizes=(32.0, 32)), r"Linear\(32.0, 32\): in_features must be an integer"),
        (layer(recipe="fp8"), r"recipe must be DelayedScaling"),
        (layer(recompute=1), r"recompute must be True or False, got 1"),
        (layer(param_dtype=jnp.int8), r"param_dtype must be"),
        (layer(fp8.nnx.LayerNormLinear, norm="batchnorm"), r"norm must be one of"),
        (layer(fp8.nnx.LayerNormMLP, epsilon=-1.0), r"epsilon must be a finite number that is not negative, got -1.0"),
        (layer(fp8.nnx.LayerNormMLP, activation="sin"), r"activation must be one of"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sharding_of_the_result_is_refused():
    with pytest.raises(ValueError, match=r"Linear\(32, 32\): out_sharding must be None where"):
        layer(sizes=(32, 32), recipe=RECIPE)()(X, "x")


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"Linear\(32, 64\) needs an array whose last dim is 32, got .*64"):
        layer()()(jnp.ones((4, 64)))
    assert layer(sizes=(24, 30), recipe=None)()(jnp.ones((4, 24))).shape == (4, 30)  # without FP8 any size will do
