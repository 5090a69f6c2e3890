"""How a report writes numbers, tensors and steps."""

import math
from collections.abc import Sequence

from jax_fp8.report.diagnosed import OUTPUT_GRADIENT, Place

UNKNOWN = "–"


def number(value: float) -> str:
    """Three significant digits, or all digits before the point: 0.0123, 4.57, 1,234, 3.20e-07."""
    if not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share from 0 to 1 in percent."""
    if not math.isfinite(share):
        return UNKNOWN
    if 0 < share < 1e-5:
        return "< 0.001 %"
    return f"{number(100 * float(share))} %"


def tensor_name(place: Place) -> str:
    """A tensor's name in a sentence: "output gradient of h_3/mlp/down"."""
    layer, tensor = place
    return f"{tensor_word(tensor)} of {layer}"


def tensor_word(tensor: str) -> str:
    return "output gradient" if tensor == OUTPUT_GRADIENT else tensor


def counted(count: int, one: str, several: str = "") -> str:
    """ "1 step", "3 steps"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def step_list(steps: Sequence[int], most: int = 5) -> str:
    """ "step 3", "steps 3, 4 and 9", "steps 3, 4, 9, ... 800"."""
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if len(steps) <= most:
        return f"steps {', '.join(f'{step:,}' for step in steps[:-1])} and {steps[-1]:,}"
    return f"steps {', '.join(f'{step:,}' for step in steps[: most - 1])}, ... {steps[-1]:,}"
