"""The worst number of a step's diagnostics in words, such as a run shows beside a loss that is not finite."""

from collections.abc import Mapping, Sequence

from jax_fp8.core.checks import describe
from jax_fp8.core.formats import OUTPUT_GRADIENT
from jax_fp8.train.diagnostics import TENSORS, Row

NOTABLE_SATURATION = 1e-3  # share of a tensor; a scale from the step before saturates far fewer elements


def find_fault(rows: Mapping[str, Sequence[Row]]) -> str | None:
    """Name the worst number of a step's diagnostics, or find that there is no fault.

    Args:
      rows: of `Diagnostics.rows()`, or such rows read from a log.

    Returns:
      A clause, or None. It names the first tensor that is not finite, in the order in which a step computes them. If
      all are finite, it names the first such gradient, else the tensor with the largest share of saturated elements,
      from 0.1 % on.

    Raises:
      ValueError: if `rows` are not a dict with "tensors" and "gradients".

    Example:
      >>> import jax_fp8 as fp8
      >>> gradients = [{"layer": "mlp", "norm": 1.0, "nonfinite": 2}]
      >>> fp8.find_fault({"tensors": [], "gradients": gradients})
      'the gradients of mlp are not finite'
    """
    if not isinstance(rows, Mapping) or not {"tensors", "gradients"} <= set(rows):
        raise ValueError(f'rows must hold "tensors" and "gradients", got {describe(rows)}; pass diagnostics.rows()')
    tensors = rows["tensors"]
    # A step computes inputs from the first layer to the last, and then output gradients from the last to the first.
    output_gradients = [row for row in reversed(tensors) if row["tensor"] == TENSORS[OUTPUT_GRADIENT]]
    in_order = [row for row in tensors if row["tensor"] != TENSORS[OUTPUT_GRADIENT]] + output_gradients
    for row in in_order:
        if row["nonfinite"]:
            return f"{100 * row['nonfinite']:.3g} % of {_described(row)} is not finite"
    layers = [row["layer"] for row in rows["gradients"] if row["nonfinite"]]
    if layers:
        others = f", nor those of {len(layers) - 1} other layers" if len(layers) > 1 else ""
        return f"the gradients of {layers[0]} are not finite{others}"
    worst = max(tensors, key=lambda row: row["saturated"] or 0, default=None)
    if worst is None or (worst["saturated"] or 0) < NOTABLE_SATURATION:
        return None
    return f"{100 * worst['saturated']:.3g} % of {_described(worst)} is larger than its scale allows"


def _described(row: Row) -> str:
    return f"the {row['tensor'].replace('_', ' ')} of {row['layer']}"
