"""Curves over steps, as SVG that stretches with the page.

Text in a stretched SVG would be distorted. So the SVG has no text: the numbers at the axes are HTML elements, which CSS
places over it in percent.
"""

import itertools
import json
import math
from collections.abc import Callable
from html import escape
from typing import NamedTuple

import numpy as np

from jax_fp8.report.formatting import number

POINTS = 400  # of a curve, at most; a screen cannot show more
SIZE = 1000  # width and height of the drawing, in its own units


class Curve(NamedTuple):
    """Values over steps. A `dotted` curve has few points, and each is marked. `color` is an index from 0."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: int = 0
    dotted: bool = False


class Chart(NamedTuple):
    """Curves that share a unit, with vertical marks at some steps."""

    title: str
    unit: str
    curves: list[Curve]
    marks: tuple[int, ...] = ()
    from_zero: bool = False


def draw(chart: Chart, last_step: int) -> str:
    """The HTML of a chart; empty if no curve has a point."""
    curves = [thin(curve) for curve in map(known, chart.curves) if len(curve.steps)]
    if not curves:
        return ""
    every = np.concatenate([curve.values for curve in curves])
    low, high = (0.0 if chart.from_zero else float(every.min())), float(every.max())
    ticks = ticks_of(low, high, 4)
    low, high = ticks[0], ticks[-1]
    last = max(last_step, 1)

    def across(step: float) -> float:
        return step / last

    def down(value: float) -> float:
        return 1 - (value - low) / (high - low)

    rules = "".join(f'<path class="rule" d="M0 {SIZE * down(tick):.1f}H{SIZE}"/>' for tick in ticks)
    marks = "".join(f'<path class="mark" d="M{SIZE * across(step):.1f} 0V{SIZE}"/>' for step in chart.marks)
    paths = "".join(_path(curve, across, down) for curve in curves)
    left = "".join(f'<span class="y" style="top:{100 * down(tick):.2f}%">{number(tick)}</span>' for tick in ticks)
    below = "".join(
        f'<span class="x" style="left:{100 * across(step):.2f}%">{step:,.0f}</span>'
        for step in ticks_of(0, last, 5)
        if step <= last
    )
    keys = "".join(_key(curve) for curve in curves)
    box = f'viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none"'
    return (
        f'<figure class="chart" data-curves="{escape(_points(curves, last))}">'
        f"<figcaption>{escape(chart.title)} <small>{escape(chart.unit)}</small></figcaption>"
        f'<ul class="keys">{keys}</ul><div class="plot">{left}'
        f'<svg {box} role="img" aria-label="{escape(chart.title)} over steps">{rules}{marks}{paths}</svg>'
        f'{below}<i class="cursor"></i></div></figure>'
    )


def known(curve: Curve) -> Curve:
    """The curve without the steps whose value is not known."""
    finite = np.isfinite(curve.values)
    return curve._replace(steps=curve.steps[finite], values=curve.values[finite])


def thin(curve: Curve) -> Curve:
    """The curve with at most POINTS points, the least and the largest of each bin, so that spikes stay visible."""
    count = len(curve.steps)
    if count <= POINTS:
        return curve
    edges = np.linspace(0, count, POINTS // 2 + 1).astype(int)
    extremes = set()
    for start, stop in itertools.pairwise(edges.tolist()):
        part = curve.values[start:stop]
        extremes |= {start + int(part.argmin()), start + int(part.argmax())}
    rows = sorted({*extremes, count - 1})
    return curve._replace(steps=curve.steps[rows], values=curve.values[rows])


def ticks_of(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers, from at most `low` to at least `high`."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-30):  # equal, but for rounding
        high = low + (abs(low) or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _path(curve: Curve, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    """The SVG paths of a curve.

    Args:
      across: from a step to its place from 0 at the left to 1 at the right.
      down: from a value to its place from 0 at the top to 1 at the bottom.
    """
    points = [
        f"{SIZE * across(step):.1f} {SIZE * down(value):.1f}"
        for step, value in zip(curve.steps, curve.values, strict=True)
    ]
    line = f'<path class="line c{curve.color}{" thin" if curve.dotted else ""}" d="M{"L".join(points)}"/>'
    if len(points) == 1 or (curve.dotted and len(points) <= POINTS // 4):  # a dot is a line of length 0 with round ends
        line += f'<path class="dot c{curve.color}" d="{"".join(f"M{point}h0" for point in points)}"/>'
    return line


def _key(curve: Curve) -> str:
    kind = " dotted" if curve.dotted else ""
    last = number(float(curve.values[-1]))
    return (
        f'<li class="c{curve.color}{kind}"><b></b>{escape(curve.label)}: '
        f'<output data-last="{escape(last)}">{escape(last)}</output></li>'
    )


def _points(curves: list[Curve], last: int) -> str:
    """JSON of the curves, from which the script shows the values of the step under the pointer."""
    points = [[curve.steps.tolist(), [float(f"{value:.4g}") for value in curve.values]] for curve in curves]
    return json.dumps({"last": last, "curves": points}, separators=(",", ":"))
