"""How numbers are written, with their units."""

import math

import pytest

from jax_fp8.report.formatting import counted, number, percent, step_list, tensor_name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (3.14159, "3.14"), (0.01234, "0.0123"), (-0.5, "-0.5"), (1234.5, "1,234"), (3.2e-7, "3.20e-07")),
        *((92_200, "92,200"), (6.86e7, "6.86e+07"), (math.nan, "–"), (math.inf, "–")),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0, "0 %"), (0.021, "2.1 %"), (2e-6, "< 0.001 %"), (1, "100 %"), (0.99999, "100 %"), (12.3, "1,230 %")),
        *((1e-5, "0.001 %"), (math.nan, "–")),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


def test_names_and_lists():
    assert tensor_name(("h_3/mlp/down", "output_gradient")) == "output gradient of h_3/mlp/down"
    assert tensor_name(("h_3/mlp/down", "input")) == "input of h_3/mlp/down"
    assert counted(1, "step") == "1 step" and counted(1200, "step") == "1,200 steps"
    assert counted(2, "is", "are") == "2 are"
    assert step_list([3]) == "step 3" and step_list([3, 4, 1000]) == "steps 3, 4 and 1,000"
    assert step_list([1, 2, 3, 4, 5, 6]) == "steps 1, 2, 3, 4, ... 6"
