"""From tokens to the batches of a run: windows of one stream of tokens, or rows of packed documents.

    Windows   tokens ─random starts→ (rows, seq + 1)
    Packed    documents ─packing→ rows ─shuffled in each epoch→ tokens, segment_ids, loss_mask, each (rows, seq + 1)

A model reads the first `seq_len` tokens of a row and predicts the last `seq_len`. A batch depends on the step and the
seed alone, whatever the recipe. So a run can be resumed without a position in the data, each process can read its own
rows, and the loss curves of two recipes can be compared.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_fp8.run.packing import Rows

ALL_ROWS = slice(None)
OwnRows = np.ndarray | slice
HostBatch = np.ndarray | dict[str, np.ndarray]
VALIDATION_BATCHES = 8  # at least
VALIDATION_TOKENS = 2**15  # at least, if so many are held out: the mean over fewer tokens is too noisy
HASHED_WHOLE = 2**30  # bytes; of larger arrays, so many are hashed, in blocks
BLOCK = 2**20  # bytes


class BadTokens(ValueError):
    """A file of tokens has one that is not in the vocabulary."""


class Joined:
    """Several arrays of tokens, one after the other, without a copy of them."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        found = np.empty(index.shape, self.parts[0].dtype)
        numbers = np.searchsorted(self._ends, index, side="right")
        for number in np.unique(numbers):
            is_here = numbers == number
            start = self._ends[number] - len(self.parts[number])
            found[is_here] = self.parts[number][index[is_here] - start]
        return found


Tokens = np.ndarray | Joined


