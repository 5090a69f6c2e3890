"""What changed when a step was skipped: its diagnosis compared with that of the last diagnosed step before it.

For each tensor and each gradient, only the quantity that changed most is listed. The largest changes come first.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jax_fp8.report.diagnosed import QUANTITIES, Diagnosed, Sample, gather
from jax_fp8.report.formatting import UNKNOWN, number, percent, tensor_name
from jax_fp8.report.step_checks import as_computed

LEAST = 1.0  # doublings or halvings; smaller changes are usual between batches
# The quantities that are compared, with the size below which their changes mean nothing.
FLOORS = {"amax": 0.0, "saturated": 1e-4, "underflowed": 1e-3, "error": 1e-2}


class Change(NamedTuple):
    """`size` is in doublings; infinite if the step has elements that are not finite."""

    what: str
    before: str
    after: str
    change: str
    size: float


def column_before(diagnosed: Diagnosed | None, step: int) -> int | None:
    """The column of the last diagnosed step before this one; None if there is none."""
    if diagnosed is None:
        return None
    column = int(np.searchsorted(diagnosed.steps, step)) - 1
    return column if column >= 0 else None


def changes(sample: Sample, diagnosed: Diagnosed, column: int) -> list[Change]:
    """The changes from one column of the diagnosed steps to a sample, the largest first."""
    now = gather([sample])
    every = [*_of_tensors(now, diagnosed, column), *_of_gradients(now, diagnosed, column)]
    return sorted((change for change in every if change.size >= LEAST), key=lambda change: -change.size)


def _of_tensors(now: Diagnosed, before: Diagnosed, column: int) -> Iterator[Change]:
    rows, broken = {place: row for row, place in enumerate(before.places)}, now.broken_tensors[:, 0]
    for row in as_computed(now, np.arange(len(now.places))):
        place = now.places[row]
        if place not in rows:
            continue
        old, new = before.values[:, rows[place], column], now.values[:, row, 0]
        if broken[row]:
            index = QUANTITIES.index("nonfinite")
            yield Change(f"{tensor_name(place)}: not finite", percent(old[index]), percent(new[index]), "", math.inf)
        else:
            yield max(_of_quantities(tensor_name(place), old, new), key=lambda change: change.size)


def _of_quantities(tensor: str, old: np.ndarray, new: np.ndarray) -> Iterator[Change]:
    for name, floor in FLOORS.items():
        before, after = (float(values[QUANTITIES.index(name)]) for values in (old, new))
        size = doublings(before, after, floor)
        if name == "amax":
            yield Change(f"{tensor}: amax", number(before), number(after), _ratio(before, after), size)
        else:
            points = f"{100 * (after - before):+.3g} points"
            yield Change(f"{tensor}: {name}", percent(before), percent(after), points, size)


def _of_gradients(now: Diagnosed, before: Diagnosed, column: int) -> Iterator[Change]:
    rows, broken = {layer: row for row, layer in enumerate(before.layers)}, now.broken_gradients[:, 0]
    for row, layer in enumerate(now.layers):
        if layer not in rows:
            continue
        old, new = float(before.norms[rows[layer], column]), float(now.norms[row, 0])
        if broken[row]:
            name = f"gradient of {layer}: elements not finite"
            count = number(before.nonfinite_gradients[rows[layer], column])
            yield Change(name, count, number(now.nonfinite_gradients[row, 0]), "", math.inf)
        else:
            name = f"gradient of {layer}: norm"
            yield Change(name, number(old), number(new), _ratio(old, new), doublings(old, new, 0.0))


def doublings(before: float, after: float, floor: float) -> float:
    """How often a number doubled or halved; 0 if it cannot be computed."""
    low, high = sorted((max(before, floor), max(after, floor)))
    return math.log2(high / low) if low > 0 and math.isfinite(low + high) else 0.0


def _ratio(before: float, after: float) -> str:
    return f"{number(after / before)} x" if before > 0 else UNKNOWN
