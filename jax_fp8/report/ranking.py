"""The worst-scaled tensors of a run, as rows of a table: their last values, and the worst ones with their steps."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_fp8.report.diagnosed import Diagnosed
from jax_fp8.report.formatting import number, percent, tensor_name
from jax_fp8.report.tensor_checks import severity

MOST = 15  # rows


class Cell(NamedTuple):
    """The last value, and the worst one with its step; `worst` is empty if all values are equal."""

    last: str
    worst: str = ""


# Each quantity, how it is written, and how the worst of several values is picked.
COLUMNS: tuple[tuple[str, Callable[[float], str], np.ufunc | None], ...] = (
    ("saturated", percent, np.fmax),
    ("underflowed", percent, np.fmax),
    ("error", percent, np.fmax),
    ("headroom", number, np.fmin),
    ("amax", number, None),
    ("scale", number, None),
)


def worst_tensors(diagnosed: Diagnosed) -> list[tuple[str, list[Cell]]]:
    """Name and cells of each tensor, the worst first."""
    worst = np.fmax.reduce(severity(diagnosed), axis=1, initial=0.0)
    return [
        (tensor_name(diagnosed.places[row]), [_cell(diagnosed, row, *column) for column in COLUMNS])
        for row in np.argsort(-worst, kind="stable")[:MOST]
    ]


def _cell(diagnosed: Diagnosed, row: int, name: str, write: Callable[[float], str], pick: np.ufunc | None) -> Cell:
    values = diagnosed.quantity(name)[row]
    last = write(float(values[-1]))
    if pick is None or np.isnan(values).all() or (values == values[-1]).all():
        return Cell(last)
    worst = float(pick.reduce(values))
    step = int(diagnosed.steps[int(np.argmax(values == worst))])
    return Cell(last, f"{write(worst)} at {step:,}")
