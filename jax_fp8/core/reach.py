"""Which rows of the FP8 state a pass can stage at all, found while it is traced.

A GEMM may be in the state and not in the loss, or be there without a backward, behind `stop_gradient`. Whoever waits
for such a row to get a history waits for ever. A GEMM in a branch of `lax.cond` counts: it may run in a later step.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import map_gemms_with_path

Reached = set[tuple[LayerPath, int]]  # the paths of GEMMs, and their rows
_REACHED: ContextVar[Reached | None] = ContextVar("reached", default=None)


@contextmanager
def reached_rows() -> Iterator[Reached]:
    """Collect the rows that passes traced in this context stage, of recorders that know their path."""
    found: Reached = set()
    token = _REACHED.set(found)
    try:
        yield found
    finally:
        _REACHED.reset(token)


def note_rows(path: LayerPath | None, rows: Iterable[int]) -> None:
    """A GEMM says which of its rows it stages, to whoever collects them."""
    found = _REACHED.get()
    if found is not None and path is not None:
        found.update((path, row) for row in rows)


def reached_in(fp8_state: Mapping, reached: Reached) -> tuple[bool, ...]:
    """Of each row of a collection, as amaxes are joined, whether it is among these."""
    found: list[np.ndarray] = []

    def of_gemm(path, gemm):
        of_one = [(path, row) in reached for row in range(3)]
        found.append(np.tile(of_one, gemm["scale"].size // 3))

    map_gemms_with_path(of_gemm, fp8_state)
    return tuple(map(bool, np.concatenate(found))) if found else ()
