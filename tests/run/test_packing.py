"""Packing: every token of every document once, in rows that have room for it."""

import numpy as np
import pytest

from jax_fp8.run.packing import beginnings, pack, whole_texts


@pytest.mark.parametrize("longest", [3, 20, 65, 300])
def test_every_token_but_the_first_is_learned_once(longest):
    seq_len, random = 64, np.random.default_rng(longest)
    lengths = random.integers(1, longest, 500)
    starts = np.cumsum(lengths) - lengths
    rows = pack(*whole_texts(starts, lengths, seq_len), seq_len + 1)
    learned = np.zeros(lengths.sum(), int)
    for row in range(len(rows)):
        pieces = rows.pieces(row)
        assert 0 < sum(length for _, length in pieces) <= seq_len + 1
        for start, length in pieces:
            learned[start + 1 : start + length] += 1
            assert ((starts <= start) & (start + length <= starts + lengths)).any()  # within one document
    expected = np.ones(lengths.sum(), int)
    expected[starts] = 0
    np.testing.assert_array_equal(learned, expected)
    assert rows.tokens >= lengths[lengths > 1].sum()


def test_rows_are_nearly_full():
    random = np.random.default_rng(0)
    lengths = random.integers(2, 200, 5000)
    rows = pack(np.cumsum(lengths) - lengths, lengths, 257)
    assert lengths.sum() / (257 * len(rows)) > 0.99
    alone = pack(np.cumsum(lengths) - lengths, np.maximum(lengths, 130), 257)
    assert len(alone) > len(rows)  # negative control


def test_conversations_lose_their_end_and_are_left_out_where_nothing_is_learned():
    learned = np.array([1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1], bool)
    starts, lengths = np.array([0, 2, 4, 9]), np.array([2, 2, 5, 2])
    found = beginnings(starts, lengths, learned, seq_len=3)
    assert [array.tolist() for array in found] == [[2, 9], [2, 2]]  # the first token of a document is not learned
    found = beginnings(starts, lengths, learned, seq_len=4)
    assert [array.tolist() for array in found] == [[2, 4, 9], [2, 5, 2]]


def test_no_documents():
    none = np.empty(0, np.int64)
    assert len(pack(*whole_texts(none, none, 4), 5)) == 0
    assert len(pack(*beginnings(none, none, np.empty(0, bool), 4), 5)) == 0
