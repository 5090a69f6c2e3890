"""Tokens sorted by expert: every one in its rows, zeros elsewhere, and gradients that are gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.formats import E5M2
from jax_fp8.ops.expert_rows import (
    ExpertRows,
    choices_of_rows,
    combine_rows,
    rows_needed,
    sort_tokens,
    take_own_rows_of_fp8,
    take_rows,
    tokens_with_rows,
    weights_of_rows,
)

SORT, TAKE, COMBINE = jax.jit(sort_tokens, static_argnums=1), jax.jit(take_rows), jax.jit(combine_rows)
TOKENS, CHOICES, EXPERTS, FEATURES = 300, 2, 5, 8


def some_choices(seed=0, experts=EXPERTS, tokens=TOKENS, choices=CHOICES) -> np.ndarray:
    """For each token, so many experts, each once."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)


CASES = {
    "even": some_choices(),
    "one expert for all": np.full((TOKENS, 1), 3, np.int32),
    "some without tokens": some_choices(experts=2),
    "one token": some_choices(tokens=1),
    "every expert": some_choices(choices=EXPERTS, tokens=40),
}


def normal(seed, *shape, dtype=jnp.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def weighted(x, weights, where):
    return combine_rows(take_rows(x, where) * weights_of_rows(weights, where)[:, None], where)


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_in_the_groups_of_its_experts(name):
    choices = CASES[name]
    where = jax.tree.map(np.asarray, SORT(choices, EXPERTS))
    tokens, count = choices.shape
    numbers = np.bincount(choices.reshape(-1), minlength=EXPERTS)
    assert where.starts.dtype == where.rows.dtype == where.pairs.dtype == np.int32
    np.testing.assert_array_equal(where.starts, np.cumsum([0, *(-(-numbers // 128) * 128)]))
    assert where.pairs.size == rows_needed(tokens * count, EXPERTS) >= where.starts[-1]
    for expert in range(EXPERTS):
        group = where.pairs[where.starts[expert] : where.starts[expert + 1]]
        wanted = np.flatnonzero(choices.reshape(-1) == expert)  # in the order of tokens
        np.testing.assert_array_equal(group[: wanted.size], wanted)
        assert (group[wanted.size :] == tokens * count).all()
    assert (where.pairs[where.starts[-1] :] == tokens * count).all()
    np.testing.assert_array_equal(where.pairs[where.rows], np.arange(tokens * count).reshape(tokens, count))


@pytest.mark.parametrize("experts", [1, 3, 8])
def test_the_room_is_the_most_that_groups_need(experts):
    """And no more: some choices take all of it."""
    for pairs in (1, 2, 100, 128, 129, 640):
        most = 0
        for ones in range(min(experts, pairs)):  # experts with one token each; one has the others
            most = max(most, 128 * ones + -(-(pairs - ones) // 128) * 128)
        assert rows_needed(pairs, experts) == most


def test_padding_has_no_row():
    choices = some_choices()
    is_token = np.random.default_rng(4).random(TOKENS) < 0.5
    told = np.where(is_token[:, None], choices, EXPERTS)
    where, alone = SORT(told, EXPERTS), SORT(choices[is_token], EXPERTS)
    assert_same_bits(where.starts, alone.starts)
    np.testing.assert_array_equal(np.asarray(where.rows)[is_token], alone.rows)
    x = normal(5, TOKENS, 32)
    rows = np.asarray(TAKE(x, where))
    found = TAKE(x[is_token], alone)
    assert_same_bits(rows[: found.shape[0]], found)
    assert not rows[found.shape[0] :].any()
    back = np.asarray(COMBINE(rows, where))
    assert_same_bits(back[is_token], COMBINE(found, alone))
    assert not back[~is_token].any() and x[~is_token].any()
    dx = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(combine_rows(take_rows(x, where), where) ** 2)))(x))
    assert not dx[~is_token].any() and dx[is_token].all()


def test_there_and_back_is_exact():
    x = normal(0, TOKENS, FEATURES, dtype=jnp.bfloat16)
    where = SORT(CASES["even"], EXPERTS)
    rows = TAKE(x, where)
    is_filling = np.asarray(where.pairs) == TOKENS * CHOICES
    assert is_filling.any() and not np.asarray(rows)[is_filling].any()
    assert_same_bits(np.asarray(rows)[np.asarray(where.rows)], np.stack([x, x], axis=1))
    assert_same_bits(COMBINE(rows, where), 2 * x)


def test_the_sum_over_choices_and_its_gradients():
    """Against NumPy in float64; where filling rows hold numbers, they reach nothing."""
    choices = CASES["even"]
    where = SORT(choices, EXPERTS)
    x, weights, dy = normal(0, TOKENS, FEATURES), normal(1, TOKENS, CHOICES), normal(2, TOKENS, FEATURES)
    residual, scale = normal(4, TOKENS, FEATURES), normal(3, where.pairs.size, 1)

    @jax.jit
    def differentiate(x, weights, residual, dy):
        def transform(x, weights, residual):
            rows = take_rows(x, where) * scale + weights_of_rows(weights, where)[:, None] + 7 * jnp.sign(scale)
            return combine_rows(rows, where, residual)

        y, pullback = jax.vjp(transform, x, weights, residual)
        return y, *pullback(dy)

    y, dx, dweights, dresidual = differentiate(x, weights, residual, dy)
    of_tokens, x, weights, dy, scale = (np.asarray(array, np.float64) for array in (where.rows, x, weights, dy, scale))
    scale = scale[:, 0][of_tokens.astype(int)]  # (tokens, choices)
    rows = x[:, None, :] * scale[..., None] + (weights + 7 * np.sign(scale))[..., None]
    assert_close(y, rows.sum(axis=1) + residual, "float32")
    assert_close(dx, np.einsum("th,tc->th", dy, scale), "float32")
    assert_close(dweights, np.repeat(dy.sum(axis=1, keepdims=True), CHOICES, axis=1), "float32")
    assert_same_bits(dresidual, dy.astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_weights_of_rows_and_back(name):
    """Every choice that has a row finds its weight there, and the other rows have none."""
    choices = CASES[name].copy()
    choices[0] = EXPERTS  # padding
    where, weights = SORT(choices, EXPERTS), 1 + np.random.default_rng(5).random(choices.shape, np.float32)
    of_rows = np.asarray(jax.jit(weights_of_rows)(weights, where))
    assert np.count_nonzero(of_rows) == np.count_nonzero(choices < EXPERTS)
    wanted = np.where(choices < EXPERTS, weights, 0)
    assert_same_bits(jax.jit(choices_of_rows)(of_rows, where), wanted)
    assert_same_bits(of_rows[np.asarray(where.rows)[1:]], weights[1:])


def test_filling_has_no_gradient():
    where = SORT(CASES["even"], EXPERTS)
    is_filling = np.asarray(where.pairs) == TOKENS * CHOICES
    of_rows = jax.grad(lambda rows: jnp.sum(jnp.sin(combine_rows(rows, where))))
    drows = jax.jit(of_rows)(normal(0, where.pairs.size, FEATURES))
    assert not np.asarray(drows)[is_filling].any() and np.asarray(drows)[~is_filling].all()
    dx = jax.jit(jax.grad(lambda x: jnp.sum(take_rows(x, where)[is_filling])))(normal(0, TOKENS, FEATURES))
    assert not np.asarray(dx).any()


def test_a_token_with_a_wrong_expert_would_be_noticed():
    where = jax.tree.map(np.array, SORT(CASES["even"], EXPERTS))
    swapped = ExpertRows(where.rows.copy(), where.pairs, where.starts)
    swapped.rows[0, 0] = where.rows[1, 0]
    x = normal(0, TOKENS, FEATURES)
    rows = TAKE(x, where)
    right, wrong = COMBINE(rows, where), COMBINE(rows, swapped)
    assert_close(right, 2 * np.asarray(x), "float32")
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(wrong, 2 * np.asarray(x), "float32")


def test_no_scatter_and_no_float_atomics():
    """Every sum has one order: neither direction nor its gradient scatters."""
    where = SORT(CASES["even"], EXPERTS)

    def gradient(x, weights, where):
        return jax.grad(lambda x, weights: jnp.sum(jnp.sin(weighted(x, weights, where))), (0, 1))(x, weights)

    def through_jax(x):
        return jnp.sum(x[where.pairs // CHOICES])

    x, weights = normal(0, TOKENS, FEATURES), np.ones((TOKENS, CHOICES), np.float32)
    assert "scatter" not in str(jax.make_jaxpr(gradient)(x, weights, where))
    assert "scatter" not in str(jax.make_jaxpr(lambda c: sort_tokens(c, EXPERTS))(CASES["even"]))
    assert "scatter" in str(jax.make_jaxpr(jax.grad(through_jax))(x))


def test_each_device_of_an_explicit_mesh_sorts_its_own():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    choices = some_choices(tokens=400)
    x, weights, dy = normal(0, 400, FEATURES), normal(1, 400, CHOICES), normal(2, 400, FEATURES)

    def run(x, weights, choices, dy):
        where = sort_tokens(choices, EXPERTS)
        y, pullback = jax.vjp(lambda x, weights: weighted(x, weights, where), x, weights)
        return where, y, pullback(dy)

    _, y, gradients = jax.jit(run)(x, weights, choices, dy)
    with jax.set_mesh(mesh):
        split = [jax.device_put(array, NamedSharding(mesh, P("data", None))) for array in (x, weights, choices, dy)]
        compiled = jax.jit(run).lower(*split).compile()
        where, y_split, gradients_split = compiled(*split)
    assert_same_bits(y_split, y)
    jax.tree.map(assert_same_bits, gradients_split, gradients)
    assert not any(
        name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )
    for device in range(4):
        own = SORT(choices[100 * device : 100 * (device + 1)], EXPERTS)
        for found, wanted in zip(jax.tree.leaves(where), jax.tree.leaves(own), strict=True):
            size = wanted.shape[0]
            np.testing.assert_array_equal(np.asarray(found)[size * device : size * (device + 1)], wanted)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_tokens_in_fp8(name):
    """They are casts of the rows, and a token without a row counts as zeros."""
    choices = CASES[name].copy()
    choices[0] = EXPERTS  # padding
    where, x = SORT(choices, EXPERTS), normal(3, len(choices), 16, dtype=E5M2)
    rows, transpose = jax.jit(take_own_rows_of_fp8, static_argnums=2)(x, where, True)
    assert_same_bits(rows, TAKE(jnp.asarray(x, jnp.float32), where).astype(E5M2))
    assert_same_bits(transpose, np.asarray(rows).T)
    kept = np.asarray(tokens_with_rows(jnp.asarray(x, jnp.float32), where))
    assert not kept[0].any() and (kept[1:] == x[1:].astype(np.float32)).all()
