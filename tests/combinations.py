"""Which combinations of choices every run tries: so many that each two choices meet; the others are slow.

What breaks is mostly one choice, or two that meet: a kernel for a dtype, the tail of a layout. Of 13 shapes, three
dtypes and two norms that takes 39 combinations of 78.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest


def every_pair(*choices: Sequence[Any]) -> list:
    """All combinations, to parametrise over; those beyond a set in which every two choices meet are marked `slow`.

    Args:
      choices: for each parameter in turn; two parameters or more.
    """
    fast = _in_which_every_pair_meets([len(of_one) for of_one in choices])
    return [
        pytest.param(
            *(of_one[number] for of_one, number in zip(choices, numbers, strict=True)),
            marks=() if numbers in fast else pytest.mark.slow,
        )
        for numbers in _combinations([len(of_one) for of_one in choices])
    ]


def name_of(choice: Any) -> str:
    """Of a choice, or of a dtype that is one, for `ids`."""
    return np.dtype(choice).name if isinstance(choice, type) else str(choice)


def _combinations(counts: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, counts)))


def _in_which_every_pair_meets(counts: Sequence[int]) -> set[tuple[int, ...]]:
    """Combinations, as numbers of choices: always the next one in which most pairs meet that have not met."""
    found: set[tuple[int, ...]] = set()
    met: set[tuple] = set()
    wanted = set().union(*map(_pairs, _combinations(counts)))
    while met != wanted:
        found.add(best := max(_combinations(counts), key=lambda numbers: len(_pairs(numbers) - met)))
        met |= _pairs(best)
    return found


def _pairs(numbers: tuple[int, ...]) -> set[tuple]:
    return set(itertools.combinations(enumerate(numbers), 2))
