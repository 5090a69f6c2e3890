"""Findings about FP8 tensors: each check takes the diagnosed steps of a run, and yields findings with their tensors.

With delayed scaling, a scale is computed from the amaxes of earlier steps, so a headroom slightly below 1 for one step
is normal. A problem is a large share of clipped elements, or a scale that does not follow the amax. If one check
explains a problem of a tensor, the others do not report it again (EXPLAINED_BY).
"""

from collections.abc import Iterator

import numpy as np

from jax_fp8.report.diagnosed import OUTPUT_GRADIENT, Diagnosed
from jax_fp8.report.finding import CRITICAL, NOTE, WARNING, Finding
from jax_fp8.report.formatting import counted, number, percent, tensor_name

# A frozen scale stays the same although the amax exceeds its range. Every recipe would have changed it after one step.
FROZEN_HEADROOM = 0.9  # the headroom is below this; amaxes of neighbouring steps differ by a tenth anyway
FROZEN_STEPS = 3  # in so many diagnosed steps with the same scale

# The share of elements that saturate. If the largest thousandth of all elements is clipped to half its size, its error
# exceeds the rounding error of all other elements.
SATURATED = 1e-3
# The share of elements that become zero. If 5 % of normally distributed elements do, their standard deviation is at the
# smallest normal number, and most elements begin to lose bits.
UNDERFLOWED = 0.05
# An outlier's amax, divided by the median amax of the same kind of tensor in all layers; usual layers differ by less.
# A tensor with a smaller amax that underflows has many elements near zero, as after GELU, which is harmless.
OUTLYING = 10.0
# From this headroom on, a scale is too large: the tensor leaves 4 of E4M3's 15 powers of two unused.
WIDE_HEADROOM = 16.0
# Relative root mean square error: three times that of rounding alone, which is 2.6 % in E4M3 and 5.2 % in E5M2.
ERRORS = {"input": 0.08, "kernel": 0.08, OUTPUT_GRADIENT: 0.16}
# A tensor must underflow, or have a large error, in so many diagnosed steps. An odd batch or the first steps are not
# reported.
LASTING = 3

FROZEN, SATURATES, WIDE, OUTLIERS, ERRS = (
    "frozen scale",
    "saturation",
    "scale too large",
    "outliers",
    "large error",
)
EXPLAINED_BY = {SATURATES: {FROZEN}, OUTLIERS: {WIDE}, ERRS: {FROZEN, SATURATES, WIDE, OUTLIERS}}
REMEDIES = {
    FROZEN: "Check that the training loop keeps the FP8 state of every step: a custom loop must call `update_state` "
    "once a step, and pass its result to the next step.",
    SATURATES: "`DelayedScaling(margin=1)` doubles the headroom; with `CurrentScaling()` or `BlockScaling()` nothing "
    "saturates.",
    WIDE: 'With `DelayedScaling(forget_outliers=True)` or `amax_compute_algo="most_recent"`, the scale recovers sooner '
    "after a batch with large values.",
    OUTLIERS: "A few large elements determine the scale of all others; or most elements are near zero, as after GELU, "
    "which is harmless. If the loss suffers, try `BlockScaling()`, where a large element affects only its own tile, "
    "or keep this layer in bfloat16 (`recipe=None`).",
    ERRS: "If the loss suffers, try `CurrentScaling()` or `BlockScaling()`, or keep this layer in bfloat16 "
    "(`recipe=None`).",
}


def check_tensors(diagnosed: Diagnosed) -> list[Finding]:
    """Findings about tensors, the worst kind first, and the worst of each kind first."""
    kinds_of_row: dict[int, set[str]] = {}
    findings: list[Finding] = []
    for check in (frozen_scales, saturated_tensors, wide_scales, outliers, large_errors):
        of_check = []
        for row, finding in check(diagnosed):
            kinds = kinds_of_row.setdefault(row, set())
            if not kinds & EXPLAINED_BY.get(finding.kind, set()):
                kinds.add(finding.kind)
                of_check.append(finding)
        findings += sorted(of_check, key=lambda finding: -finding.weight)
    return findings


