"""What stands out among FP8 tensors: each check takes the diagnosed steps of a run, and returns its findings by tensor.

With delayed scaling a scale follows the amaxes of the steps before, so that a headroom a little below 1 for one step is
ordinary: what counts is how much is cut off, and whether the scale follows. What one check explains, another does not
repeat.
"""

from collections.abc import Iterator

import numpy as np

from jax_fp8.report.diagnosed import OUTPUT_GRADIENT, Diagnosed
from jax_fp8.report.finding import CRITICAL, NOTE, WARNING, Finding
from jax_fp8.report.formatting import counted, number, percent, tensor_name

# Of a scale that stands still while amaxes are above what it can hold. Any recipe would have moved it after one step.
FROZEN_HEADROOM = 0.9  # a tenth is what amaxes of neighbouring steps differ by anyway
FROZEN_STEPS = 3  # diagnosed steps with that headroom and the same scale

# Of elements that saturate: one in a thousand, the largest ones, halved, errs more than rounding does in all others.
SATURATED = 1e-3
# Of elements that become zero. Where 5 % of normally distributed ones do, their standard deviation is at the smallest
# normal number, and the bits of most elements begin to go.
UNDERFLOWED = 0.05
# Of an amax, over the median of the same tensors of all layers: layers differ by less. Without it, many elements are
# nearly zero, as after GELU, and that is no loss.
OUTLYING = 10.0
# From this headroom on, a scale is made for larger numbers than there are: 4 of the 15 powers of two in E4M3 are idle.
WIDE_HEADROOM = 16.0
# Root mean square, relative: three times what rounding alone makes, 2.6 % in E4M3 and 5.2 % in E5M2.
ERRORS = {"input": 0.08, "kernel": 0.08, OUTPUT_GRADIENT: 0.16}
# Diagnosed steps in which a tensor must underflow or err: an odd batch, or the first steps, are no finding.
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
    FROZEN: "Is the FP8 state of every step kept? A loop of your own calls `update_state` once a step, and hands what "
    "it returns to the next.",
    SATURATES: "`DelayedScaling(margin=1)` doubles the headroom; with `CurrentScaling()` or `BlockScaling()` nothing "
    "saturates.",
    WIDE: '`DelayedScaling(forget_outliers=True)`, or `amax_compute_algo="most_recent"`, comes back sooner after a '
    "batch with large values.",
    OUTLIERS: "A few large elements take the range of all others; or most are nearly zero, as after GELU, which is "
    "harmless. If the loss suffers, try `BlockScaling()`, in which a large element costs only those that share its "
    "tile, or keep this layer in bfloat16 (`recipe=None`).",
    ERRS: "If the loss suffers, try `CurrentScaling()` or `BlockScaling()`, or keep this layer in bfloat16 "
    "(`recipe=None`).",
}


def check_tensors(diagnosed: Diagnosed) -> list[Finding]:
    """Findings on tensors, the worst kind first, and the worst of a kind first."""
    named: dict[int, set[str]] = {}
    findings: list[Finding] = []
    for check in (frozen_scales, saturated_tensors, wide_scales, outliers, large_errors):
        found = []
        for row, finding in check(diagnosed):
            kinds = named.setdefault(row, set())
            if not kinds & EXPLAINED_BY.get(finding.kind, set()):
                kinds.add(finding.kind)
                found.append(finding)
        findings += sorted(found, key=lambda finding: -finding.weight)
    return findings


