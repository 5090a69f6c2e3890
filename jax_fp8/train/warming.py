"""Warm passes: before a step, they give first scales to the rows of the FP8 state that have no history, the cold rows.

    state ─which rows are cold?→ host ─if any→ a pass in which each tensor is scaled by its own amax → first scales

Rows are cold before step 0, after a first step that was skipped, behind an output layer of zeros, and in a layer that
first runs in a later step. The host reads the state only if this step did not return it, or while some row is cold.
After that it never waits for the device. The state alone says which rows are cold, so a resumed run has the same warm
passes as an uninterrupted one.
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.paths import LayerPath, shown
from jax_fp8.core.reach import Reached, reached_in
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import cold_rows, map_gemms_with_path
from jax_fp8.core.types import Batch
from jax_fp8.grads.gradients import with_first_scales
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.arrival import on_host

PATIENCE = 10  # warm passes in a row that leave a row cold; behind zeros, or before a layer runs, a few are normal
TENSORS = "input", "kernel", "output gradient"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Warmed:
    """What a warm pass reports beside the state.

    Args:
      cold: bool[rows], the rows that the pass reached and that still have no history.
      is_finite: bool[], whether all amaxes of the pass are finite. If not, the pass changes no scale.
      reached: for each row whether the traced pass may stage it (core/reach.py); static.
    """

    cold: jax.Array
    is_finite: jax.Array
    reached: tuple[bool, ...] = field(metadata={"static": True})


def first_scales(fp8_state: Mapping, amaxes: jax.Array, recipe: Recipe | None, reached: Reached) -> tuple[dict, Warmed]:
    """The state after a warm pass with these amaxes f32[rows], and a report of the pass."""
    is_finite, rows = jnp.all(jnp.isfinite(amaxes)), reached_in(fp8_state, reached)
    new = with_first_scales(fp8_state, jnp.where(is_finite, amaxes, 0), recipe)
    return new, Warmed(cold_rows(new) & np.array(rows), is_finite, rows)


def rows_of_all_stages(reached: Reached, layers: Collection[str]) -> Reached:
    """The rows of all layers of a pipeline. A device traces the layers of one stage only; all layers are alike, so a
    row that one of them reaches is reached in each.
    """
    return {
        ((name, *path[1:]), row)
        for path, row in reached
        for name in (layers if path and path[0] in layers else path[:1])
    }


class WarmUp:
    """The warm passes of one step, and what it remembers between its calls.

    Args:
      run: the jitted program of a warm pass.
    """

    def __init__(self, run: jax.stages.Wrapped):
        self._run = run
        self._is_warm, self._has_warned = False, False
        self._failures = np.zeros(0, int)  # of each row: how many warm passes in a row left it cold

    def before_step(self, state: TrainState, batch: Batch, is_own: bool) -> TrainState:
        """The state, with first scales for cold rows that this batch reaches; `is_own`: the step returned it."""
        if not is_own:
            self._is_warm, self._failures = False, np.zeros(0, int)
        if self._is_warm or not self._is_cold(state, batch):
            self._is_warm = True
            return state
        state, warmed = self._run(state, batch)
        cold = np.asarray(warmed.cold)
        self._is_warm = not cold.any()
        if warmed.is_finite:
            self._failures = (np.zeros_like(cold, int) if self._failures.size != cold.size else self._failures) + 1
            self._failures = np.where(cold, self._failures, 0)
        self._warn(state.fp8)
        return state

    def _is_cold(self, state: TrainState, batch: Batch) -> bool:
        """Whether some row is cold that this batch reaches."""
        cold = cold_rows(on_host(state.fp8))
        return bool(cold.any()) and bool((cold & np.array(jax.eval_shape(self._run, state, batch)[1].reached)).any())

    def _warn(self, fp8_state: Mapping) -> None:
        rows = self._failures >= PATIENCE
        if self._has_warned or not rows.any():
            return
        self._has_warned = True
        warnings.warn(
            f"before each step a warm pass looks for scales, which takes as long as the step, and {PATIENCE} passes in "
            f"a row found only zeros, or no run, of {_named(fp8_state, rows)}; pass warm_start=False to "
            "make_train_step if these are to stay at a scale of 1 until they run",
            stacklevel=4,
        )


def _named(fp8_state: Mapping, rows: np.ndarray) -> str:
    """The layers that have some of these rows, and the tensors of the rows."""
    names: list[str] = []
    first = 0

    def add_name(path: LayerPath, gemm: Mapping[str, jax.Array]) -> None:
        nonlocal first
        size = gemm["scale"].size
        is_named = rows[first : first + size].reshape(-1, 3).any(0)
        first += size
        if is_named.any():
            tensors = " and ".join(name for name, is_cold in zip(TENSORS, is_named, strict=True) if is_cold)
            names.append(f"{'/'.join(shown(path)) or 'the layer'} ({tensors})")

    map_gemms_with_path(add_name, fp8_state)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} other layers" if len(names) > 4 else "")
