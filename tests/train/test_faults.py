"""find_fault: which number of the diagnostics it names, from rows as a log has them."""

import pytest

import jax_fp8 as fp8


def tensor(layer, name, nonfinite=0.0, saturated: float | None = 0.0):
    return {"layer": layer, "tensor": name, "nonfinite": nonfinite, "saturated": saturated}


def rows(*tensors, layers=()):
    return {"tensors": [*tensors], "gradients": [{"layer": layer, "norm": 1.0, "nonfinite": 1} for layer in layers]}


FAULTS = {
    "inputs come before output gradients": (
        rows(tensor("a", "output_gradient", 0.5), tensor("b", "input", 0.25)),
        "25 % of the input of b is not finite",
    ),
    "a backward begins with the last layer": (
        rows(tensor("a", "output_gradient", 0.5), tensor("b", "output_gradient", 1.0)),
        "100 % of the output gradient of b is not finite",
    ),
    "gradients come after tensors": (
        rows(tensor("a", "kernel", 0.0, 0.5), layers=("a", "b")),
        "the gradients of a are not finite, nor those of 1 other layers",
    ),
    "the most saturated": (
        rows(tensor("a", "input", 0.0, 0.002), tensor("b", "input", 0.0, 0.5), tensor("c", "input", None, None)),
        "50 % of the input of b is larger than its scale allows",
    ),
    "hardly any saturation": (rows(tensor("a", "input", 0.0, 9e-4)), None),
    "nothing in FP8": (rows(), None),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_worst_number_is_named(fault):
    found, clause = fault
    assert fp8.find_fault(found) == clause


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match=r'rows must hold "tensors" and "gradients", got a dict with .loss.; pass'):
        fp8.find_fault({"loss": 3})