def frozen_scales(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Scales that do not change, although the amax needs a larger one."""
    scales, headrooms = diagnosed.quantity("scale"), diagnosed.quantity("headroom")
    for row in np.flatnonzero((headrooms < FROZEN_HEADROOM).sum(axis=1) >= FROZEN_STEPS):
        known = np.flatnonzero(np.isfinite(scales[row]) & np.isfinite(headrooms[row]))
        starts = np.flatnonzero(np.diff(scales[row, known], prepend=np.nan) != 0)
        low = np.add.reduceat(headrooms[row, known] < FROZEN_HEADROOM, starts, dtype=int)
        longest = int(np.argmax(low))
        if low[longest] >= FROZEN_STEPS:
            stretch = known[starts[longest] : (*starts, len(known))[longest + 1]]
            yield int(row), _frozen(diagnosed, int(row), stretch)


def _frozen(diagnosed: Diagnosed, row: int, stretch: np.ndarray) -> Finding:
    """The finding about a stretch of columns in which the scale was the same."""
    headroom = diagnosed.quantity("headroom")[row, stretch]
    excess = 1 / max(float(headroom.min()), 1e-30)
    first, last = diagnosed.steps[stretch[0]], diagnosed.steps[stretch[-1]]
    still = f"frozen since step {first:,}"
    if last < diagnosed.steps[-1]:
        still = f"frozen from step {first:,} to {last:,}"
    shares = diagnosed.quantity("saturated")
    saturated = shares[row, stretch]
    worst = stretch[np.nanargmax(saturated)] if np.isfinite(saturated).any() else stretch[np.argmin(headroom)]
    low = diagnosed.steps[stretch[np.argmax(headroom < FROZEN_HEADROOM)]]
    sentence = (
        f"The {tensor_name(diagnosed.places[row])} saturated {percent(shares[row, worst])} of its elements at step "
        f"{diagnosed.steps[worst]:,}: its scale did not follow ({still}). The scale has been too small since step "
        f"{low:,}, and the amax is up to {number(excess)} times the largest number that it can hold."
    )
    return Finding(CRITICAL, FROZEN, sentence, REMEDIES[FROZEN], excess, diagnosed.places[row])


def saturated_tensors(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors of which too many elements are clipped, in one step (a note) or in several (a warning)."""
    saturated = diagnosed.quantity("saturated")
    for row, columns in _rows_above(saturated, SATURATED, 1):
        worst = columns[np.argmax(saturated[row, columns])]
        sentence = (
            f"The {tensor_name(diagnosed.places[row])} saturated {percent(saturated[row, worst])} of its elements at "
            f"step {diagnosed.steps[worst]:,}, and more than {percent(SATURATED)} in "
            f"{_share_of_steps(diagnosed, columns)}."
        )
        level = NOTE if len(columns) == 1 else WARNING
        weight = float(saturated[row, worst]) * len(columns)
        yield row, Finding(level, SATURATES, sentence, REMEDIES[SATURATES], weight, diagnosed.places[row])


def wide_scales(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Scales for much larger numbers than the tensor has, so that its small elements are lost."""
    headrooms, underflowed, errors = (diagnosed.quantity(name) for name in ("headroom", "underflowed", "error"))
    suffers = (underflowed > UNDERFLOWED) | (errors > error_limits(diagnosed))
    for row, columns in _rows_above(np.where(suffers, headrooms, 0), WIDE_HEADROOM, LASTING):
        worst = columns[np.argmax(np.nan_to_num(underflowed[row, columns]))]
        sentence = (
            f"The scale of the {tensor_name(diagnosed.places[row])} could hold {number(headrooms[row, worst])} times "
            f"its amax at step {diagnosed.steps[worst]:,}: {percent(underflowed[row, worst])} of its elements "
            f"underflowed, the error was {percent(errors[row, worst])}. The scale was too large in "
            f"{_share_of_steps(diagnosed, columns)}."
        )
        yield (
            row,
            Finding(WARNING, WIDE, sentence, REMEDIES[WIDE], float(underflowed[row, worst]), diagnosed.places[row]),
        )


def outliers(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors whose scale fits the largest element, but is too large for many others; only a note if their amax is like
    that of other layers.
    """
    headrooms, underflowed, medians = (
        diagnosed.quantity("headroom"),
        diagnosed.quantity("underflowed"),
        Medians(diagnosed),
    )
    for row, columns in _rows_above(np.where(headrooms < WIDE_HEADROOM, underflowed, 0), UNDERFLOWED, LASTING):
        worst = columns[np.argmax(underflowed[row, columns])]
        times = medians.over(row, int(worst))
        has = "has outliers" if times > OUTLYING else "may have outliers"
        sentence = (
            f"The {tensor_name(diagnosed.places[row])} {has}: {percent(underflowed[row, worst])} of its "
            f"elements underflowed at step {diagnosed.steps[worst]:,}, at a scale that fits its amax (headroom "
            f"{number(headrooms[row, worst])}), and more than {percent(UNDERFLOWED)} in "
            f"{_share_of_steps(diagnosed, columns)}. The amax was {number(times)} times the median of all layers."
        )
        level, weight = WARNING if times > OUTLYING else NOTE, float(underflowed[row, worst])
        yield row, Finding(level, OUTLIERS, sentence, REMEDIES[OUTLIERS], weight, diagnosed.places[row])


class Medians:
    """The median amax of all layers, by kind of tensor (input, kernel, output gradient) and step. Each median is
    computed once, and not for every layer.
    """

    def __init__(self, diagnosed: Diagnosed):
        self._diagnosed, self._amaxes = diagnosed, diagnosed.quantity("amax")
        rows: dict[str, list[int]] = {}
        for row, (_, tensor) in enumerate(diagnosed.places):
            rows.setdefault(tensor, []).append(row)
        self._rows = {tensor: np.array(of_kind) for tensor, of_kind in rows.items()}
        self._known: dict[tuple[str, int], float] = {}

    def over(self, row: int, column: int) -> float:
        """The amax of a tensor, divided by the median amax of the same kind of tensor in all layers."""
        key = self._diagnosed.places[row][1], column
        if key not in self._known:
            amaxes = self._amaxes[self._rows[key[0]], column].astype(float)
            others = amaxes[np.isfinite(amaxes) & (amaxes > 0)]
            self._known[key] = float(np.median(others)) if len(others) else float("nan")
        return float(self._amaxes[row, column]) / self._known[key]


def large_errors(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors whose error in FP8 is much larger than that of rounding, for any other reason."""
    errors, limits = diagnosed.quantity("error"), error_limits(diagnosed)
    for row, columns in _rows_above(errors / limits, 1.0, LASTING):
        worst = columns[np.argmax(errors[row, columns])]
        sentence = (
            f"The {tensor_name(diagnosed.places[row])} has an error of {percent(errors[row, worst])} (root mean "
            f"square) in FP8 at step {diagnosed.steps[worst]:,}, and of more than {percent(limits[row, 0])}, three "
            f"times that of rounding, in {_share_of_steps(diagnosed, columns)}."
        )
        yield row, Finding(WARNING, ERRS, sentence, REMEDIES[ERRS], float(errors[row, worst]), diagnosed.places[row])


def severity(diagnosed: Diagnosed) -> np.ndarray:
    """(tensors, steps): the largest quantity as a multiple of its threshold, which is a problem above 1; infinite if
    elements are not finite.
    """
    parts = (
        diagnosed.quantity("saturated") / SATURATED,
        diagnosed.quantity("underflowed") / UNDERFLOWED,
        diagnosed.quantity("error") / error_limits(diagnosed),
        np.where(diagnosed.broken_tensors, np.inf, np.nan),
    )
    return np.fmax.reduce(parts)


def error_limits(diagnosed: Diagnosed) -> np.ndarray:
    """(tensors, 1): the error above which each tensor is a finding."""
    return np.array([ERRORS.get(tensor, ERRORS[OUTPUT_GRADIENT]) for _, tensor in diagnosed.places]).reshape(-1, 1)


def _rows_above(values: np.ndarray, limit: float, least: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rows with at least `least` columns above the limit, and these columns. If there are fewer than twice as many
    columns, half of them are enough.
    """
    above = values > limit
    for row in np.flatnonzero(above.sum(axis=1) >= max(1, min(least, -(-values.shape[1] // 2)))):
        yield int(row), np.flatnonzero(above[row])


def _share_of_steps(diagnosed: Diagnosed, columns: np.ndarray) -> str:
    return f"{len(columns):,} of {counted(len(diagnosed.steps), 'diagnosed step')}"