def frozen_scales(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Scales that stand still, though the amax asks for a larger one."""
    scales, headrooms = diagnosed.of("scale"), diagnosed.of("headroom")
    for row in np.flatnonzero((headrooms < FROZEN_HEADROOM).sum(axis=1) >= FROZEN_STEPS):
        known = np.flatnonzero(np.isfinite(scales[row]) & np.isfinite(headrooms[row]))
        starts = np.flatnonzero(np.diff(scales[row, known], prepend=np.nan) != 0)
        low = np.add.reduceat(headrooms[row, known] < FROZEN_HEADROOM, starts, dtype=int)
        longest = int(np.argmax(low))
        if low[longest] >= FROZEN_STEPS:
            stretch = known[starts[longest] : (*starts, len(known))[longest + 1]]
            yield int(row), _frozen(diagnosed, int(row), stretch)


def _frozen(diagnosed: Diagnosed, row: int, stretch: np.ndarray) -> Finding:
    """About the columns of a stretch in which the scale was the same."""
    headroom = diagnosed.of("headroom")[row, stretch]
    excess = 1 / max(float(headroom.min()), 1e-30)
    first, last = diagnosed.steps[stretch[0]], diagnosed.steps[stretch[-1]]
    still = f"frozen since step {first:,}"
    if last < diagnosed.steps[-1]:
        still = f"frozen from step {first:,} to {last:,}"
    saturated = diagnosed.of("saturated")[row, stretch]
    worst = stretch[np.nanargmax(saturated)] if np.isfinite(saturated).any() else stretch[np.argmin(headroom)]
    low = diagnosed.steps[stretch[np.argmax(headroom < FROZEN_HEADROOM)]]
    sentence = (
        f"The {tensor_name(diagnosed.places[row])} saturated {percent(diagnosed.of('saturated')[row, worst])} of its "
        f"elements at step {diagnosed.steps[worst]:,}: its scale did not follow ({still}). It has been too small since "
        f"step {low:,}, and the amax is up to {number(excess)} times what it can hold."
    )
    return Finding(CRITICAL, FROZEN, sentence, REMEDIES[FROZEN], excess, diagnosed.places[row])


def saturated_tensors(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors of which too much is cut off, in one step (a note) or in several."""
    saturated = diagnosed.of("saturated")
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
    """Scales that are made for much larger numbers than there are, so that the small ones are lost."""
    headrooms, underflowed, errors = (diagnosed.of(name) for name in ("headroom", "underflowed", "error"))
    suffers = (underflowed > UNDERFLOWED) | (errors > error_limits(diagnosed))
    for row, columns in _rows_above(np.where(suffers, headrooms, 0), WIDE_HEADROOM, LASTING):
        worst = columns[np.argmax(np.nan_to_num(underflowed[row, columns]))]
        sentence = (
            f"The scale of the {tensor_name(diagnosed.places[row])} is made for {number(headrooms[row, worst])} times "
            f"what it had at step {diagnosed.steps[worst]:,}: {percent(underflowed[row, worst])} of its elements "
            f"underflowed, the error was {percent(errors[row, worst])}. It was too large in "
            f"{_share_of_steps(diagnosed, columns)}."
        )
        yield (
            row,
            Finding(WARNING, WIDE, sentence, REMEDIES[WIDE], float(underflowed[row, worst]), diagnosed.places[row]),
        )


def outliers(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors whose scale fits the largest element, and is too large for many others; a note where their amax is
    ordinary.
    """
    headrooms, underflowed, medians = diagnosed.of("headroom"), diagnosed.of("underflowed"), Medians(diagnosed)
    for row, columns in _rows_above(np.where(headrooms < WIDE_HEADROOM, underflowed, 0), UNDERFLOWED, LASTING):
        worst = columns[np.argmax(underflowed[row, columns])]
        times = medians.over(row, int(worst))
        has = "has outliers" if times > OUTLYING else "may have outliers"
        sentence = (
            f"The {tensor_name(diagnosed.places[row])} {has}: {percent(underflowed[row, worst])} of its "
            f"elements underflowed at step {diagnosed.steps[worst]:,}, at a scale that fits its amax (headroom "
            f"{number(headrooms[row, worst])}), and more than {percent(UNDERFLOWED)} in "
            f"{_share_of_steps(diagnosed, columns)}. The amax was {number(times)} times the median of all layers'."
        )
        level, weight = WARNING if times > OUTLYING else NOTE, float(underflowed[row, worst])
        yield row, Finding(level, OUTLIERS, sentence, REMEDIES[OUTLIERS], weight, diagnosed.places[row])


class Medians:
    """Of the amaxes of all layers, by tensor and step: of inputs, of kernels, of output gradients. Each is computed
    once, so that a finding costs the same in a model of ten layers and of a thousand.
    """

    def __init__(self, diagnosed: Diagnosed):
        self._diagnosed, self._amaxes = diagnosed, diagnosed.of("amax")
        rows: dict[str, list[int]] = {}
        for row, (_, tensor) in enumerate(diagnosed.places):
            rows.setdefault(tensor, []).append(row)
        self._rows = {tensor: np.array(found) for tensor, found in rows.items()}
        self._known: dict[tuple[str, int], float] = {}

    def over(self, row: int, column: int) -> float:
        """The amax of a tensor over the median of those of all layers, of inputs if it is one."""
        key = self._diagnosed.places[row][1], column
        if key not in self._known:
            amaxes = self._amaxes[self._rows[key[0]], column].astype(float)
            others = amaxes[np.isfinite(amaxes) & (amaxes > 0)]
            self._known[key] = float(np.median(others)) if len(others) else float("nan")
        return float(self._amaxes[row, column]) / self._known[key]


def large_errors(diagnosed: Diagnosed) -> Iterator[tuple[int, Finding]]:
    """Tensors that FP8 changes by much more than rounding does, for whatever reason."""
    errors, limits = diagnosed.of("error"), error_limits(diagnosed)
    for row, columns in _rows_above(errors / limits, 1.0, LASTING):
        worst = columns[np.argmax(errors[row, columns])]
        sentence = (
            f"The {tensor_name(diagnosed.places[row])} is off by {percent(errors[row, worst])} (root mean square) in "
            f"FP8 at step {diagnosed.steps[worst]:,}, and by more than {percent(limits[row, 0])}, three times "
            f"rounding's share, in {_share_of_steps(diagnosed, columns)}."
        )
        yield row, Finding(WARNING, ERRS, sentence, REMEDIES[ERRS], float(errors[row, worst]), diagnosed.places[row])


def severity(diagnosed: Diagnosed) -> np.ndarray:
    """(tensors, steps): how many times a threshold is passed; above 1 is too much, and infinite is not finite."""
    parts = (
        diagnosed.of("saturated") / SATURATED,
        diagnosed.of("underflowed") / UNDERFLOWED,
        diagnosed.of("error") / error_limits(diagnosed),
        np.where(diagnosed.broken_tensors, np.inf, np.nan),
    )
    return np.fmax.reduce(parts)


def error_limits(diagnosed: Diagnosed) -> np.ndarray:
    """(tensors, 1): the error of each from which on it is a finding."""
    return np.array([ERRORS.get(tensor, ERRORS[OUTPUT_GRADIENT]) for _, tensor in diagnosed.places]).reshape(-1, 1)


def _rows_above(values: np.ndarray, limit: float, least: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rows with at least so many columns above the limit, and these columns; of fewer diagnosed steps half of them."""
    above = values > limit
    for row in np.flatnonzero(above.sum(axis=1) >= max(1, min(least, -(-values.shape[1] // 2)))):
        yield int(row), np.flatnonzero(above[row])


def _share_of_steps(diagnosed: Diagnosed, columns: np.ndarray) -> str:
    return f"{len(columns):,} of {counted(len(diagnosed.steps), 'diagnosed step')}"
