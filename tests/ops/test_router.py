"""Routing against NumPy in float64: who goes where, how much it counts, and the losses beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import balance_loss, chosen_experts, dense_weights, softmax
from reference import assert_close

from jax_fp8.ops.router import route as route_eagerly

route = jax.jit(route_eagerly, static_argnums=(2, 3))
TOKENS, FEATURES, EXPERTS = 96, 32, 6


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, FEATURES)).astype(jnp.bfloat16)
    kernel = (rng.normal(size=(FEATURES, EXPERTS)) / 4).astype(np.float32)
    return x, kernel, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("choices", [1, 2, EXPERTS])
def test_against_numpy(choices, normalize):
    x, kernel, logits = inputs()
    routing = route(x, kernel, choices, normalize)
    experts = np.asarray(routing.experts)
    np.testing.assert_array_equal(experts, chosen_experts(logits, choices))
    weights = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(weights, experts, np.asarray(routing.weights, np.float64), axis=1)
    assert_close(weights, dense_weights(logits, choices, normalize), "float32")
    if choices < EXPERTS:
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(weights, dense_weights(logits, choices, not normalize), "float32")
    counts = np.bincount(experts.reshape(-1), minlength=EXPERTS)
    assert_close(routing.fractions, counts / counts.sum(), "float32")
    assert_close(routing.balance_loss, balance_loss(logits, choices), "float32")
    assert_close(routing.z_loss, np.mean(np.log(np.exp(logits).sum(-1)) ** 2), "float32")


@pytest.mark.parametrize("normalize", [True, False])
def test_padding_is_as_if_it_were_not_there(normalize):
    x, kernel, _ = inputs()
    is_token = np.random.default_rng(2).random(TOKENS) < 0.6
    found = route(x, kernel, 2, normalize, is_token)
    alone = route(x[is_token], kernel, 2, normalize)
    np.testing.assert_array_equal(np.asarray(found.experts)[is_token], alone.experts)
    assert (np.asarray(found.experts)[~is_token] == EXPERTS).all() and not np.asarray(found.weights)[~is_token].any()
    assert_close(np.asarray(found.weights)[is_token], alone.weights, "float32")
    for name in ("fractions", "balance_loss", "z_loss"):
        assert_close(getattr(found, name), getattr(alone, name), "float32")
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(getattr(route(x, kernel, 2, normalize), name), getattr(alone, name), "float32")
    of_weights = jax.jit(jax.grad(lambda x: jnp.sum(route(x, kernel, 2, normalize, is_token).weights ** 2)))
    gradient = np.asarray(of_weights(x), np.float32)
    assert np.isfinite(gradient).all() and not gradient[~is_token].any() and gradient[is_token].any()
    nothing = route(x, kernel, 2, normalize, np.zeros(TOKENS, bool))
    assert float(nothing.balance_loss) == 0 == float(nothing.z_loss)


def test_the_balance_loss_is_1_where_experts_are_alike_and_more_where_one_is_used_alone():
    x, kernel = np.eye(EXPERTS, dtype=jnp.bfloat16), 50 * np.eye(EXPERTS, dtype=np.float32)
    even = route(x, kernel, 1)
    alone = route(np.ones((8, EXPERTS), jnp.bfloat16), kernel * (np.arange(EXPERTS) == 0), 1)
    assert abs(float(even.balance_loss) - 1) < 1e-5
    assert abs(float(alone.balance_loss) - EXPERTS) < 1e-3


def test_gradients_of_weights_and_losses():
    """Against differences of NumPy's: the choice itself has no gradient, nor have the fractions."""
    x, kernel, _ = inputs()
    to_weights = np.random.default_rng(1).normal(size=(TOKENS, EXPERTS))

    def loss(kernel):
        routing = route(x, kernel, 2)
        of_experts = jnp.take_along_axis(jnp.asarray(to_weights, jnp.float32), routing.experts, axis=1)
        return jnp.sum(of_experts * routing.weights) + 3 * routing.balance_loss + 0.1 * routing.z_loss

    gradient = np.asarray(jax.jit(jax.grad(loss))(kernel))
    wide, base = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    fractions = np.asarray(route(x, kernel, 2).fractions, np.float64)

    def wanted(kernel):
        logits = wide @ kernel
        balance = EXPERTS * fractions @ softmax(logits).mean(0)
        z_loss = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
        return (to_weights * dense_weights(logits, 2)).sum() + 3 * balance + 0.1 * z_loss

    for at in ((0, 0), (3, 5), (31, 2)):
        step = np.zeros(base.shape)
        step[at] = 1e-5
        slope = (wanted(base + step) - wanted(base - step)) / 2e-5
        assert abs(float(gradient[at]) - slope) < 1e-4 * max(1, abs(slope)), at
    assert np.max(np.abs(gradient)) > 0.1


def test_near_ties_are_decided_in_float32():
    """A router in bfloat16 would send such tokens elsewhere."""
    kernel = np.ones((16, 2), np.float32)
    kernel[0, 1] += 1e-5
    x = np.ones((4, 16), jnp.bfloat16)
    assert (np.asarray(route(x, kernel, 1).experts) == 1).all()
    in_bfloat16 = jax.jit(lambda x, kernel: jax.lax.top_k(x @ kernel, 1)[1])(x, kernel.astype(jnp.bfloat16))
    assert (np.asarray(in_bfloat16) == 0).all()


def test_refusals():
    x, kernel, _ = inputs()
    for choices in (0, EXPERTS + 1):
        with pytest.raises(
            ValueError, match=f"choices must be from 1 to {EXPERTS}, the number of experts, got {choices}"
        ):
            route(x, kernel, choices)
