"""Maps over steps: rows are tensors or layers in program order, columns are diagnosed steps, a color is a quantity.

The page has the values themselves, and a script (page.js) that draws them: so the quantity can be switched, and every
cell can say what it is. 288 tensors in 2,000 diagnosed steps are 240 columns, and two megabytes of page.
"""

import base64
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_fp8.report.diagnosed import QUANTITIES, Diagnosed, bins, worst
from jax_fp8.report.formatting import number, percent, tensor_word
from jax_fp8.report.step_checks import norm_ratios
from jax_fp8.report.tensor_checks import severity

COLUMNS = 240  # of a map, at most: what a screen has room for
LEAST_COLUMNS, CELLS = 40, 64_000  # a model of very many layers gets fewer, so that the page stays small
HEAT = ("heat0", "heat1", "heat2", "heat3", "heat4", "heat5", "heat6")
AROUND = ("low2", "low1", "low0", "even", "high0", "high1", "high2")  # from too small to too large


class Scale(NamedTuple):
    """Colors of a quantity: class i has values from bound i - 1 on, below bound i. One more color than bounds."""

    name: str
    title: str
    bounds: tuple[float, ...]
    colors: tuple[str, ...]
    labels: tuple[str, ...]


def _labels(bounds: Sequence[float], write) -> tuple[str, ...]:
    """Of classes between bounds."""
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
RATIO_COLORS = ("high1", "high0", "even", "low0", "low1", "low2")
UNITS = {name: "percent" for name in ("saturated", "underflowed", "nonfinite", "error")} | {"overall": "times"}


def tensor_map(diagnosed: Diagnosed) -> dict[str, Any]:
    """What page.js draws of FP8 tensors."""
    starts = _columns(diagnosed, len(diagnosed.places))
    values = {name: worst(diagnosed.of(name), starts, name) for name in QUANTITIES}
    values["overall"] = worst(severity(diagnosed), starts, "overall")
    rows = [[layer, tensor_word(tensor)] for layer, tensor in diagnosed.places]
    broken = np.maximum.reduceat(diagnosed.broken_tensors, starts, axis=1)
    return _map(diagnosed, starts, rows, TENSOR_SCALES, values, broken)


def gradient_map(diagnosed: Diagnosed) -> dict[str, Any]:
    """What page.js draws of gradient norms."""
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


def _columns(diagnosed: Diagnosed, rows: int) -> np.ndarray:
    """Where each column begins among the diagnosed steps."""
    return bins(len(diagnosed.steps), max(LEAST_COLUMNS, min(COLUMNS, CELLS // rows)))


def _decades(norms: np.ndarray) -> tuple[float, ...]:
    """Six bounds between the small and the large norms, at equal ratios."""
    positive = norms[norms > 0]
    low, high = np.quantile(positive, (0.02, 0.98)) if len(positive) else (0.1, 10.0)
    return tuple(float(f"{bound:.2g}") for bound in np.geomspace(low, max(high, 2 * low), len(HEAT) - 1))


def _map(diagnosed: Diagnosed, starts: np.ndarray, rows: list, scales: tuple, values: dict, broken: np.ndarray) -> dict:
    ends = np.append(starts[1:], len(diagnosed.steps)) - 1
    return {
        "rows": rows,
        "columns": np.stack([diagnosed.steps[starts], diagnosed.steps[ends]], axis=1).tolist(),
        "scales": [scale._asdict() for scale in scales],
        "values": {name: encode(array) for name, array in values.items()},
        "units": UNITS,
        "broken": np.flatnonzero(broken).tolist(),
    }


def encode(values: np.ndarray) -> str:
    """Three bytes a value, the upper ones of a float32: four digits and more. page.js reads them."""
    largest = np.finfo(np.float32).max
    bits = np.clip(values, -largest, largest).astype(np.float32).view(np.uint32)
    rounded = np.where(np.isfinite(values), bits + 0x80, bits) >> 8
    shifts = np.array([16, 8, 0], np.uint32)
    return base64.b64encode((rounded[..., None] >> shifts & 0xFF).astype(np.uint8).tobytes()).decode()
