"""Findings about mixtures of experts: experts that nearly no token goes to."""

import numpy as np

from jax_fp8.report.diagnosed import Diagnosed
from jax_fp8.report.finding import WARNING, Finding
from jax_fp8.report.formatting import counted, percent

LASTING = 3  # experts must be unused in so many diagnosed steps, the last ones of the run: at first a router learns
UNUSED = "unused experts"
REMEDY = (
    "Raise `router_aux_loss`, or balance without a loss: `router_correction_bias=True` and the optimizer "
    "`balance_experts`."
)


def check_experts(diagnosed: Diagnosed) -> list[Finding]:
    """One finding for all layers with unused experts."""
    last = diagnosed.load("unused")[:, -LASTING:]
    if last.shape[1] < LASTING or not last.size:
        return []
    lasting = np.where(np.isnan(last).any(axis=1), 0, last.min(axis=1))  # NaN where a step was not measured
    layers = np.flatnonzero(lasting > 0)
    if not layers.size:
        return []
    worst = int(np.argmax(lasting))
    sentence = (
        f"In {counted(len(layers), 'layer')}, experts get less than a sixteenth of the mean number of tokens, in the "
        f"last {LASTING} diagnosed steps: most of all in {diagnosed.routers[worst]}, {percent(lasting[worst])} of them."
    )
    return [Finding(WARNING, UNUSED, sentence, REMEDY, float(lasting[worst]))]
