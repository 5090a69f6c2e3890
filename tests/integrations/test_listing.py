"""What an adapter says of a model."""

import pytest

from jax_fp8.integrations.listing import Listing, why_not_sizes

pytestmark = pytest.mark.versions


def test_it_prints_names_and_reasons():
    assert str(Listing(("up", "down"), {"head": "a reason"})) == "in FP8: up, down\nleft as it is: head (a reason)"
    assert str(Listing(())) == "in FP8: nothing"


def test_sizes_that_do_not_fit_have_a_reason():
    assert why_not_sizes(32, 48) is None
    assert why_not_sizes(20, 48) == "20 rows are no multiple of 16"
    assert why_not_sizes(32, 10) == "10 columns are no multiple of 16"
