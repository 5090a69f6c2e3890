"""A training step on the device: kernels against the reference on the CPU, and CUDA graphs against plain launches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import test_microbatches as micro

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.state.weight_cache import cast_requests, refresh
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not extension.built(), reason=str(extension.missing_reason()))]
CONFIG = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=256, num_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 129), dtype=np.int32)
RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=16), "current": fp8.CurrentScaling(), "bf16": None}
GRAPHS_OFF = {"xla_gpu_enable_command_buffer": ""}


# Sums in a fixed order and no choice of algorithms by speed: two programs that compute the same give the same bits.
DETERMINISTIC = CUDA_GRAPH_OPTIONS | {"xla_gpu_deterministic_ops": True}


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


def losses_with_the_cast(apart, steps, rate=1e-3):
    """Losses, and the state after them, with the next step's FP8 weights written by the optimizer or by their own cast.

    Gradients come from one and the same program, or XLA would be free to add up what it adds up in another order.
    """
    recipe, model = RECIPES["delayed"], fp8.GPT(CONFIG, recipe=RECIPES["delayed"])
    tx = fp8.fused_adamw(rate)
    gradient = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)), compiler_options=DETERMINISTIC)

    @partial(jax.jit, donate_argnums=0)
    def update(state, grads, staged):
        params, opt_state, _, cache = state
        scales = fp8.update_state(staged, recipe)
        request = fp8.InPlace() if apart else fp8.InPlace(cast_requests(cache, params, scales))
        updates, opt_state = tx.update(grads, opt_state, params, in_place=request)
        params = fp8.apply_updates(params, updates)
        return params, opt_state, scales, refresh(cache, params, scales, updates)

    variables = dict(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1]))
    cache = fp8.cast_weights(variables, recipe)
    state = variables["params"], tx.init(variables["params"]), variables["fp8"], cache
    losses = []
    for _ in range(steps):
        read = {"params": state[0], "fp8": state[2], "fp8_cache": state[3]}
        loss, grads, staged = gradient(read, jnp.asarray(TOKENS))
        state = update(state, grads, staged)
        losses.append(float(loss))
    return np.array(losses), jax.device_get(state)


def test_the_optimizer_writes_the_weights_that_a_cast_would(monkeypatch):
    """200 steps: FP8 weights by the optimizer's kernel, and by their own cast, give the same losses and state."""
    attention = jax.nn.dot_product_attention  # cuDNN may add the gradients of its queries in any order
    in_order = lambda *args, **how: attention(*args, **how | {"implementation": "xla"})  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", in_order)
    apart, apart_state = losses_with_the_cast(apart=True, steps=200)
    again, _ = losses_with_the_cast(apart=True, steps=200)
    np.testing.assert_array_equal(again, apart, "the same programs twice: without this there is nothing to compare")
    written, written_state = losses_with_the_cast(apart=False, steps=200)
    np.testing.assert_array_equal(written, apart)
    jax.tree.map(np.testing.assert_array_equal, written_state, apart_state)
    assert apart[-1] < 0.8 * apart[0]
    other, _ = losses_with_the_cast(apart=False, steps=200, rate=1.0001e-3)  # the same bits are not a matter of course
    assert (other != apart).any()


def test_microbatches_have_the_same_bits_however_they_are_run(monkeypatch):
    """Gradients and FP8 state of three steps, each of four microbatches: scanned, with weights cast every time, with a
    cache in the state, unrolled, and driven by the caller. Params stand still, so that what XLA might add up in another
    order in another program could not spread.
    """
    settings = {"tx": micro.STILL, "compiler_options": DETERMINISTIC}
    expected = micro.scanned(4, **settings)
    others = {
        "uncached": micro.scanned(4, cache_weights=False, **settings),
        "cache in the state": micro.scanned(4, cached=True, **settings),
        "caller": micro.driven(4, **settings),
        "caller, uncached": micro.driven(4, cache_weights=False, **settings),
    }
    monkeypatch.setattr(micro.train_step.lax, "scan", micro.unrolled_scan)
    others["unrolled"] = micro.scanned(4, **settings)
    different = {
        f"{name}: {jax.tree_util.keystr(path)}"
        for name, (losses, state) in others.items()
        for path, same in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(
                lambda a, b: bool(np.array_equal(a, b)),
                (losses, micro.gradients_of(state), state.fp8),
                (expected[0], micro.gradients_of(expected[1]), expected[1].fp8),
            )
        )
        if not same
    }
    assert not different
    assert all(np.any(g) for g in jax.tree.leaves(micro.gradients_of(expected[1])))
    other, _ = micro.scanned(2, **settings)  # the same bits are not a matter of course
    assert other != expected[0]