@dataclass(frozen=True)
class Windows:
    """One stream of tokens; a row is a window of it, at a random place.

    Both kinds of batches have the same members: `size` is the number of tokens, and `digest` tells two texts apart.
    `training` returns some rows of the batch of a step, which is counted from 1. `validation` returns some rows of each
    of some batches, always the same ones: (count, rows, seq + 1). `prompt` has the tokens after which a sample begins.
    """

    tokens: Tokens
    seed: int
    batch_size: int
    seq_len: int
    vocab_size: int | None = None  # checked in each batch, where the tokens come from a file of others

    @property
    def size(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def digest(self) -> bytes:
        parts = self.tokens.parts if isinstance(self.tokens, Joined) else [self.tokens]
        return digest_of(*parts)

    def training(self, step: int, rows: OwnRows = ALL_ROWS) -> np.ndarray:
        return self._checked(training_batch(self.tokens, step, self.seed, self.batch_size, self.seq_len, rows))

    def validation(self, rows: OwnRows = ALL_ROWS) -> np.ndarray:
        shape = self.batch_size, self.seq_len
        count = max(VALIDATION_BATCHES, math.ceil(min(VALIDATION_TOKENS, self.size) / math.prod(shape)))
        return self._checked(validation_batches(self.tokens, count, *shape, rows))

    def prompt(self) -> np.ndarray:
        return self.tokens[np.arange(min(self.seq_len, self.size))].astype(np.int32)

    def _checked(self, batch: np.ndarray) -> np.ndarray:
        if self.vocab_size is not None and not 0 <= batch.min() <= batch.max() < self.vocab_size:
            wrong = batch.max() if batch.max() >= self.vocab_size else batch.min()
            raise BadTokens(
                f"tokens must be below {self.vocab_size}, the size of the vocabulary, got {wrong}; name the tokenizer "
                "that they were made with, and their --token-dtype"
            )
        return batch


@dataclass(frozen=True)
class Packed:
    """Documents, packed into rows: each row has several whole ones, and padding at its end.

    Args:
      tokens: of all documents, one after the other.
      learned: which of them are learned; None: all.
      rows: which documents a row has.
    """

    tokens: np.ndarray
    learned: np.ndarray | None
    rows: Rows
    seed: int
    batch_size: int
    seq_len: int

    @property
    def size(self) -> int:
        return self.rows.tokens

    @functools.cached_property
    def digest(self) -> bytes:
        masks = [] if self.learned is None else [self.learned]
        return digest_of(self.tokens, *masks, self.rows.starts, self.rows.lengths, self.rows.first)

    def training(self, step: int, rows: OwnRows = ALL_ROWS) -> dict[str, np.ndarray]:
        numbers = ((step - 1) * self.batch_size + np.arange(self.batch_size))[rows]
        epochs, places = np.divmod(numbers, len(self.rows))
        chosen = [order_of(len(self.rows), self.seed, int(e))[place] for e, place in zip(epochs, places, strict=True)]
        return self._filled(np.asarray(chosen, np.int64))

    def validation(self, rows: OwnRows = ALL_ROWS) -> dict[str, np.ndarray]:
        wanted = max(VALIDATION_BATCHES * self.batch_size, math.ceil(VALIDATION_TOKENS / self.seq_len))
        count = math.ceil(min(len(self.rows), wanted) / self.batch_size)
        chosen = np.full(count * self.batch_size, -1)  # -1 is a row of padding alone
        held = np.linspace(0, len(self.rows) - 1, min(len(self.rows), wanted)).astype(int)
        chosen[: len(held)] = held[: len(chosen)]
        own = chosen.reshape(count, self.batch_size)[:, rows]
        return {
            name: array.reshape(*own.shape, self.seq_len + 1) for name, array in self._filled(own.reshape(-1)).items()
        }

    def prompt(self) -> np.ndarray:
        """The first document, up to the first token that is learned where not all are."""
        start, length = self.rows.pieces(0)[0]
        end = length if self.learned is None else max(1, int(np.argmax(self.learned[start : start + length])))
        return np.asarray(self.tokens[start : start + min(end, self.seq_len)], np.int32)

    def _filled(self, chosen: np.ndarray) -> dict[str, np.ndarray]:
        shape = len(chosen), self.seq_len + 1
        batch = {"tokens": np.zeros(shape, np.int32), "segment_ids": np.zeros(shape, np.int32)}
        if self.learned is not None:
            batch["loss_mask"] = np.zeros(shape, bool)
        for row, number in enumerate(chosen):
            place = 0
            for segment, (start, length) in enumerate(self.rows.pieces(number) if number >= 0 else [], 1):
                here, there = slice(place, place + length), slice(start, start + length)
                batch["tokens"][row, here] = self.tokens[there]
                batch["segment_ids"][row, here] = segment
                if self.learned is not None:
                    batch["loss_mask"][row, here] = self.learned[there]
                place += length
        return batch


Batches = Windows | Packed


@functools.lru_cache(maxsize=2)  # a batch may have the last rows of one epoch and the first of the next
def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch reads its rows."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def training_batch(
    tokens: Tokens, step: int, seed: int, batch_size: int, seq_len: int, rows: OwnRows = ALL_ROWS
) -> np.ndarray:
    """These rows of the batch of one step: windows at random starts, which depend on seed and step alone."""
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(tokens) - seq_len, size=batch_size)
    return windows(tokens, starts[rows], seq_len)  # (rows, seq + 1)


def validation_batches(
    tokens: Tokens, count: int, batch_size: int, seq_len: int, rows: OwnRows = ALL_ROWS
) -> np.ndarray:
    """These rows of each of `count` batches: windows spread evenly over the held-out tokens, always the same."""
    starts = np.linspace(0, len(tokens) - seq_len - 1, count * batch_size).astype(int)
    return windows(tokens, starts.reshape(count, batch_size)[:, rows], seq_len)  # (count, rows, seq + 1)


def windows(tokens: Tokens, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """`seq_len + 1` tokens from each start, (*starts, seq + 1)."""
    return tokens[starts[..., None] + np.arange(seq_len + 1)].astype(np.int32)


def digest_of(*arrays: np.ndarray) -> bytes:
    """32 bytes that differ if any array differs. Of an array beyond HASHED_WHOLE, evenly spread blocks are hashed."""
    found = hashlib.sha256()
    for array in arrays:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(content) <= HASHED_WHOLE:
            found.update(content.data)
            continue
        found.update(len(content).to_bytes(8, "little"))
        for start in np.linspace(0, len(content) - BLOCK, HASHED_WHOLE // BLOCK).astype(int):
            found.update(content[start : start + BLOCK].data)
    return found.digest()
