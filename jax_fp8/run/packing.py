"""Which documents share a row: best fit, the longest first. Ding et al., https://arxiv.org/abs/2404.10830.

    lengths of documents ─pieces→ no longer than a row ─pack→ Rows

Only a document that is longer than a row is cut. Short documents fill the ends of rows, so there is little padding.
"""

import bisect
from dataclasses import dataclass

import numpy as np

LEAST = 2  # tokens of a piece: one to read, and the next one to learn


@dataclass(frozen=True)
class Rows:
    """Rows of pieces: row i has the pieces from `first[i]` up to `first[i + 1]`.

    Args:
      starts, lengths: of each piece, its first token among all tokens, and its number of tokens.
      first: the number of each row's first piece, and at last the number of all pieces.
    """

    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Start and length of each piece of a row."""
        here = slice(self.first[row], self.first[row + 1])
        return list(zip(self.starts[here].tolist(), self.lengths[here].tolist(), strict=True))


def whole_texts(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the pieces of texts. A long text is cut into several pieces. Each begins with the last
    token of the one before, which is then read again: so every token but the first is learned once.
    """
    counts = np.maximum(0, -(-(lengths - 1) // seq_len))
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of each piece in its text
    return np.repeat(starts, counts) + places * seq_len, np.minimum(
        np.repeat(lengths, counts) - places * seq_len, seq_len + 1
    )


def beginnings(
    starts: np.ndarray, lengths: np.ndarray, learned: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of conversations, of which a row has the beginning: an answer is not learned without what it
    answers. Those with nothing to learn in it are left out.
    """
    cut = np.minimum(lengths, seq_len + 1)
    is_used = np.array(
        [learned[start + 1 : start + length].any() for start, length in zip(starts, cut, strict=True)], bool
    )
    return starts[is_used], cut[is_used]


def pack(starts: np.ndarray, lengths: np.ndarray, capacity: int) -> Rows:
    """Put pieces into rows of `capacity` tokens: each, the longest first, into the row with the least room for it."""
    by_length = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # the sizes of free room that rows have, ascending
    rows_with: dict[int, list[int]] = {}  # by size, the rows that have it
    row_of, count = np.empty(len(lengths), np.int64), 0
    for place, length in enumerate(lengths[by_length].tolist()):
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room, count = count, capacity, count + 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[at]
        row_of[place] = row
        free = room - length
        if free >= LEAST:
            if not rows_with.setdefault(free, []):
                bisect.insort(rooms, free)
            rows_with[free].append(row)
    by_row = by_length[np.argsort(row_of, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))]).astype(np.int64)
    return Rows(starts[by_row], lengths[by_row], first)
