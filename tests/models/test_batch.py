"""What a model reads of a batch, and which of its next tokens count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.models.batch import Reading, counted

TOKENS = jnp.int32([[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]])


def test_tokens_alone():
    found = Reading.from_batch(TOKENS, None)
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
    found = Reading.from_batch({"tokens": TOKENS, "lengths": jnp.int32(lengths)}, ignore_label)
    assert np.asarray(found.mask).astype(int).tolist() == mask
    assert np.asarray(found.lengths).tolist() == read and found.segment_ids is None


def test_documents():
    segment_ids = jnp.int32([[1, 1, 2, 2, 0], [3, 3, 3, 3, 3]])
    found = Reading.from_batch({"tokens": TOKENS, "segment_ids": segment_ids}, None)
    assert np.asarray(found.mask).astype(int).tolist() == [[1, 0, 1, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(found.segment_ids, segment_ids[:, :-1])


def weights_of(batch, ignore_label=None):
    mask = Reading.from_batch(batch, ignore_label).mask
    return None if mask is None else np.asarray(mask, np.float32).tolist()


LEARNED = [[9, 1, 0, 0, 1], [9, 0, 0, 1, 1]]  # what stands at a row's first token is about nobody's next one
LABELS = jnp.where(jnp.array(LEARNED) == 0, -100, TOKENS)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int32, np.float16, np.float32])
def test_a_loss_mask(dtype):
    mask = np.array(LEARNED).astype(dtype)
    assert weights_of({"tokens": TOKENS, "loss_mask": mask}) == [row[1:] for row in LEARNED]
    halves = {"tokens": TOKENS, "loss_mask": np.float32(LEARNED) / 2, "lengths": jnp.int32([5, 4])}
    assert weights_of(halves) == [[0.5, 0, 0, 0.5], [0, 0, 0.5, 0]]


def test_labels():
    batch = {"tokens": TOKENS, "labels": LABELS}
    found = Reading.from_batch(batch, None)
    np.testing.assert_array_equal(found.labels, LABELS[:, 1:])
    assert weights_of(batch) == weights_of(batch, -100) == [row[1:] for row in LEARNED]
    assert weights_of(batch, 8) == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert weights_of({"tokens": TOKENS, "labels": TOKENS}, 8) == [[1, 1, 0, 1], [1, 1, 1, 1]]
    documents = batch | {"segment_ids": jnp.int32([[1, 1, 2, 2, 2], [3, 3, 3, 3, 0]])}
    assert weights_of(documents) == [[1, 0, 0, 1], [0, 0, 1, 0]]


def test_ids_are_compared_as_int32():
    """65436 is -100 in uint16, and 156 in uint8."""
    tokens = np.array([[1, 65436, 3], [156, 156, 2]], np.uint16)
    assert weights_of(tokens, -100) == [[1, 1], [1, 1]]
    assert weights_of(tokens.astype(np.int16), -100) == [[0, 1], [1, 1]]  # negative control
    assert weights_of(tokens[1:].astype(np.uint8), -100) == [[1, 1]]
    assert weights_of({"tokens": tokens, "lengths": np.uint8([3, 2])}) == [[1, 1], [1, 0]]
    long = Reading.from_batch({"tokens": np.zeros((1, 1000), np.uint8), "lengths": np.uint8([200])}, None)
    assert long.lengths.tolist() == [200] and int(long.mask.sum()) == 199


X = -100
READ = {  # tokens, what else the batch says, ignore_label, what is read of a vocabulary of 50
    "padding": ([[5, 6, X, X, X]], {}, X, [[5, 6, 0, 0]]),
    "a prompt": ([[X, X, 7, 8, 9]], {}, X, [[X, X, 7, 8]]),
    "between": ([[5, X, 7, X, X]], {}, X, [[5, X, 7, 0]]),
    "a token": ([[5, 9, 7, 9, 9]], {}, 9, [[5, 9, 7, 9]]),
    "nothing learned": ([[5, X, X, X, X]], {}, X, [[5, 0, 0, 0]]),
    "no token": ([[5, 50, 7, 60, 60]], {"loss_mask": np.array([[1, 1, 1, 0, 0]])}, None, [[5, 50, 7, 0]]),
    "no mask": ([[5, 50, 7, 60, 8]], {}, None, [[5, 50, 7, 60]]),
    "documents": ([[5, X, X, 6, 7]], {"segment_ids": np.array([[1, 1, 1, 2, 2]])}, X, [[5, 0, 0, 6]]),
    "documents, a prompt": ([[5, X, 6, X, 7]], {"segment_ids": np.array([[1, 1, 1, 2, 2]])}, X, [[5, X, 6, X]]),
    "lengths": ([[5, 6, 70, X, X]], {"lengths": np.array([2])}, None, [[5, 6, 0, 0]]),
    "labels": ([[X, 6, 70, X, 8]], {"labels": np.array([[X, X, 7, X, X]])}, None, [[X, 6, 0, 0]]),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_no_token_is_replaced_only_where_nothing_is_learned_from_it(name):
    tokens, others, ignore_label, expected = READ[name]
    batch = {"tokens": np.array(tokens), **others} if others else np.array(tokens)
    assert np.asarray(Reading.from_batch(batch, ignore_label, 50).tokens).tolist() == expected


def test_rows_in_which_another_model_reads_no_token():
    tokens = np.array([[-1, 6, 7], [5, 60, 7], [5, 6, X]])
    found = Reading.from_batch(tokens, X)
    assert np.asarray(found.tokens).tolist() == [[-1, 6], [5, 60], [5, 6]]
    assert np.asarray(found.labels_in(50)).tolist() == [[-1, -1], [-1, -1], [6, X]]
    assert np.asarray(found.labels_in(61)).tolist() == [[-1, -1], [60, 7], [6, X]]


def test_a_negative_length_is_none():
    found = Reading.from_batch({"tokens": TOKENS, "lengths": np.int8([3, -56])}, None)
    assert np.asarray(found.labels)[1].tolist() == [-1] * 4 and np.asarray(found.mask)[1].all()


def test_a_counted_batch_is_divided_by_its_share_of_the_whole():
    mask = np.float32([[0, 1, 1, 1, 1], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0], [9, 0, 0, 3, 0]])
    batch = {"tokens": jnp.zeros((4, 5), jnp.int32), "loss_mask": mask}
    whole = counted(batch, None)
    assert whole.learned.tolist() == [9.0] * 4 and whole.rows == 4
    assert Reading.from_batch(whole, None).mask_total.tolist() == [9.0] * 4
    part = jax.tree.map(lambda x: x[1::2], whole)
    found = Reading.from_batch(part, None)
    assert found.mask_total.tolist() == [4.5] * 2 and np.asarray(found.mask).sum() == 5
    assert counted(TOKENS, None) is TOKENS  # all tokens count alike: nothing is added
