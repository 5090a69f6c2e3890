"""Rows of a table whose vocabulary is split over devices, and their gradients, beside a look-up on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax.sharding import PartitionSpec as P

from jax_fp8.core.shards import TensorParallel
from jax_fp8.ops.embedding import embed, position_rows

SIZE, VOCAB, HIDDEN, SHAPE = 4, 32, 8, (2, 12)
TABLE = jax.random.normal(jax.random.key(0), (VOCAB, HIDDEN))
TOKENS = jax.random.randint(jax.random.key(1), SHAPE, 0, VOCAB)
WHOLE, SEQUENCE = TensorParallel("tensor", SIZE), TensorParallel("tensor", SIZE, sequence=True)


over_tensor = partial(on_devices, tensor=SIZE)


def flat(rows):
    """This device's rows (batch, seq / size, hidden) as they lie in the flattened ones."""
    return rows.reshape(-1, HIDDEN)


@pytest.mark.parametrize("tensor", [WHOLE, SEQUENCE], ids=["tensor", "sequence"])
def test_rows_are_those_of_one_device(tensor):
    def look_up(table, tokens):
        return flat(embed(table, tokens, tensor, jnp.float32))

    rows = over_tensor(look_up, TABLE, TOKENS, in_specs=(P("tensor"), P()), out_specs=P("tensor"))
    expected = np.asarray(embed(TABLE, TOKENS, None, jnp.float32)).reshape(-1, HIDDEN)
    np.testing.assert_array_equal(expected, TABLE[TOKENS].reshape(-1, HIDDEN))
    if tensor.sequence:
        np.testing.assert_array_equal(rows, expected)
    else:
        np.testing.assert_array_equal(rows.reshape(SIZE, *expected.shape), [expected] * SIZE)


@pytest.mark.parametrize("tensor", [WHOLE, SEQUENCE], ids=["tensor", "sequence"])
def test_gradients_reach_the_device_that_has_the_row(tensor):
    weights = jax.random.normal(jax.random.key(2), (*SHAPE, HIDDEN))
    expected = jax.grad(lambda table: jnp.sum(table[TOKENS] * weights))(TABLE)

    def pulled_back(table, tokens, weights):
        own = weights.reshape(*tensor.own_rows(SHAPE), HIDDEN)
        return jax.vjp(lambda table: embed(table, tokens, tensor, jnp.float32), table)[1](own)[0]

    of_rows = P("tensor") if tensor.sequence else P()
    specs = P("tensor"), P(), of_rows
    gradient = over_tensor(
        pulled_back, TABLE, TOKENS, weights.reshape(-1, HIDDEN), in_specs=specs, out_specs=P("tensor")
    )
    np.testing.assert_allclose(gradient, expected, 1e-6, 1e-6)
    assert jnp.any(expected == 0) and jnp.any(expected != 0)


def test_rows_go_over_the_wire_in_the_dtype_of_activations():
    rows = over_tensor(
        lambda table, tokens: embed(table, tokens, WHOLE, jnp.bfloat16),
        TABLE, TOKENS, in_specs=(P("tensor"), P()), out_specs=P(),
    )  # fmt: skip
    assert rows.dtype == jnp.bfloat16 and jnp.array_equal(rows, TABLE[TOKENS].astype(jnp.bfloat16))


def test_positions_of_own_rows():
    table = jnp.arange(16.0)[:, None] * jnp.ones(HIDDEN)
    rows = over_tensor(
        lambda table: flat(position_rows(table, SHAPE, SEQUENCE)), table, in_specs=P(), out_specs=P("tensor")
    )
    assert rows[:, 0].tolist() == [*range(12), *range(12)]
    assert position_rows(table, SHAPE, WHOLE).shape == (12, HIDDEN)


def test_a_sequence_that_cannot_be_split_is_refused():
    with pytest.raises(
        ValueError, match=r"tensor=4 needs sequences that it divides, got tokens \(2, 10\); pad the seq"
    ):
        embed(TABLE, TOKENS[:, :10], SEQUENCE, jnp.float32)


@pytest.mark.parametrize("tensor", [None, WHOLE, SEQUENCE], ids=["one", "tensor", "sequence"])
def test_what_is_no_token_has_no_row(tensor):
    """And adds no gradient: those of tokens keep their bits."""
    wrong = TOKENS.at[0, 3].set(-1).at[1, 7].set(VOCAB).at[1, 8].set(2**31 - 1)
    weights = jax.random.normal(jax.random.key(2), (*SHAPE, HIDDEN))

    def look_up(table, tokens):
        return flat(embed(table, tokens, tensor, jnp.float32))

    def pull_back(table, tokens, weights):
        rows, pull = jax.vjp(lambda table: look_up(table, tokens), table)
        return pull(weights[: rows.size].reshape(rows.shape) if tensor is None else weights)[0]

    if tensor is None:
        rows, gradient = look_up(TABLE, wrong), pull_back(TABLE, wrong, weights.reshape(-1, HIDDEN))
    else:
        split = P("tensor") if tensor.sequence else P()
        rows = over_tensor(look_up, TABLE, wrong, in_specs=(P("tensor"), P()), out_specs=split)
        specs = P("tensor"), P(), split
        gradient = over_tensor(
            pull_back, TABLE, wrong, weights.reshape(-1, HIDDEN), in_specs=specs, out_specs=P("tensor")
        )
    is_wrong = np.zeros(SHAPE, bool)
    is_wrong[[0, 1, 1], [3, 7, 8]] = True
    np.testing.assert_array_equal(rows, np.where(is_wrong[..., None], np.nan, TABLE[TOKENS]).reshape(-1, HIDDEN))
    counted = jnp.where(is_wrong[..., None], 0, weights)
    expected = jax.grad(lambda table: jnp.sum(table[TOKENS] * counted))(TABLE)
    np.testing.assert_allclose(gradient, expected, 1e-6, 1e-6)


def test_a_table_of_one_device_keeps_the_bits_of_a_plain_look_up():
    weights = jax.random.normal(jax.random.key(2), (*SHAPE, HIDDEN))
    table = TABLE.astype(jnp.bfloat16)

    def value_and_grad(look_up):
        return jax.jit(jax.value_and_grad(lambda table: jnp.sum(look_up(table) * weights)))(table)

    ours = value_and_grad(lambda table: embed(table, TOKENS.astype(jnp.uint8), None, jnp.float32))
    plain = value_and_grad(lambda table: table.astype(jnp.float32)[TOKENS])
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


def test_a_position_that_is_not_there_has_no_row():
    table = jnp.arange(16.0)[:, None] * jnp.ones(HIDDEN)
    rows = position_rows(table, (1, 4), None, jnp.int32([[0, 15, 16, -1]]))
    np.testing.assert_array_equal(rows[0, :, 0], [0, 15, np.nan, np.nan])


@pytest.mark.parametrize("tokens", [TOKENS * 1.0, TOKENS > 0], ids=["float32", "bool"])
def test_tokens_are_integers(tokens):
    with pytest.raises(ValueError, match=r"tokens must be integers, got .*\[2, 12\]; pass token numbers"):
        embed(TABLE, tokens, None, jnp.float32)
