"""What one training run writes down while it lasts: rows of the logs in its folder, and the same as curves."""

from typing import Any

from logs import DIAGNOSTICS, EVENTS, METRICS
from record import Folder
from scalars import Scalars
from settings import Settings

LOG_EVERY = 10  # steps between two rows of metrics.jsonl
ROW_BYTES = 360  # of metrics.jsonl, at most
LAYER_BYTES = 5000  # of diagnostics.jsonl, about


class Logbook:
    """That of one run, as a context. `is_written` is False in processes that write nothing.

    Args:
      run: its name in the logs.
      after: the step after which it goes on.
    """

    def __init__(self, folder: Folder, run: str, has_curves: bool = False, after: int = 0):
        self.run, self.is_written, self._folder = run, folder.is_written, folder
        path = folder.path / "tensorboard" / run
        self._scalars = Scalars(path if has_curves and folder.is_written else None, after)

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_) -> None:
        self._scalars.close()

    def add_metrics(self, step: int, row: dict[str, Any]) -> None:
        self._add(METRICS, step, row)
        self._scalars.add_metrics(step, row)

    def add_diagnostics(self, step: int, row: dict[str, Any]) -> None:
        self._add(DIAGNOSTICS, step, row)
        self._scalars.add_diagnostics(step, row)

    def add_event(self, step: int, row: dict[str, Any]) -> None:
        self._add(EVENTS, step, row)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many rows there are. They are on the disk, when this returns."""
        self._scalars.flush()
        counts = self._folder.counts()
        return {"rows": counts.pop(METRICS), "other_rows": counts}

    def _add(self, log, step, row):
        self._folder.append(log, {"run": self.run, "step": step} | row)


def bytes_of_logs(settings: Settings) -> int:
    """How much all runs of a folder will write, about."""
    rows = settings.steps // LOG_EVERY + settings.steps // settings.eval_every + 3
    diagnosed = settings.steps // settings.diagnose_every if settings.diagnose_every else 0
    size = rows * ROW_BYTES + diagnosed * (settings.num_layers + 1) * LAYER_BYTES
    return size * (2 if settings.compare else 1)
