"""Maps over steps: rows are tensors or layers in program order, columns are diagnosed steps, colors show a quantity.

The page has the values themselves, and a script (page.js) draws them. So a reader can switch the quantity, and point at
a cell to see its value. Maps of 288 tensors in 2,000 diagnosed steps have 240 columns and take two megabytes.
"""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_fp8.report.diagnosed import LOADS, QUANTITIES, Diagnosed, bins, worst
from jax_fp8.report.formatting import number, percent, tensor_word
from jax_fp8.report.run_format import JsonObject
from jax_fp8.report.step_checks import norm_ratios
from jax_fp8.report.tensor_checks import severity

COLUMNS = 240  # of a map, at most; a screen has room for so many
# A map with very many rows has fewer columns, so that it has at most so many cells and the page stays small.
LEAST_COLUMNS, CELLS = 40, 64_000
HEAT = ("heat0", "heat1", "heat2", "heat3", "heat4", "heat5", "heat6")
NEUTRAL = ("heat0", "even")
AROUND = ("low2", "low1", "low0", "even", "high0", "high1", "high2")  # from too small to too large


class Scale(NamedTuple):
    """The colors of a quantity. A value from bound i - 1 up to bound i has color i, so there is one more color than
    bounds.
    """

    name: str
    title: str
    bounds: tuple[float, ...]
    colors: tuple[str, ...]
    labels: tuple[str, ...]


def _labels(bounds: Sequence[float], write: Callable[[float], str]) -> tuple[str, ...]:
    """The label of each color, which says its bounds."""
    between = (f"{write(low)} to {write(high)}" for low, high in itertools.pairwise(bounds))
    return f"< {write(bounds[0])}", *between, f"≥ {write(bounds[-1])}"


def _of_shares(name: str, title: str) -> Scale:
    bounds = (float(np.finfo(np.float32).tiny), 1e-4, 1e-3, 1e-2, 0.05, 0.2)
    return Scale(name, title, bounds, HEAT, ("0", *_labels(bounds[1:], percent)))


def _times(value: float) -> str:
    return f"{number(value)} x"


ERROR_BOUNDS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.5)
HEADROOM_BOUNDS = (0.25, 0.5, 0.9, 2, 16, 256)
RATIO_BOUNDS = (0.1, 0.3, 3, 10, 30)
SEVERITY_BOUNDS = (0.5, 1, 3, 10, 30, 100)
TENSOR_SCALES = (
    Scale("overall", "Overall", SEVERITY_BOUNDS, HEAT, _labels(SEVERITY_BOUNDS, _times)),
    _of_shares("saturated", "Saturated"),
    _of_shares("underflowed", "Underflowed"),
    Scale("error", "Error", ERROR_BOUNDS, HEAT, _labels(ERROR_BOUNDS, percent)),
    Scale("headroom", "Headroom", HEADROOM_BOUNDS, AROUND, _labels(HEADROOM_BOUNDS, number)),
)
BUSIEST_BOUNDS = (2, 3, 4, 6, 10, 20)
IDLEST_BOUNDS = (0.05, 0.2, 0.5)
ENTROPY_BOUNDS = (0.1, 0.3, 0.9)
LOAD_SCALES = (
    Scale("busiest", "Busiest", BUSIEST_BOUNDS, HEAT, _labels(BUSIEST_BOUNDS, _times)),
    Scale("idlest", "Idlest", IDLEST_BOUNDS, AROUND[:4], _labels(IDLEST_BOUNDS, _times)),
    _of_shares("unused", "Unused"),
    _of_shares("dropped", "Dropped"),
    Scale("entropy", "Entropy", ENTROPY_BOUNDS, AROUND[:4], _labels(ENTROPY_BOUNDS, percent)),
)
LOAD_UNITS = {"busiest": "times", "idlest": "times"} | dict.fromkeys(("unused", "dropped", "entropy"), "percent")
RATIO_COLORS = ("high1", "high0", "even", "low0", "low1", "low2")
UNITS = {name: "percent" for name in ("saturated", "underflowed", "nonfinite", "error")} | {"overall": "times"}


def tensor_map(diagnosed: Diagnosed) -> JsonObject:
    """The data from which page.js draws the map of FP8 tensors."""
    starts = _columns(diagnosed, len(diagnosed.places))
    values = {name: worst(diagnosed.quantity(name), starts, name) for name in QUANTITIES}
    values["overall"] = worst(severity(diagnosed), starts, "overall")
    rows = [[layer, tensor_word(tensor)] for layer, tensor in diagnosed.places]
    broken = np.maximum.reduceat(diagnosed.broken_tensors, starts, axis=1)
    return _map(diagnosed, starts, rows, TENSOR_SCALES, values, broken)


