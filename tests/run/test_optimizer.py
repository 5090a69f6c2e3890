"""The optimizer of a run: the learning rate of every step, and AdamW with clipping as Optax has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_fp8.models.config import GPTConfig
from jax_fp8.run.optimizer import learning_rate_schedule, make_optimizer
from jax_fp8.run.settings import Settings
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.train_step import make_train_step

PEAK, FINAL = 1e-3, 1e-4


def rates(**options):
    settings = Settings(steps=100, learning_rate=PEAK, **options)
    return np.array([learning_rate_schedule(settings)(step) for step in range(100)])


def rising(steps):
    """From a part of the peak, towards the peak in the step after."""
    return PEAK / steps + (PEAK - PEAK / steps) * np.arange(steps) / steps


def test_by_default_it_rises_for_a_tenth_and_falls_to_zero():
    found = rates()
    np.testing.assert_allclose(found[:10], rising(10), rtol=1e-6)
    np.testing.assert_allclose(found[10:], PEAK * (1 - np.arange(90) / 91), rtol=1e-5)
    assert found[-1] > 0  # the last step learns


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_ends_at_the_final_learning_rate(decay):
    found, passed = rates(decay=decay, final_learning_rate=FINAL, warmup_steps=20), np.arange(80) / 81
    np.testing.assert_allclose(found[:20], rising(20), rtol=1e-6)
    left = 1 - passed if decay == "linear" else (1 + np.cos(np.pi * passed)) / 2
    np.testing.assert_allclose(found[20:], FINAL + (PEAK - FINAL) * left, rtol=1e-5)


def test_it_may_be_constant_without_warmup():
    np.testing.assert_allclose(rates(decay="constant", warmup_steps=0), PEAK, rtol=1e-6)


@pytest.mark.parametrize(("decay_steps", "count"), [(None, 20), (30, 30), (100, 90)])
def test_it_may_fall_at_the_end_only(decay_steps, count):
    found = rates(decay="warmup-stable-decay", final_learning_rate=FINAL, decay_steps=decay_steps)
    np.testing.assert_allclose(found[10 : 100 - count], PEAK, rtol=1e-6)
    passed = np.arange(count) / (count + 1)
    np.testing.assert_allclose(found[100 - count :], PEAK + (FINAL - PEAK) * passed, rtol=1e-5)


OPTIONS = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.3, "max_grad_norm": 0.5}
TINY = GPTConfig.preset("tiny")
SETTINGS = Settings(steps=8, learning_rate=0.1, warmup_steps=2, **OPTIONS)


def trained(tx):
    """Params after four steps, in place where the optimizer is ours; their gradients are larger than the norm."""
    generator = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(generator.standard_normal((16, 32)), jnp.float32)}
    step = make_train_step(
        lambda variables, batch: jnp.sum(jnp.square(variables["params"]["kernel"] - batch)), tx, None
    )
    state = TrainState.create(variables={"params": params}, tx=tx)
    for _ in range(4):
        state, _ = step(state, jnp.asarray(generator.standard_normal((16, 32)), jnp.float32))
    return state.params["kernel"]


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_it_is_optax_with_clipping(max_grad_norm):
    settings = dataclasses.replace(SETTINGS, max_grad_norm=max_grad_norm)
    adamw = optax.adamw(learning_rate_schedule(settings), b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3)
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    found = trained(make_optimizer(settings, TINY))
    np.testing.assert_allclose(found, trained(optax.chain(clip, adamw)), rtol=2e-5, atol=1e-6)
    for option, value in (("b1", 0.7), ("b2", 0.8), ("eps", 0.1), ("weight_decay", 0.0)):  # negative control
        other = trained(make_optimizer(dataclasses.replace(settings, **{option: value}), TINY))
        assert np.abs(other - found).max() > 1e-3, option


def test_gradients_that_are_clipped_weigh_less_against_epsilon():
    """Adam hardly sees their size otherwise: a negative control for the clipping above."""
    large = {"eps": 0.1, "weight_decay": 0.0}
    clipped, free = (
        trained(make_optimizer(dataclasses.replace(SETTINGS, max_grad_norm=norm, **large), TINY)) for norm in (0.5, 0.0)
    )
    assert np.abs(clipped - free).max() > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_moments_are_kept_in_few_bits(dtype):
    params = {"kernel": jnp.ones((16, 16))}
    state = make_optimizer(Settings(mu_dtype=dtype, nu_dtype="bfloat16"), TINY).init(params)
    dtypes = [leaf.dtype.name for leaf in jax.tree.leaves((state.mu, state.nu)) if leaf.ndim == 2]
    assert dtypes == [dtype, "bfloat16"]


def test_correction_biases_follow_the_load_unless_they_are_frozen():
    model = GPTConfig.preset("tiny-moe", num_layers=2, router_correction_bias=True, dense_layers=(0,))
    bias = {"layer_1": {"mlp": {"router": {"correction_bias": jnp.zeros(4)}}}, "kernel": jnp.ones((4, 4))}
    load = jax.tree.map(lambda param: 1e-7 * jnp.arange(-2.0, 2).astype(param.dtype) + 0 * param, bias)

    def moved(settings, model=model):
        tx = make_optimizer(settings, model)
        updates, _ = tx.update(load, tx.init(bias), bias)
        return np.asarray(updates["layer_1"]["mlp"]["router"]["correction_bias"])

    np.testing.assert_allclose(moved(SETTINGS), [1e-3, 1e-3, 0, -1e-3])
    np.testing.assert_allclose(moved(dataclasses.replace(SETTINGS, freeze="kernel")), [1e-3, 1e-3, 0, -1e-3])
    assert not moved(dataclasses.replace(SETTINGS, freeze="router/")).any()
    assert not moved(dataclasses.replace(SETTINGS, freeze="layer_1/mlp")).any()
    with pytest.raises(ValueError, match="must not train the correction bias"):
        moved(SETTINGS, TINY)
