"""Before a step, the rows of the FP8 state that have no history get one: a warm pass over the step's own batch.

    state ─which rows are cold?→ host ─if any→ a pass in which each tensor is scaled by its own amax ─→ their scales

Rows are cold before step 0, after a first step that was skipped, behind an output layer of zeros, and in a layer that
first runs in a later step. The host reads the state where it cannot know: if this step did not return it, and while
some row is cold. After that it never waits for the device. A state says by itself which rows are cold, so a run that
was resumed warms what the uninterrupted one does.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.paths import shown
from jax_fp8.core.reach import Reached, reached_in
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import cold_rows, map_gemms_with_path
from jax_fp8.grads.gradients import with_first_scales
from jax_fp8.train.arrival import on_host

PATIENCE = 10  # warm passes in a row that leave a row cold: behind zeros, or before a layer runs, a few are right
TENSORS = "input", "kernel", "output gradient"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Warmed:
    """What a warm pass says beside the state.

    `cold` bool[rows]: rows that it could stage and that have no history yet. `is_finite` bool[]: whether all its amaxes
    were; of a batch where they are not, nothing is taken. `reached`: the rows that it could stage; static.
    """

    cold: jax.Array
    is_finite: jax.Array
    reached: tuple[bool, ...] = field(metadata={"static": True})


def first_scales(fp8_state: Mapping, amaxes: jax.Array, recipe: Recipe | None, reached: Reached) -> tuple[dict, Warmed]:
    """The state after a warm pass that found the amaxes f32[rows], and what there is to say of it."""
    is_finite, rows = jnp.all(jnp.isfinite(amaxes)), reached_in(fp8_state, reached)
    new = with_first_scales(fp8_state, jnp.where(is_finite, amaxes, 0), recipe)
    return new, Warmed(cold_rows(new) & np.array(rows), is_finite, rows)


def of_all_stages(reached: Reached, layers: Collection[str]) -> Reached:
    """The rows of all layers of a pipeline, where each device traces those of one stage, under their names."""
    return {
        ((name, *path[1:]), row)
        for path, row in reached
        for name in (layers if path and path[0] in layers else path[:1])
    }


class WarmUp:
    """Warm passes of one step, and what it remembers between its calls.

    Args:
      run: the program of a warm pass, jitted.
    """

    def __init__(self, run: Callable):
        self._run = run
        self._is_warm, self._in_vain, self._has_warned = False, np.zeros(0, int), False

    def before_step(self, state: Any, batch: Any, is_own: bool) -> Any:
        """The state, with first scales for cold rows that this batch can warm; `is_own`: the step returned it."""
        if not is_own:
            self._is_warm, self._in_vain = False, np.zeros(0, int)
        if self._is_warm or not self._is_cold(state, batch):
            self._is_warm = True
            return state
        warmed, found = self._run(state, batch)
        cold = np.asarray(found.cold)
        self._is_warm = not cold.any()
        if found.is_finite:
            self._in_vain = (np.zeros_like(cold, int) if self._in_vain.size != cold.size else self._in_vain) + 1
            self._in_vain = np.where(cold, self._in_vain, 0)
        self._warn(warmed.fp8)
        return warmed

    def _is_cold(self, state, batch) -> bool:
        cold = cold_rows(on_host(state.fp8))
        return bool(cold.any()) and bool((cold & np.array(self._run.eval_shape(state, batch)[1].reached)).any())

    def _warn(self, fp8_state) -> None:
        rows = self._in_vain >= PATIENCE
        if self._has_warned or not rows.any():
            return
        self._has_warned = True
        warnings.warn(
            f"before each step a pass of its own looks for scales, which takes as long as the step, and {PATIENCE} "
            f"passes in a row found zeros alone, or no run, of {_named(fp8_state, rows)}; pass warm_start=False to "
            "make_train_step if these are to stay at a scale of 1 until they run",
            stacklevel=4,
        )


def _named(fp8_state, rows) -> str:
    names: list[str] = []
    first = 0

    def of_gemm(path, gemm):
        nonlocal first
        size = gemm["scale"].size
        found = rows[first : first + size].reshape(-1, 3).any(0)
        first += size
        if found.any():
            tensors = " and ".join(name for name, is_cold in zip(TENSORS, found, strict=True) if is_cold)
            names.append(f"{'/'.join(shown(path)) or 'the layer'} ({tensors})")

    map_gemms_with_path(of_gemm, fp8_state)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} other layers" if len(names) > 4 else "")
