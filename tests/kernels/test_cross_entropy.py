"""The loss of rows of logits and its gradient against float64: numbers, shards, labels that are no tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from losses import cross_entropy

from jax_fp8.kernels.cross_entropy import cross_entropy_gradient

BATCH, SEQ, VOCAB = 4, 24, 80


def rows(dtype=jnp.float32):
    """Logits, labels and shares, one of which is 0."""
    logits = (3 * jax.random.normal(jax.random.key(3), (BATCH, SEQ, VOCAB))).astype(dtype)
    shares = np.random.default_rng(2).random((BATCH, SEQ)).astype(np.float32)
    shares[2, 7] = 0
    return logits, jax.random.randint(jax.random.key(4), (BATCH, SEQ), 0, VOCAB), jnp.asarray(shares)


def check_rows(got, wanted, dtype="float32"):
    for array, expected, tolerance in zip(got, wanted, (dtype, "float32", "float32"), strict=True):
        reference.assert_close(array, expected, tolerance)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gradient_of_logits(dtype, z_loss):
    arguments = rows(dtype)
    got = jax.jit(cross_entropy_gradient, static_argnums=3)(*arguments, z_loss)
    assert [array.dtype for array in got] == [dtype, jnp.float32, jnp.float32]
    check_rows(got, cross_entropy(*arguments, z_loss), dtype)
    assert not np.any(got[0][2, 7]) and got[1][2, 7] == 0
    for wrong in (
        cross_entropy(*arguments, z_loss + 0.05),
        cross_entropy(arguments[0], arguments[1] ^ 1, *arguments[2:], z_loss),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            check_rows(got, wrong, dtype)


def test_the_gradient_of_a_row_whose_label_is_no_token():
    logits, labels, shares = rows()
    clean = cross_entropy_gradient(logits, labels, shares, 0.1)
    wrong = labels.at[0, 1].set(-1).at[3, 2].set(VOCAB)
    gradient, losses, lse = (np.array(array) for array in cross_entropy_gradient(logits, wrong, shares, 0.1))
    for at in ((0, 1), (3, 2)):
        assert np.isnan(gradient[at]).all() and np.isnan(losses[at])
        gradient[at], losses[at] = clean[0][at], clean[1][at]
    for array, alone in zip((gradient, losses, lse), clean, strict=True):
        np.testing.assert_array_equal(array, alone)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [("data",), (None, "data"), ((), (), "data"), ("data", (), "tensor")], ids=str)
def test_the_gradient_of_shards(spec, axis_type):
    """Of tokens, and of a vocabulary, over which maximum and sum go; the result is split as the logits are."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    logits, labels, shares = rows()
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        got = jax.jit(cross_entropy_gradient, static_argnums=3)(jax.device_put(logits, place), labels, shares, 0.1)
    check_rows(got, cross_entropy(logits, labels, shares, 0.1))
    assert got[0].sharding.is_equivalent_to(place, 3)


def test_errors_of_the_gradient():
    logits, labels, shares = rows()
    with pytest.raises(
        ValueError, match=r"needs logits \(batch, seq, vocab\) and labels and shares \(batch, seq\), got"
    ):
        cross_entropy_gradient(logits, labels[1:], shares, 0.0)
    with pytest.raises(ValueError, match="needs float32, bfloat16 or float16, got int32; cast first"):
        cross_entropy_gradient(logits.astype(jnp.int32), labels, shares, 0.0)
