"""A training step on the device: kernels against the reference on the CPU, and CUDA graphs against plain launches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.ops import kernels
from jax_fp8.train.train_step import CUDA_GRAPH_OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not kernels.built(), reason=str(kernels.missing_reason()))]
CONFIG = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=256, num_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 129), dtype=np.int32)
RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=16), "current": fp8.CurrentScaling(), "bf16": None}
GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}


def train(recipe, steps=8, microbatches=1, compiler_options=CUDA_GRAPH_OPTIONS):
    """Losses of a short run, and the state after it, on the default device."""
    model = fp8.GPT(CONFIG, recipe=recipe)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    tx = fp8.fused_adamw(1e-3)
    state = fp8.TrainState.create(variables=variables, tx=tx)
    loss = fp8.next_token_loss(model)
    step = fp8.make_train_step(loss, tx, recipe, microbatches, compiler_options=compiler_options)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, jnp.asarray(TOKENS))
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_device_trains_like_the_reference(recipe):
    with jax.default_device(jax.devices("cpu")[0]):
        expected, reference_state = train(recipe, compiler_options={})
    actual, state = train(recipe)
    assert actual[-1] < 0.95 * actual[0]
    np.testing.assert_allclose(actual, expected, rtol=5e-3)
    if state.fp8:
        for ours, theirs in zip(jax.tree.leaves(state.fp8), jax.tree.leaves(reference_state.fp8), strict=True):
            assert np.median(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-12)) < 0.2


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_graph_trains_as_plain_launches_do(recipe, microbatches):
    captured, captured_state = train(recipe, 4, microbatches)
    launched, launched_state = train(recipe, 4, microbatches, GRAPHS_OFF)
    np.testing.assert_allclose(
        captured, launched, rtol=1e-4
    )  # the embedding's gradient is summed by atomics, in any order
    assert captured[0] == launched[0]
    for a, b in zip(jax.tree.leaves(captured_state.fp8), jax.tree.leaves(launched_state.fp8), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.1)
