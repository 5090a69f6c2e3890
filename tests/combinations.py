"""Pairwise testing: every run tries so many combinations that each pair of choices occurs in one; the others are slow.

Most failures depend on one choice or on a pair: a kernel for a dtype, the tail of a layout. For 13 shapes, three dtypes
and two norms, 39 of 78 combinations have all pairs.
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
    """The name of a choice, for `ids`; of a dtype its short name."""
    return np.dtype(choice).name if isinstance(choice, type) else str(choice)


def _combinations(counts: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, counts)))


def _in_which_every_pair_meets(counts: Sequence[int]) -> set[tuple[int, ...]]:
    """Combinations, as indices of choices, chosen greedily: each has the most pairs that no earlier one has."""
    found: set[tuple[int, ...]] = set()
    met: set[tuple] = set()
    wanted = set().union(*map(_pairs, _combinations(counts)))
    while met != wanted:
        found.add(best := max(_combinations(counts), key=lambda numbers: len(_pairs(numbers) - met)))
        met |= _pairs(best)
    return found


def _pairs(numbers: tuple[int, ...]) -> set[tuple]:
    return set(itertools.combinations(enumerate(numbers), 2))
