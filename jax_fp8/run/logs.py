"""What a run writes down while it lasts: rows of its logs, and the same as curves.

Log        one file of rows, of which a run that continues keeps those that a checkpoint knows of
Curves     the numbers of the rows as TensorBoard shows them: `--tensorboard` → `runs/<name>/tensorboard/<run>`
Logbook    both, of one training run
"""

import collections
import importlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, write_bytes
from jax_fp8.report.run_format import (
    DIAGNOSTICS,
    EVENTS,
    MEASURED,
    METRICS,
    NEEDED,
    TENSORBOARD,
    CannotResume,
    check_row,
    metrics_row,
    rows_as_notes,
)
from jax_fp8.run.settings import Settings

LOG_EVERY = 10  # steps between two rows of metrics.jsonl
ROW_BYTES = 360  # of metrics.jsonl, at most
LAYER_BYTES = 5000  # of diagnostics.jsonl, about
WORST = {"saturated": max, "underflowed": max, "nonfinite": max, "error": max, "headroom": min}


class Log:
    """One of them. Rows are appended, each with the name of its run; of several processes one writes."""

    def __init__(self, path: Path, is_written: bool):
        self.path, self._is_written = path, is_written
        self._counts: collections.Counter[str] = collections.Counter()

    def append(self, row: dict) -> None:
        self._counts[row["run"]] += 1
        if not self._is_written:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def counts(self) -> dict[str, int]:
        """Rows of each run, for `take_up`; on the disk, when this returns."""
        if self._is_written and self._counts:
            with self.path.open("a") as file:
                os.fsync(file)
        return dict(self._counts)

    def take_up(self, counts: dict[str, int]) -> list[dict]:
        """Keep so many rows of each run, those from before a checkpoint, and return them: what came later will come
        again.
        """
        left, content = dict(counts), self._content()
        kept, rows = [], []
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            # The process was killed, or the disk was full, in the middle of a line.
            if not line.endswith(b"\n") or not any(left.values()):
                break
            row = self._row(line, number)
            if left.get(row["run"], 0):
                left[row["run"]] -= 1
                rows.append(row)
                kept.append(line)
        if any(left.values()):
            lost = sum(left.values())
            print(f"{self.path} has lost {lost} rows from before the checkpoint; the run continues without them")
        if b"".join(kept) != content:
            write_bytes(self.path, b"".join(kept))
        self._counts = collections.Counter(row["run"] for row in rows)
        return rows

    def _content(self) -> bytes:
        if not os.path.lexists(self.path):
            return b""
        try:
            return read_bytes(self.path, most=None)
        except Unreadable as error:
            raise self._cannot_take_up(error) from None

    def _row(self, line: bytes, number: int) -> dict[str, Any]:
        """A line as JSON, with the entries that a run needs to continue."""
        try:
            row = parse_json(line, constant=float)
            check_row(row, NEEDED[self.path.name])
        except Unreadable as error:
            raise self._cannot_take_up(f"{error} in line {number}") from None
        return row

    def _cannot_take_up(self, arrived) -> CannotResume:
        return CannotResume(
            f"{self.path} must have the rows that a run wrote, one JSON object a line, got {arrived}; move it away, "
            "and the run continues without them"
        )


class Curves:
    """Curves of one training run; without a folder there are none. Of each diagnosed step they are the worst tensor of
    each kind, and the norm of every layer's gradients.

    Args:
      after: the step after which a run continues: TensorBoard leaves out what an interrupted run wrote after it.
    """

    def __init__(self, folder: Path | None, after: int = 0):
        self._writer: Any = None
        if folder is not None:
            # Asked for here: who does not want curves does not need the library.
            library = importlib.import_module("tensorboardX")
            self._writer = library.SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def add_metrics(self, step: int, row: dict[str, Any]) -> None:
        self._add({name: row[name] for name in MEASURED}, step)

    def add_diagnostics(self, step: int, row: dict[str, Any]) -> None:
        found = {f"gradient_norm/{of['layer']}": of["norm"] for of in row["gradients"]}
        for kind in dict.fromkeys(of["tensor"] for of in row["tensors"]):
            for name, worst in WORST.items():
                values = [of[name] for of in row["tensors"] if of["tensor"] == kind and of[name] is not None]
                found[f"{name}/{kind}"] = worst(values, default=None)
        self._add(found, step)

    def flush(self) -> None:
        """On the disk, when this returns."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, numbers, step):
        for name, number in numbers.items():
            if self._writer is not None and number is not None:
                self._writer.add_scalar(name, number, step)


class LogFolder(Protocol):
    """Where a Logbook writes: a `Folder`."""

    path: Path
    is_written: bool

    def append(self, log: str, row: dict) -> None: ...

    def counts(self) -> dict[str, dict[str, int]]: ...


class Logbook:
    """The logs and curves of one training run, as a context. `is_written` is False in processes that write nothing.

    Args:
      run: its name in the logs.
      after: the step after which it continues.
    """

    def __init__(self, folder: LogFolder, run: str, has_curves: bool = False, after: int = 0):
        self.run, self.is_written, self._folder = run, folder.is_written, folder
        path = folder.path / TENSORBOARD / run
        self._curves = Curves(path if has_curves and folder.is_written else None, after)

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_) -> None:
        self._curves.close()

    def add_metrics(self, step: int, measured: dict[str, Any]) -> None:
        row = metrics_row(measured)
        self._add(METRICS, step, row)
        self._curves.add_metrics(step, row)

    def add_diagnostics(self, step: int, row: dict[str, Any]) -> None:
        self._add(DIAGNOSTICS, step, row)
        self._curves.add_diagnostics(step, row)

    def add_event(self, step: int, row: dict[str, Any]) -> None:
        self._add(EVENTS, step, row)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many rows there are. They are on the disk, when this returns."""
        self._curves.flush()
        return rows_as_notes(self._folder.counts())

    def _add(self, log, step, row):
        self._folder.append(log, {"run": self.run, "step": step} | row)


def bytes_of_logs(settings: Settings) -> int:
    """How much all runs of a folder will write, about."""
    rows = settings.steps // LOG_EVERY + settings.steps // settings.eval_every + 3
    diagnosed = settings.steps // settings.diagnose_every if settings.diagnose_every else 0
    size = rows * ROW_BYTES + diagnosed * (settings.num_layers + 1) * LAYER_BYTES
    return size * (2 if settings.compare else 1)
