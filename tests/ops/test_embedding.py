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
