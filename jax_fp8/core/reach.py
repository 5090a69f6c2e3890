"""Which rows of the FP8 state a pass can stage at all, found while the pass is traced.

A GEMM may be in the state and not in the loss, or have no backward, behind `stop_gradient`. Its rows never get a
history, so a warm start must not wait for them. A GEMM in a branch of `lax.cond` counts: it may run in a later step.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import numpy as np

from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import map_gemms_with_path

Reached = set[tuple[LayerPath, int]]  # the path of a GEMM, and a row of its state
_REACHED: ContextVar[Reached | None] = ContextVar("reached", default=None)


@contextmanager
def reached_rows() -> Iterator[Reached]:
    """Collect the rows that passes traced in this context stage, where their recorders know the path of the GEMM."""
    reached: Reached = set()
    token = _REACHED.set(reached)
    try:
        yield reached
    finally:
        _REACHED.reset(token)


def note_rows(path: LayerPath | None, rows: Iterable[int]) -> None:
    """Note that a GEMM stages these of its rows; without `reached_rows` around it, do nothing."""
    reached = _REACHED.get()
    if reached is not None and path is not None:
        reached.update((path, row) for row in rows)


def reached_in(fp8_state: Mapping, reached: Reached) -> tuple[bool, ...]:
    """For each row of a collection, in the order of `join_amaxes`, whether it is among the reached ones."""
    flags: list[np.ndarray] = []

    def add_flags(path: LayerPath, gemm: Mapping[str, jax.Array]) -> None:
        of_one_layer = [(path, row) in reached for row in range(3)]
        flags.append(np.tile(of_one_layer, gemm["scale"].size // 3))

    map_gemms_with_path(add_flags, fp8_state)
    return tuple(map(bool, np.concatenate(flags))) if flags else ()
