"""Every two choices meet in what is not slow, and what is slow is not left out."""

import itertools

import pytest
from combinations import _combinations, _in_which_every_pair_meets, _pairs, every_pair, name_of


def met(found) -> set:
    return set().union(*map(_pairs, found))


@pytest.mark.parametrize(("counts", "count"), [((13, 3, 2), 39), ((8, 2, 3), 24), ((10, 2, 2), 20), ((2, 2, 2, 2), 6)])
def test_every_two_choices_meet(counts, count):
    fast = _in_which_every_pair_meets(counts)
    assert met(fast) == met(_combinations(counts)) and len(fast) == count
    one_of_first_two = [numbers for numbers in fast if numbers[:2] != (0, 0)]
    assert met(one_of_first_two) != met(fast)  # negative control


def test_the_others_are_slow():
    cases = every_pair([1, 2, 3], "ab", [float, int])
    assert [case.values for case in cases] == list(itertools.product([1, 2, 3], "ab", [float, int]))
    assert [len(case.marks) for case in cases].count(0) == 6
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
    assert [name_of(choice) for choice in cases[0].values] == ["1", "a", "float64"]
