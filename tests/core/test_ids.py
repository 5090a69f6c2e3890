"""Integers of every dtype are the same numbers as int32, and what int32 cannot hold is no token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.core.ids import as_ids, check_ids, check_integers_are_kept, is_token

pytestmark = pytest.mark.versions

DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">u2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_widened(dtype):
    limits = np.iinfo(dtype)
    ids = np.array([0, 7, 100, limits.max, limits.min], dtype)
    found = as_ids(ids)
    assert isinstance(found, np.ndarray) and found.dtype == np.int32
    assert found.tolist() == [max(min(int(x), 2**31 - 1), -(2**31)) for x in ids]
    if ids.dtype.itemsize <= 4 and ids.dtype.isnative:
        traced = jax.jit(as_ids)(ids)
        assert traced.dtype == jnp.int32 and traced.tolist() == found.tolist()


def test_int32_is_left_alone():
    ids = jnp.int32([1, -100])
    assert as_ids(ids) is ids


def test_numbers_beyond_int32_are_no_tokens():
    """Cut to 32 bits, as jax does by itself, the first would be token 5 and the last -100."""
    wide = np.array([2**32 + 5, -(2**40), 2**31], np.int64)
    assert not is_token(as_ids(wide), 2**31 - 1).any() and is_token(wide.astype(np.int32), 2**31 - 1).any()
    unsigned = np.array([2**32 - 100, 2**31], np.uint32)
    assert as_ids(unsigned).tolist() == [2**31 - 1] * 2 and unsigned.astype(np.int32)[0] == -100


def test_a_vocabulary_that_the_dtype_does_not_hold():
    assert is_token(as_ids(np.arange(256, dtype=np.uint8)), 50_304).all()
    assert is_token(as_ids(jnp.arange(200, dtype=jnp.uint8)), 100).sum() == 100


@pytest.mark.parametrize(
    "ids", [np.ones(3), np.ones(3, bool), jnp.ones(3, jnp.float8_e4m3fn), [1, 2], None, 3], ids=str
)
def test_what_is_no_integer_is_refused(ids):
    with pytest.raises(ValueError, match=r"labels must be integers, got .*; pass token numbers"):
        check_ids("labels", ids)
    check_ids("labels", np.ones(3, np.uint8))


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (np.array([[2**32 + 5, 1]]), 2**32 + 5),
        (np.array([[1, -(2**31) - 1]]), -(2**31) - 1),
        (np.array([[1, 2**32]], np.uint64), 2**32),
    ],
)
def test_integers_that_jax_would_cut(array, got):
    with pytest.raises(
        ValueError, match=rf"batch\['tokens'\] must hold integers of at most 32 bits, .*, got {got}; gi"
    ):
        check_integers_are_kept({"x": jnp.ones(3), "tokens": array})
    assert (
        jnp.asarray(array.astype(np.int32))[0].tolist() != array[0].tolist()
    )  # negative control: what jax makes of it


def test_integers_that_jax_keeps():
    largest = {"a": np.array([2**31 - 1, -(2**31)]), "b": np.array([2**32 - 1], np.uint64), "c": np.zeros((0,), int)}
    check_integers_are_kept(largest | {"d": jnp.ones(3), "e": 2**40, "f": np.ones(2)})
