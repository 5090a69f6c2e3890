"""The NNX MLP: its GEMMs and their state. Its numbers are those of the Linen one (test_layers.py)."""

import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, RECIPE, X

import jax_fp8.nnx


def test_shapes_alone():
    model = nnx.eval_shape(lambda: jax_fp8.nnx.LayerNormMLP(FEATURES, HIDDEN, recipe=RECIPE, rngs=nnx.Rngs(0)))
    assert model.fp8["down"].amax_history.shape == (3, RECIPE.amax_history_len)


@pytest.mark.parametrize(("activation", "gemms"), [("gelu", {"up", "down"}), ("swiglu", {"gate+up", "down"})])
def test_gate_and_up_are_one_gemm(activation, gemms):
    model = jax_fp8.nnx.LayerNormMLP(FEATURES, HIDDEN, activation=activation, recipe=RECIPE, rngs=nnx.Rngs(0))
    assert set(model.fp8) == gemms and hasattr(model, "gate") == ("gate+up" in gemms)
    assert model(X).shape == X.shape


def test_without_a_recipe_there_is_no_state():
    assert jax_fp8.nnx.LayerNormMLP(FEATURES, HIDDEN, recipe=None, rngs=nnx.Rngs(0)).fp8 is None
