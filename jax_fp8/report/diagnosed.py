"""What the diagnosed steps of one run say, as arrays: a row is a tensor or a layer in program order, a column a step.

rows of diagnostics.jsonl ─sample_of→ samples, one for each step ─gather→ Diagnosed ─worst→ columns that fit a page
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

QUANTITIES = ("amax", "scale", "headroom", "saturated", "underflowed", "nonfinite", "error")
OUTPUT_GRADIENT = "output_gradient"
MOST_CELLS = 2**27  # tensors or layers in steps: each of them has a number for every quantity

Place = tuple[str, str]  # a layer, and its "input", "kernel" or "output_gradient"


class Sample(NamedTuple):
    """One diagnosed step. A number that was not finite, or not measured, is NaN."""

    step: int
    loss: float
    places: tuple[Place, ...]
    values: np.ndarray  # f32 (places, quantities)
    layers: tuple[str, ...]
    gradients: np.ndarray  # f32 (layers, 2): the norm, and how many elements are not finite


@dataclass(frozen=True)
class Diagnosed:
    """All diagnosed steps of a run.

    Args:
      steps: i64 (steps,), ascending.
      losses: f64 (steps,).
      places: of the tensors, in program order.
      values: f32 (quantities, tensors, steps).
      layers: that own params, in program order.
      norms: f32 (layers, steps), of gradients.
      nonfinite_gradients: f32 (layers, steps), numbers of elements.
    """

    steps: np.ndarray
    losses: np.ndarray
    places: tuple[Place, ...]
    values: np.ndarray
    layers: tuple[str, ...]
    norms: np.ndarray
    nonfinite_gradients: np.ndarray

    def of(self, quantity: str) -> np.ndarray:
        """f32 (tensors, steps)."""
        return self.values[QUANTITIES.index(quantity)]

    @property
    def broken_tensors(self) -> np.ndarray:
        """bool (tensors, steps): where elements are not finite."""
        return self.of("nonfinite") > 0

    @property
    def broken_gradients(self) -> np.ndarray:
        """bool (layers, steps): where elements are not finite, or so large that their norm is not."""
        return (self.nonfinite_gradients > 0) | (np.isnan(self.norms) & ~np.isnan(self.nonfinite_gradients))


def sample_of(row: dict[str, Any]) -> Sample:
    """A row as arrays; TypeError, KeyError, ValueError or OverflowError where it is none."""
    tensors, gradients = row.get("tensors") or [], row.get("gradients") or []
    return Sample(
        step=row["step"],
        loss=number_of(row.get("loss")),
        places=tuple((str(entry["layer"]), str(entry["tensor"])) for entry in tensors),
        values=_table(tensors, QUANTITIES),
        layers=tuple(str(entry["layer"]) for entry in gradients),
        gradients=_table(gradients, ("norm", "nonfinite")),
    )


def number_of(value: Any) -> float:
    """A number of a file; NaN where it says null, or nothing."""
    return np.nan if value is None else float(value)


def _table(entries: list[dict[str, Any]], keys: tuple[str, ...]) -> np.ndarray:
    """f32 (entries, keys)."""
    table = np.array([[entry.get(key) for key in keys] for entry in entries], float).reshape(len(entries), len(keys))
    largest = np.finfo(np.float32).max
    return np.where(np.abs(table) <= largest, table, np.nan).astype(np.float32)


def gather(samples: Iterable[Sample]) -> Diagnosed:
    """All samples of a run. Of a step that was taken again, after a checkpoint, the last one counts."""
    ordered = sorted({sample.step: sample for sample in samples}.values(), key=lambda sample: sample.step)
    places = tuple(dict.fromkeys(place for names in dict.fromkeys(s.places for s in ordered) for place in names))
    layers = tuple(dict.fromkeys(layer for names in dict.fromkeys(s.layers for s in ordered) for layer in names))
    if len(ordered) * max(len(places), len(layers)) > MOST_CELLS:
        raise ValueError(
            f"a report has room for {MOST_CELLS:,} tensors in steps, got {len(places):,} tensors and {len(layers):,} "
            f"layers in {len(ordered):,} steps; leave rows out of diagnostics.jsonl"
        )
    values = np.full((len(QUANTITIES), len(places), len(ordered)), np.nan, np.float32)
    gradients = np.full((2, len(layers), len(ordered)), np.nan, np.float32)
    for column, sample in enumerate(ordered):
        values[:, _rows(sample.places, places), column] = sample.values.T
        gradients[:, _rows(sample.layers, layers), column] = sample.gradients.T
    steps = np.array([sample.step for sample in ordered], np.int64)
    losses = np.array([sample.loss for sample in ordered], float)
    return Diagnosed(steps, losses, places, values, layers, *gradients)


def _rows(names: tuple, of_all: tuple) -> Any:
    """Where these names stand among all."""
    if names == of_all:
        return slice(None)
    index = {name: row for row, name in enumerate(of_all)}
    return [index[name] for name in names]


def bins(count: int, most: int) -> np.ndarray:
    """Where each of at most so many bins of columns begins; i64 (bins,)."""
    return np.linspace(0, count, min(count, most), endpoint=False).astype(np.int64)


def worst(values: np.ndarray, starts: np.ndarray, quantity: str) -> np.ndarray:
    """The worst of each bin, (rows, bins): the largest; of headroom the least below 1, or else the largest."""
    largest = np.fmax.reduceat(values, starts, axis=1)
    if quantity != "headroom":
        return largest
    least = np.fmin.reduceat(values, starts, axis=1)
    return np.where(least < 1, least, largest)
