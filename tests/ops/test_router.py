"""Routing against NumPy in float64: who goes where, how much it counts, and the losses beside it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import balance_loss, chosen_experts, dense_weights, scores_of, softmax
from reference import assert_close

from jax_fp8.ops import router
from jax_fp8.ops.router import LOAD_GRADIENT, RouterRule, router_logits
from jax_fp8.ops.router import route as route_by_rule

TOKENS, FEATURES, EXPERTS = 96, 32, 6


@functools.partial(jax.jit, static_argnums=(2, 3))
def route(x, kernel, choices, normalize=True, is_token=None):
    return route_by_rule(x, kernel, RouterRule(choices, normalize_weights=normalize), is_token=is_token)


routed = jax.jit(route_by_rule, static_argnums=2)


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


def products(x, kernel, dlogits):
    logits, pullback = jax.vjp(router_logits, x, kernel)
    return logits, *pullback(dlogits)


def test_products_with_pieces_are_those_of_float32(monkeypatch):
    """Of bfloat16 tokens. Negative control: two pieces of three are noticed, but for a gradient that is rounded."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(256, 384)), jnp.bfloat16)
    kernel, dlogits = (random.normal(size=shape).astype(np.float32) for shape in ((384, 24), (256, 24)))
    a, b, c = (np.asarray(array.astype(np.float32), np.float64) for array in (x, kernel, dlogits))
    wanted = a @ b, c @ b.T, a.T @ c

    def errors():
        found = jax.jit(lambda *given: products(*given))(x, kernel, dlogits)  # traced anew
        assert [array.dtype for array in found] == [jnp.float32, jnp.bfloat16, jnp.float32]
        return [
            np.abs(np.asarray(got, np.float64) - of).max() / np.abs(of).max()
            for got, of in zip(found, wanted, strict=True)
        ]

    logits, dx, dkernel = errors()
    assert max(logits, dkernel) < 5e-7 and dx < 2**-8
    monkeypatch.setattr(router, "PIECES", 2)
    monkeypatch.setattr(router, "_sum", lambda products: products[:, 0] + products[:, 1])
    logits, _, dkernel = errors()
    assert min(logits, dkernel) > 5e-7


def test_pieces_are_a_float32_number():
    x = np.random.default_rng(1).normal(size=4096).astype(np.float32) * np.float32(2) ** np.arange(-64, 64).repeat(32)
    pieces = [np.asarray(piece, np.float64) for piece in jax.jit(router._pieces)(x)]
    np.testing.assert_array_equal(sum(pieces), x.astype(np.float64))
    assert all(piece.dtype == jnp.bfloat16 for piece in router._pieces(x))


def test_on_gpus_bfloat16_tokens_are_multiplied_in_bfloat16():
    for dtype, wanted in ((jnp.bfloat16, "bf16"), (jnp.float32, "f32")):
        given = (jax.ShapeDtypeStruct(shape, of) for shape, of in (((32, 16), dtype), ((16, 8), jnp.float32)))
        text = jax.jit(products).trace(*given, jax.ShapeDtypeStruct((32, 8), jnp.float32))
        dots = re.findall(
            r"dot_general .*: \((.*)\) -> tensor<(.*)>", text.lower(lowering_platforms=("cuda",)).as_text()
        )
        assert len(dots) == 3
        for operands, result in dots:
            assert set(re.findall(r"x([a-z]+\d+)>", operands)) == {wanted} and result.endswith("f32")


# ---- sigmoid, groups, a bias -----------------------------------------------------------------------------------------

MANY = 12  # experts
RULES = {
    "sigmoid": {"scores": "sigmoid"},
    "scores as they are, scaled": {"scores": "sigmoid", "normalize": False, "scale": 2.5},
    "bias": {"scores": "sigmoid", "bias": True},
    "bias of softmax": {"bias": True, "normalize": False},
    "groups": {"groups": 4, "groups_per_token": 2},
    "groups by their best expert": {"groups": 4, "groups_per_token": 2, "group_score_experts": 1},
    "all of it": {"scores": "sigmoid", "bias": True, "groups": 3, "groups_per_token": 2, "scale": 2.5},
}


def inputs_of(name):
    """Of a rule: tokens, kernel and bias, logits in float64, the rule, and its fields for the reference."""
    x, kernel, logits = inputs_of_many(7)
    fields = dict(RULES[name])
    bias = np.random.default_rng(3).normal(size=MANY).astype(np.float32) * 0.3 if fields.pop("bias", False) else None
    ours = {{"normalize": "normalize_weights"}.get(field, field): value for field, value in fields.items()}
    reference = fields | ({} if bias is None else {"bias": bias.astype(np.float64)})
    return x, kernel, bias, logits, RouterRule(4, **ours), reference


def inputs_of_many(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, FEATURES)).astype(jnp.bfloat16)
    kernel = (rng.normal(size=(FEATURES, MANY)) / 4).astype(np.float32)
    return x, kernel, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)


def dense(routing, experts=MANY):
    weights = np.zeros((len(routing.experts), experts))
    np.put_along_axis(weights, np.asarray(routing.experts), np.asarray(routing.weights, np.float64), axis=1)
    return weights


