"""Batches of a run: which tokens of which step and row."""

import jax
import numpy as np
import pytest

from jax_fp8.run import batches
from jax_fp8.run.packing import pack


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000)
    batch = batches.training_batch(tokens, 3, 0, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert (np.diff(batch) == 1).all()
    assert (batch == batches.training_batch(tokens, 3, 0, 4, 16)).all()
    assert (batch != batches.training_batch(tokens, 4, 0, 4, 16)).any()
    assert (batch != batches.training_batch(tokens, 3, 1, 4, 16)).any()
    everything = np.concatenate(batches.validation_batches(tokens, 2, 4, 16))
    assert everything.shape == (8, 17) and everything.min() == 0 and everything.max() == 999
    assert (batches.training_batch(np.arange(17), 1, 0, 2, 16) == np.arange(17)).all()  # the last token is within reach


# ---- packed documents ------------------------------------------------------------------------------------------------


def packed(count=100, seed=0, batch_size=8, masked=True, seq_len=31):
    """Documents whose tokens are all different, packed."""
    random = np.random.default_rng(1)
    lengths = random.integers(2, 24, count)
    starts, tokens = np.cumsum(lengths) - lengths, np.arange(1, lengths.sum() + 1)
    learned = tokens % 3 == 0 if masked else None
    return batches.Packed(tokens, learned, pack(starts, lengths, seq_len + 1), seed, batch_size, seq_len)


def test_an_epoch_has_every_token_once_in_an_order_of_its_own():
    data = packed()
    rows = len(data.rows)
    seen = [data.training(step) for step in range(1, 3 * rows // 8 + 2)]
    order = np.concatenate([batch["tokens"][:, 0] for batch in seen])  # the first token names a row
    for epoch in range(3):
        here = order[epoch * rows : (epoch + 1) * rows]
        assert sorted(here) == sorted(data.tokens[data.rows.starts[data.rows.first[:-1]]])
    assert (order[:rows] != order[rows : 2 * rows]).any() and (
        order[rows : 2 * rows] != order[2 * rows : 3 * rows]
    ).any()
    assert (packed(seed=1).training(1)["tokens"] != data.training(1)["tokens"]).any()
    tokens = np.concatenate([batch["tokens"] for batch in seen])[:rows]
    assert sorted(tokens[tokens > 0]) == list(data.tokens)


def test_a_row_has_whole_documents_and_their_marks():
    data = packed()
    batch = data.training(5)
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32", "segment_ids": "int32", "loss_mask": "bool",
    }  # fmt: skip
    for tokens, segments, learned in zip(*batch.values(), strict=True):
        assert (np.diff(segments[segments > 0]) >= 0).all() and ((tokens > 0) == (segments > 0)).all()
        np.testing.assert_array_equal(learned, (tokens % 3 == 0) & (tokens > 0))
        for segment in range(1, segments.max() + 1):
            document = tokens[segments == segment]
            start, length = document[0] - 1, len(document)
            assert (np.diff(document) == 1).all()
            assert length == data.rows.lengths[data.rows.starts == start].item()
    assert set(packed(masked=False).training(5)) == {"tokens", "segment_ids"}


@pytest.mark.parametrize("count", [3, 100])
def test_held_out_documents_are_each_read_once_if_there_are_few(count):
    data = packed(count, batch_size=4)
    batch = data.validation()
    tokens = batch["tokens"]
    assert tokens.ndim == 3 and tokens.shape[1:] == (4, 32)
    assert sorted(tokens[tokens > 0]) == list(data.tokens)
    assert (batch["segment_ids"][tokens == 0] == 0).all() and not batch["loss_mask"][tokens == 0].any()
    np.testing.assert_array_equal(data.validation()["tokens"], tokens)


@pytest.mark.parametrize("make", [packed, lambda **more: batches.Windows(np.arange(5000), 0, 8, 31)])
def test_two_processes_read_what_one_reads(make):
    data, first, second = make(), np.arange(4), np.arange(4, 8)
    for step in (1, 2, 77):
        whole, parts = data.training(step), [make().training(step, rows) for rows in (first, second)]
        jax.tree.map(lambda one, *two: np.testing.assert_array_equal(one, np.concatenate(two)), whole, *parts)
    parts = [make().validation(rows) for rows in (first, second)]
    jax.tree.map(
        lambda one, *two: np.testing.assert_array_equal(one, np.concatenate(two, 1)), data.validation(), *parts
    )


def test_a_digest_tells_data_apart():
    texts = [packed(), packed(99), packed(masked=False), batches.Windows(np.arange(9), 0, 8, 31)]
    texts += [batches.Windows(np.arange(1, 10), 0, 8, 31)]
    assert len({one.digest for one in texts}) == 5
    assert packed(seed=3).digest == packed().digest
    joined = batches.Joined([np.arange(4), np.arange(4, 9)])
    assert batches.Windows(joined, 0, 8, 31).digest == texts[3].digest
    large = np.zeros(5000, np.uint8)
    other = large.copy()
    other[-1] = 1
    for limit in (10_000, 4096):
        before = batches.HASHED_WHOLE, batches.BLOCK
        batches.HASHED_WHOLE, batches.BLOCK = limit, 1024
        assert batches.digest_of(large) != batches.digest_of(other)
        batches.HASHED_WHOLE, batches.BLOCK = before


def test_a_prompt_ends_where_the_answer_begins():
    data = packed()
    start, length = data.rows.pieces(0)[0]
    own = data.tokens[start : start + length]
    np.testing.assert_array_equal(data.prompt(), own[: np.argmax(own % 3 == 0) or 1])
    assert len(packed(masked=False).prompt()) == length
    assert len(batches.Windows(np.arange(99), 0, 8, 31).prompt()) == 31
