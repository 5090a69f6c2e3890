"""What a model reads of a batch, and which of its next tokens count."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.models.batch import Reading

TOKENS = jnp.int32([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])


def test_tokens_alone():
    found = Reading.of(TOKENS, None)
    np.testing.assert_array_equal(found.tokens, TOKENS[:, :-1])
    np.testing.assert_array_equal(found.labels, TOKENS[:, 1:])
    assert found.mask is found.segment_ids is found.lengths is None


@pytest.mark.parametrize(
    ("lengths", "ignore_label", "mask", "read"),
    [
        ([3, 5], None, [[1, 1, 0, 0], [1, 1, 1, 1]], [3, 4]),
        ([1, 0], None, [[0, 0, 0, 0], [0, 0, 0, 0]], [1, 0]),
        ([3, 9], 3, [[1, 1, 0, 0], [1, 0, 1, 1]], [3, 4]),
    ],
)
def test_padding(lengths, ignore_label, mask, read):
    """The last token that is read has a next one, unless it is padding."""
    found = Reading.of({"tokens": TOKENS, "lengths": jnp.int32(lengths)}, ignore_label)
    assert np.asarray(found.mask).astype(int).tolist() == mask
    assert np.asarray(found.lengths).tolist() == read and found.segment_ids is None


def test_documents():
    segment_ids = jnp.int32([[1, 1, 2, 2, 0], [3, 3, 3, 3, 3]])
    found = Reading.of({"tokens": TOKENS, "segment_ids": segment_ids}, None)
    assert np.asarray(found.mask).astype(int).tolist() == [[1, 0, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(found.segment_ids, segment_ids[:, :-1])
