"""The diagnosed steps of one run as arrays, whose rows are tensors or layers in program order, and columns are steps.

rows of diagnostics.jsonl ─sample_of→ samples, one for each step ─gather→ Diagnosed ─worst→ few columns, for a page
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_fp8.report.run_format import JsonObject

QUANTITIES = ("amax", "scale", "headroom", "saturated", "underflowed", "nonfinite", "error")
LOADS = ("busiest", "idlest", "unused", "dropped", "entropy")
UNUSED = 1 / 16  # of the mean load of a layer's experts: an expert with less counts as unused
OUTPUT_GRADIENT = "output_gradient"
MOST_CELLS = 2**27  # tensors (or layers) times steps; each such cell has a number for every quantity

Place = tuple[str, str]  # one tensor: a layer, and its "input", "kernel" or "output_gradient"


class Sample(NamedTuple):
    """One diagnosed step. A number that is not finite, or was not measured, is NaN."""

    step: int
    loss: float
    places: tuple[Place, ...]
    values: np.ndarray  # f32 (places, quantities)
    layers: tuple[str, ...]
    gradients: np.ndarray  # f32 (layers, 2): the norm, and the number of elements that are not finite
    routers: tuple[str, ...]  # layers with experts
    loads: np.ndarray  # f32 (routers, LOADS)


@dataclass(frozen=True)
class Diagnosed:
    """All diagnosed steps of a run.

    Args:
      steps: i64 (steps,), ascending.
      losses: f64 (steps,).
      places: the tensors, in program order.
      values: f32 (quantities, tensors, steps).
      layers: the layers that own params, in program order.
      norms: f32 (layers, steps), of the layers' gradients.
      nonfinite_gradients: f32 (layers, steps), how many elements of a gradient are not finite.
      routers: the layers that have experts, in program order.
      loads: f32 (LOADS, routers, steps): tokens of the expert with the most and of that with the fewest, in multiples
        of the mean; the share of unused experts; and, as the diagnostics have them, dropped choices and entropy.
    """

    steps: np.ndarray
    losses: np.ndarray
    places: tuple[Place, ...]
    values: np.ndarray
    layers: tuple[str, ...]
    norms: np.ndarray
    nonfinite_gradients: np.ndarray
    routers: tuple[str, ...]
    loads: np.ndarray

    def quantity(self, name: str) -> np.ndarray:
        """One of QUANTITIES, f32 (tensors, steps)."""
        return self.values[QUANTITIES.index(name)]

    def load(self, name: str) -> np.ndarray:
        """One of LOADS, f32 (routers, steps)."""
        return self.loads[LOADS.index(name)]

    @property
    def broken_tensors(self) -> np.ndarray:
        """bool (tensors, steps): whether some elements are not finite."""
        return self.quantity("nonfinite") > 0

    @property
    def broken_gradients(self) -> np.ndarray:
        """bool (layers, steps): whether some elements are not finite, or so large that the norm is not finite."""
        return (self.nonfinite_gradients > 0) | (np.isnan(self.norms) & ~np.isnan(self.nonfinite_gradients))


def sample_of(row: JsonObject) -> Sample:
    """A row of diagnostics.jsonl or events.jsonl as arrays; TypeError, KeyError, ValueError or OverflowError if it has
    another form.
    """
    tensors, gradients, experts = (row.get(name) or [] for name in ("tensors", "gradients", "experts"))
    return Sample(
        step=row["step"],
        loss=number_of(row.get("loss")),
        places=tuple((str(entry["layer"]), str(entry["tensor"])) for entry in tensors),
        values=_table(tensors, QUANTITIES),
        layers=tuple(str(entry["layer"]) for entry in gradients),
        gradients=_table(gradients, ("norm", "nonfinite")),
        routers=tuple(str(entry["layer"]) for entry in experts),
        loads=_table([entry | _loads(entry["fractions"]) for entry in experts], LOADS),
    )


def _loads(fractions: list[float | None]) -> JsonObject:
    """By name of LOADS; without an entry where not all shares of a layer's experts are known."""
    shares = np.array([number_of(share) for share in fractions])
    mean = shares.mean() if shares.size else 0.0
    if not 0 < mean < np.inf:
        return {}
    return {
        "busiest": float(shares.max() / mean),
        "idlest": float(shares.min() / mean),
        "unused": float(np.mean(shares < UNUSED * mean)),
    }