@pytest.mark.parametrize("name", RULES)
def test_every_rule_against_numpy(name):
    x, kernel, bias, logits, rule, reference = inputs_of(name)
    routing = routed(x, kernel, rule, bias)
    without = {field: value for field, value in reference.items() if field not in ("normalize", "scale")}
    np.testing.assert_array_equal(routing.experts, chosen_experts(logits, 4, **without))
    assert_close(dense(routing), dense_weights(logits, 4, **reference), "float32")
    assert_close(routing.balance_loss, balance_loss(logits, 4, **without), "float32")
    plain = chosen_experts(logits, 4)
    if name in ("sigmoid", "scores as they are, scaled"):  # which has the order of the logits, too
        np.testing.assert_array_equal(routing.experts, plain)
        assert not np.allclose(dense(routing), dense_weights(logits, 4), rtol=0.05)
    else:
        assert np.mean(np.any(np.asarray(routing.experts) != plain, axis=1)) > 0.2
    if name.startswith("groups"):
        other = without | {"group_score_experts": 3 - without.get("group_score_experts", 2)}
        assert np.any(chosen_experts(logits, 4, **other) != np.asarray(routing.experts))


def test_a_bias_gets_the_load_for_its_gradient_and_takes_part_in_no_weight():
    x, kernel, bias, _, rule, _ = inputs_of("all of it")

    def loss(kernel, bias, x):
        return jnp.sum(routed(x, kernel, rule, bias).weights ** 2)

    dkernel, load = jax.jit(jax.grad(loss, argnums=(0, 1)))(kernel, bias, x)
    fractions = np.asarray(routed(x, kernel, rule, bias).fractions)
    assert_close(load, (fractions - 1 / MANY) * LOAD_GRADIENT, "float32")
    assert np.ptp(fractions) > 0.02  # or the bound were one for zeros
    chosen = routed(x, kernel, rule, bias).experts

    def of_weights(kernel):  # the same experts, chosen without a bias
        scores = jax.nn.sigmoid(jnp.asarray(x, jnp.float32) @ kernel)
        own = jnp.take_along_axis(scores, chosen, axis=1)
        return jnp.sum((rule.scale * own / jnp.sum(own, axis=1, keepdims=True)) ** 2)

    with jax.default_matmul_precision("highest"):
        assert_close(dkernel, jax.jit(jax.grad(of_weights))(kernel), "float32")


def test_the_load_is_a_mean_over_microbatches_and_leaves_padding_out():
    x, kernel, bias, _, rule, _ = inputs_of("bias")
    loads = jax.jit(jax.grad(lambda bias, x, is_token: jnp.sum(routed(x, kernel, rule, bias, is_token).weights)))
    everything = np.ones(TOKENS, bool)
    halves = [loads(bias, half, everything[:48]) for half in (x[:48], x[48:])]
    assert_close(sum(halves) / 2, loads(bias, x, everything), "float32")
    padded = loads(bias, x, np.arange(TOKENS) < 48)
    assert_close(padded, halves[0], "float32")
    assert not np.allclose(padded, loads(bias, x, everything), rtol=0.05)
    assert not np.asarray(loads(bias, x, ~everything)).any()


def test_scores_that_vanish_are_no_nan():
    """Sigmoids of large negative logits are 0, and so is their sum."""
    x, kernel = np.ones((4, FEATURES), jnp.bfloat16), np.full((FEATURES, 4), -100, np.float32)
    rule = RouterRule(2, scores="sigmoid")
    found = jax.jit(jax.value_and_grad(lambda kernel: jnp.sum(routed(x, kernel, rule).weights)))(kernel)
    assert float(found[0]) == 0 and np.isfinite(np.asarray(found[1])).all()


@pytest.mark.parametrize(
    ("sentence", "fields"),
    [
        ("experts_per_token must be at most num_experts, got 13 of 12", {"choices": 13}),
        ("experts_per_token must be an integer of at least 1, got 0", {"choices": 0}),
        ('router_scores must be "softmax" or "sigmoid", got \'tanh\'', {"scores": "tanh"}),
        ("router_scale must be a finite number above 0, got 0", {"scale": 0}),
        ("expert_groups must divide num_experts, got 5 groups of 12 experts", {"groups": 5}),
        ("groups_per_token must be an integer from 1 to 3, got 4", {"groups": 3, "groups_per_token": 4}),
        ("at most the 2 experts of a group, got 3", {"groups": 6, "groups_per_token": 2, "group_score_experts": 3}),
        ("at most 4, the experts of groups_per_token=1 groups, got 5", {"groups": 3, "choices": 5}),
    ],
)
def test_refusals(sentence, fields):
    x, kernel, _ = inputs_of_many(0)
    with pytest.raises(ValueError, match=sentence):
        routed(x, kernel, RouterRule(**{"choices": 2} | fields))


def test_the_entropy_is_that_of_the_scores_over_the_largest():
    x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    for scores in ("softmax", "sigmoid"):
        shares = scores_of(x.astype(np.float64) @ kernel, scores)
        shares /= shares.sum(-1, keepdims=True)
        wanted = np.mean(-np.sum(shares * np.log(shares), axis=-1)) / np.log(8)
        assert float(route_by_rule(x, kernel, RouterRule(2, scores)).entropy) == pytest.approx(wanted, rel=1e-5)
    assert float(route_by_rule(x, 0 * kernel, RouterRule(2)).entropy) == pytest.approx(1)
    assert float(route_by_rule(x, 1e4 * kernel, RouterRule(2)).entropy) == pytest.approx(0, abs=1e-3)
    gradient = jax.grad(lambda kernel: route_by_rule(x, kernel, RouterRule(2)).entropy)(jnp.asarray(kernel))
    assert not np.asarray(gradient).any()