def gradient_map(diagnosed: Diagnosed) -> JsonObject:
    """The data from which page.js draws the map of gradient norms."""
    starts = _columns(diagnosed, len(diagnosed.layers))
    values = {
        "ratio": worst(norm_ratios(diagnosed.norms), starts, "ratio"),
        "norm": worst(diagnosed.norms, starts, "norm"),
        "nonfinite": worst(diagnosed.nonfinite_gradients, starts, "nonfinite"),
    }
    bounds = _decades(diagnosed.norms)
    scales = (
        Scale("ratio", "Against the median before", RATIO_BOUNDS, RATIO_COLORS, _labels(RATIO_BOUNDS, _times)),
        Scale("norm", "Norm", bounds, HEAT[: len(bounds) + 1], _labels(bounds, number)),
    )
    rows = [[layer, ""] for layer in diagnosed.layers]
    broken = np.maximum.reduceat(diagnosed.broken_gradients, starts, axis=1)
    return _map(diagnosed, starts, rows, scales, values, broken) | {"units": {"ratio": "times", "nonfinite": "count"}}


def load_map(diagnosed: Diagnosed) -> JsonObject:
    """The data from which page.js draws the map of how evenly experts are used."""
    starts = _columns(diagnosed, len(diagnosed.routers))
    values = {name: worst(diagnosed.load(name), starts, name) for name in LOADS}
    rows = [[layer, ""] for layer in diagnosed.routers]
    broken = np.zeros((len(rows), len(starts)), bool)
    return _map(diagnosed, starts, rows, LOAD_SCALES, values, broken) | {"units": LOAD_UNITS}


def _columns(diagnosed: Diagnosed, rows: int) -> np.ndarray:
    """The first diagnosed step of each column of a map with so many rows."""
    return bins(len(diagnosed.steps), max(LEAST_COLUMNS, min(COLUMNS, CELLS // rows)))


def _decades(norms: np.ndarray) -> tuple[float, ...]:
    """Six bounds from the 2 % to the 98 % quantile of the norms, with equal ratios between neighbours."""
    positive = norms[norms > 0]
    low, high = np.quantile(positive, (0.02, 0.98)) if len(positive) else (0.1, 10.0)
    return tuple(float(f"{bound:.2g}") for bound in np.geomspace(low, max(high, 2 * low), len(HEAT) - 1))


def _map(
    diagnosed: Diagnosed,
    starts: np.ndarray,
    rows: list[list[str]],
    scales: tuple[Scale, ...],
    values: Mapping[str, np.ndarray],
    broken: np.ndarray,
) -> JsonObject:
    """The data of one map.

    Args:
      starts: the first diagnosed step of each column.
      rows: layer and tensor of each row.
      scales: the quantities that a reader can choose.
      values: by quantity, (rows, columns).
      broken: bool (rows, columns): cells with elements that are not finite.

    Returns:
      What page.js reads, and `quiet`: whether the map is of one color, which says that all is well.
    """
    ends = np.append(starts[1:], len(diagnosed.steps)) - 1
    return {
        "quiet": not broken.any() and _is_neutral(scales[0], values[scales[0].name]),
        "rows": rows,
        "columns": np.stack([diagnosed.steps[starts], diagnosed.steps[ends]], axis=1).tolist(),
        "scales": [scale._asdict() for scale in scales],
        "values": {name: encode(array) for name, array in values.items()},
        "units": UNITS,
        "broken": np.flatnonzero(broken).tolist(),
    }


def _is_neutral(scale: Scale, values: np.ndarray) -> bool:
    """Whether all values that are known have the color that says nothing."""
    colors = np.searchsorted(scale.bounds, values[~np.isnan(values)], side="right")
    return bool((np.isin(np.array(scale.colors)[colors], NEUTRAL)).all())


def encode(values: np.ndarray) -> str:
    """Base64 of the upper three bytes of each value as float32, rounded: at least four digits. page.js decodes them."""
    largest = np.finfo(np.float32).max
    bits = np.clip(values, -largest, largest).astype(np.float32).view(np.uint32)
    rounded = np.where(np.isfinite(values), bits + 0x80, bits) >> 8
    shifts = np.array([16, 8, 0], np.uint32)
    return base64.b64encode((rounded[..., None] >> shifts & 0xFF).astype(np.uint8).tobytes()).decode()