def number_of(value: float | None) -> float:
    """A number of a file; NaN for null, or where it is missing."""
    return np.nan if value is None else float(value)


def _table(entries: list[JsonObject], keys: tuple[str, ...]) -> np.ndarray:
    """f32 (entries, keys); a number that f32 cannot hold is NaN."""
    table = np.array([[entry.get(key) for key in keys] for entry in entries], float).reshape(len(entries), len(keys))
    largest = np.finfo(np.float32).max
    return np.where(np.abs(table) <= largest, table, np.nan).astype(np.float32)


def gather(samples: Iterable[Sample]) -> Diagnosed:
    """All samples of a run as arrays. If a resumed run diagnosed a step again, its last sample counts."""
    ordered = sorted({sample.step: sample for sample in samples}.values(), key=lambda sample: sample.step)
    places = tuple(dict.fromkeys(place for names in dict.fromkeys(s.places for s in ordered) for place in names))
    layers = tuple(dict.fromkeys(layer for names in dict.fromkeys(s.layers for s in ordered) for layer in names))
    routers = tuple(dict.fromkeys(layer for names in dict.fromkeys(s.routers for s in ordered) for layer in names))
    if len(ordered) * max(len(places), len(layers)) > MOST_CELLS:
        raise ValueError(
            f"a report has room for {MOST_CELLS:,} tensors times steps, got {len(places):,} tensors and "
            f"{len(layers):,} layers in {len(ordered):,} steps; remove rows from diagnostics.jsonl"
        )
    values = np.full((len(QUANTITIES), len(places), len(ordered)), np.nan, np.float32)
    gradients = np.full((2, len(layers), len(ordered)), np.nan, np.float32)
    loads = np.full((len(LOADS), len(routers), len(ordered)), np.nan, np.float32)
    for column, sample in enumerate(ordered):
        values[:, _rows(sample.places, places), column] = sample.values.T
        gradients[:, _rows(sample.layers, layers), column] = sample.gradients.T
        loads[:, _rows(sample.routers, routers), column] = sample.loads.T
    steps = np.array([sample.step for sample in ordered], np.int64)
    losses = np.array([sample.loss for sample in ordered], float)
    return Diagnosed(steps, losses, places, values, layers, *gradients, routers=routers, loads=loads)


def _rows(names: tuple[object, ...], all_names: tuple[object, ...]) -> slice | list[int]:
    """The rows of these names among all."""
    if names == all_names:
        return slice(None)
    index = {name: row for row, name in enumerate(all_names)}
    return [index[name] for name in names]


def bins(count: int, most: int) -> np.ndarray:
    """Divide `count` columns into at most `most` bins: the first column of each, i64 (bins,)."""
    return np.linspace(0, count, min(count, most), endpoint=False).astype(np.int64)


def worst(values: np.ndarray, starts: np.ndarray, quantity: str) -> np.ndarray:
    """The worst value of each bin, (rows, bins): the largest, of "idlest" and "entropy" the least. For headroom it is
    the least if that is below 1, since the tensor saturates then; else the largest.
    """
    if quantity in ("idlest", "entropy"):
        return np.fmin.reduceat(values, starts, axis=1)
    largest = np.fmax.reduceat(values, starts, axis=1)
    if quantity != "headroom":
        return largest
    least = np.fmin.reduceat(values, starts, axis=1)
    return np.where(least < 1, least, largest)
