"""The logs of a run: rows of JSON in files, and the same numbers as curves for TensorBoard.

Log        one file of rows; a resumed run keeps only the rows from before its checkpoint
Curves     the numbers of the rows for TensorBoard: `--tensorboard` → `runs/<name>/tensorboard/<run>`
Logbook    the logs and the curves of one training run
"""

import collections
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, write_bytes
from jax_fp8.report.run_format import (
    DIAGNOSTICS,
    EVENTS,
    MEASURED,
    METRICS,
    NEEDED,
    TENSORBOARD,
    CannotResume,
    JsonObject,
    check_row,
    metrics_row,
    rows_as_notes,
)
from jax_fp8.run.settings import Settings

LOG_EVERY = 10  # steps between two rows of metrics.jsonl
ROW_BYTES = 360  # of a row of metrics.jsonl, at most
LAYER_BYTES = 5000  # of a layer in a row of diagnostics.jsonl, about
# Which of several values is the worst.
WORST = {"saturated": max, "underflowed": max, "nonfinite": max, "error": max, "headroom": min}


class Log:
    """One log file. Each row has the name of its run.

    Args:
      is_written: whether this process writes the file; the others only count rows.
    """

    def __init__(self, path: Path, is_written: bool):
        self.path, self._is_written = path, is_written
        self._counts: collections.Counter[str] = collections.Counter()

    def append(self, row: JsonObject) -> None:
        self._counts[row["run"]] += 1
        if not self._is_written:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def counts(self) -> dict[str, int]:
        """The number of rows of each run, for `take_up`. The rows are on the disk when this returns."""
        if self._is_written and self._counts:
            with self.path.open("a") as file:
                os.fsync(file)
        return dict(self._counts)

    def take_up(self, counts: Mapping[str, int]) -> list[JsonObject]:
        """Cut the file back to the first `counts[run]` rows of each run, those from before a checkpoint, and return
        them. Training logs the later steps again.
        """
        missing, content = dict(counts), self._content()
        lines, rows = [], []
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            # A line without an end: the process was killed, or the disk was full, while it was written.
            if not line.endswith(b"\n") or not any(missing.values()):
                break
            row = self._row(line, number)
            if missing.get(row["run"], 0):
                missing[row["run"]] -= 1
                rows.append(row)
                lines.append(line)
        if any(missing.values()):
            lost = sum(missing.values())
            print(f"{self.path} has lost {lost} rows from before the checkpoint; the run continues without them")
        if b"".join(lines) != content:
            write_bytes(self.path, b"".join(lines))
        self._counts = collections.Counter(row["run"] for row in rows)
        return rows

    def _content(self) -> bytes:
        if not os.path.lexists(self.path):
            return b""
        try:
            return read_bytes(self.path, most=None)
        except Unreadable as error:
            raise self._cannot_take_up(error) from None

    def _row(self, line: bytes, number: int) -> JsonObject:
        """The row on a line; raises unless it has the entries that resuming needs."""
        try:
            row = parse_json(line, constant=float)
            check_row(row, NEEDED[self.path.name])
        except Unreadable as error:
            raise self._cannot_take_up(f"{error} in line {number}") from None
        return row

    def _cannot_take_up(self, arrived: object) -> CannotResume:
        return CannotResume(
            f"{self.path} must have the rows that a run wrote, one JSON object a line, got {arrived}; move it away, "
            "and the run continues without them"
        )


class CurveWriter(Protocol):
    """The part of tensorboardX's SummaryWriter that `Curves` needs; the package may be missing."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Curves:
    """The TensorBoard curves of one training run. A diagnosed step adds the worst value among the tensors of each kind,
    and the norm of every layer's gradient.

    Args:
      folder: where they are written; None writes nothing.
      after: the step after which a run resumes. TensorBoard drops the points that the interrupted run wrote after it.
    """

    def __init__(self, folder: Path | None, after: int = 0):
        self._writer: CurveWriter | None = None
        if folder is not None:
            # Imported only here: runs without curves do not need the library.
            library = importlib.import_module("tensorboardX")
            self._writer = library.SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def add_metrics(self, step: int, row: Mapping[str, float | None]) -> None:
        self._add({name: row[name] for name in MEASURED}, step)

    def add_diagnostics(self, step: int, row: JsonObject) -> None:
        numbers = {f"gradient_norm/{gradient['layer']}": gradient["norm"] for gradient in row["gradients"]}
        for kind in dict.fromkeys(entry["tensor"] for entry in row["tensors"]):
            entries = [entry for entry in row["tensors"] if entry["tensor"] == kind]
            for name, worst in WORST.items():
                values = [entry[name] for entry in entries if entry[name] is not None]
                numbers[f"{name}/{kind}"] = worst(values, default=None)
        self._add(numbers, step)

    def flush(self) -> None:
        """Write all points to the disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, numbers: Mapping[str, float | None], step: int) -> None:
        for name, number in numbers.items():
            if self._writer is not None and number is not None:
                self._writer.add_scalar(name, number, step)


class LogFolder(Protocol):
    """The part of `Folder` that a Logbook needs."""

    path: Path
    is_written: bool

    def append(self, log: str, row: JsonObject) -> None: ...

    def counts(self) -> dict[str, dict[str, int]]: ...


class Logbook:
    """The logs and curves of one training run, as a context. `is_written` is False in processes that write nothing.

    Args:
      run: the name of the run, which each of its rows has.
      has_curves: whether the numbers are written for TensorBoard, too.
      after: the step after which the run resumes; 0 for a new run.
    """

    def __init__(self, folder: LogFolder, run: str, has_curves: bool = False, after: int = 0):
        self.run, self.is_written, self._folder = run, folder.is_written, folder
        path = folder.path / TENSORBOARD / run
        self._curves = Curves(path if has_curves and folder.is_written else None, after)

    def __enter__(self) -> "Logbook":
        return self

    def __exit__(self, *_: object) -> None:
        self._curves.close()

    def add_metrics(self, step: int, measured: Mapping[str, float | None]) -> None:
        row = metrics_row(measured)
        self._add(METRICS, step, row)
        self._curves.add_metrics(step, row)

    def add_diagnostics(self, step: int, row: JsonObject) -> None:
        self._add(DIAGNOSTICS, step, row)
        self._curves.add_diagnostics(step, row)

    def add_event(self, step: int, row: Mapping[str, object]) -> None:
        self._add(EVENTS, step, row)

    def notes(self) -> JsonObject:
        """The numbers of rows, for the notes of a checkpoint. The rows are on the disk when this returns."""
        self._curves.flush()
        return rows_as_notes(self._folder.counts())

    def _add(self, log: str, step: int, row: Mapping[str, object]) -> None:
        self._folder.append(log, {"run": self.run, "step": step, **row})


def bytes_of_logs(settings: Settings) -> int:
    """An estimate of the bytes that all runs of a folder will write to its logs."""
    rows = settings.steps // LOG_EVERY + settings.steps // settings.eval_every + 3
    diagnosed = settings.steps // settings.diagnose_every if settings.diagnose_every else 0
    size = rows * ROW_BYTES + diagnosed * (settings.num_layers + 1) * LAYER_BYTES
    return size * (2 if settings.compare else 1)
