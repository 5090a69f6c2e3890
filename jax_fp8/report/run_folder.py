"""Read what a run left in its folder, whose format is in run_format.py: configuration and logs.

A folder has one run, or two that were compared: "delayed" and "bf16". A program that was killed leaves a last line that
is half-written, and one that went on from a checkpoint may have taken steps again: of these the last counts.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, reading
from jax_fp8.report.diagnosed import Diagnosed, Sample, gather, number_of, sample_of
from jax_fp8.report.run_format import (
    CONFIG,
    DIAGNOSTICS,
    EVENTS,
    LOGS,
    MEASURED,
    METRICS,
    MOST_CONFIG,
    check_row,
)

FILES = (CONFIG, *LOGS)
NO_ROW = (TypeError, KeyError, AttributeError, ValueError, OverflowError, RecursionError)
MOST_LINE, MOST_LOG = 2**26, 2**33  # bytes of a row, and of a log
LAST_TIME = 253_402_300_799.0  # the last second of the year 9999
LARGEST = 1e30  # of what a log measures: beyond it there is nothing to draw

Row = TypeVar("Row")


class Metrics(NamedTuple):
    """Rows of the log of one run: steps i64 (rows,), ascending, and what was measured f64 (rows,), or NaN."""

    steps: np.ndarray
    values: dict[str, np.ndarray]

    def last(self, name: str) -> tuple[int, float] | None:
        """The last value that there is, and its step."""
        found = np.flatnonzero(np.isfinite(self.values[name]))
        return (int(self.steps[found[-1]]), float(self.values[name][found[-1]])) if len(found) else None


class Event(NamedTuple):
    """A step that was skipped, or after which the run stopped; `sample` is empty where it was not diagnosed."""

    run: str
    event: str
    limit: float
    fault: str
    sample: Sample

    @property
    def step(self) -> int:
        return self.sample.step


@dataclass(frozen=True)
class RunFolder:
    """What a folder says.

    Args:
      config: what config.json has, empty without it.
      metrics, diagnosed: by the name of a run, in the order in which they ran.
      remarks: sentences on what is missing, or was left out.
      begun, ended: when the first and the last of its files were written.
    """

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Metrics]
    diagnosed: dict[str, Diagnosed]
    events: tuple[Event, ...]
    remarks: tuple[str, ...]
    begun: datetime
    ended: datetime

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys([*self.metrics, *self.diagnosed, *(event.run for event in self.events)]))


def read_run(folder: str | Path) -> RunFolder:
    """Read a run; ValueError where the folder has none."""
    path = Path(folder)
    try:
        return _read_run(path)
    except OSError as error:
        raise _cannot_read(error.filename, error.strerror) from None


def _cannot_read(path, arrived) -> ValueError:
    return ValueError(
        f"a report needs to read the files of a run, got {arrived} for {path}; change its rights, or move it"
    )


def _read_run(path: Path) -> RunFolder:
    found = [path / name for name in FILES if (path / name).exists()]
    if not found:
        raise ValueError(
            f"a report is made of a run's folder with at least one of {', '.join(FILES)}, got {path} without; "
            "name a folder that `python -m jax_fp8 train` wrote, such as runs/tiny-delayed"
        )
    remarks: list[str] = []
    config = _read_config(path / CONFIG, remarks)
    metrics = _by_run(_read_rows(path / METRICS, _metrics_of, remarks))
    diagnosed = _by_run(_read_rows(path / DIAGNOSTICS, sample_of, remarks))
    events = _read_rows(path / EVENTS, _event_of, remarks)
    remarks += _missing(path, config, metrics, diagnosed)
    seconds = [min(max(file.stat().st_mtime, 0.0), LAST_TIME) for file in found]
    times = [datetime.fromtimestamp(second, UTC) for second in seconds]
    return RunFolder(
        path,
        config,
        {run: _columns(rows) for run, rows in metrics.items()},
        {run: gather(samples) for run, samples in diagnosed.items()},
        tuple({(event.run, event.step, event.event): event for _, event in events}.values()),
        tuple(remarks),
        min(times),
        max(times),
    )


def _read_config(path: Path, remarks: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = read_bytes(path, MOST_CONFIG).decode(errors="replace")
    except Unreadable as error:
        raise _cannot_read(path, error) from None
    try:
        return parse_json(content, _unknown)
    except Unreadable as error:
        remarks.append(f"{path.name} is not a JSON object, and was left out: it has {error}.")
        return {}


def _unknown(_: str) -> None:
    """What is not a finite number is null, however it was written."""


def _read_rows(path: Path, convert: Callable[[dict], Row], remarks: list[str]) -> list[tuple[str, Row]]:
    """Rows with their runs. What is no row is left out and remarked on, but for a last line that was not finished."""
    rows: list[tuple[str, Row]] = []
    if not path.exists():
        return rows
    broken = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line, parse_constant=_unknown)
            check_row(row)
            rows.append((row["run"], convert(row)))
        except NO_ROW:
            if line.endswith("\n") and line.strip():
                broken.append(number)
    if broken:
        count = "1 line" if len(broken) == 1 else f"{len(broken):,} lines"
        remarks.append(
            f"{count} of {path.name} could not be read, the first is line {broken[0]:,}; here it is without."
        )
    return rows


def _lines(path: Path) -> Iterator[str]:
    """Lines of a log; of one that is longer than a row can be, its beginning."""
    try:
        with reading(path, MOST_LOG) as file:
            while line := file.readline(MOST_LINE):
                yield _ended(line, file).decode(errors="replace")
    except Unreadable as error:
        raise _cannot_read(path, error) from None


def _ended(line: bytes, file: IO[bytes]) -> bytes:
    """The line, after whose end the file stands then."""
    rest = line
    while not rest.endswith(b"\n"):
        rest = file.readline(MOST_LINE)
        if not rest:
            return line
    return line if rest is line else line[:80] + b"\n"


def _metrics_of(row: dict[str, Any]) -> tuple[int, list[float]]:
    values = [number_of(row.get(name)) for name in MEASURED]
    return row["step"], [value if abs(value) < LARGEST else math.nan for value in values]


def _event_of(row: dict[str, Any]) -> Event:
    fault = row.get("fault")
    return Event(
        row["run"], str(row["event"]), number_of(row.get("limit")), "" if fault is None else str(fault), sample_of(row)
    )


def _by_run(rows: list[tuple[str, Row]]) -> dict[str, list[Row]]:
    runs: dict[str, list[Row]] = {}
    for run, row in rows:
        runs.setdefault(run, []).append(row)
    return runs


def _columns(rows: list[tuple[int, list[float]]]) -> Metrics:
    ordered = sorted(dict(rows).items())
    table = np.array([values for _, values in ordered], float)
    steps = np.array([step for step, _ in ordered], np.int64)
    return Metrics(steps, dict(zip(MEASURED, table.T, strict=True)))


def _missing(path: Path, config: dict, metrics: dict, diagnosed: dict) -> list[str]:
    """What a reader would look for and not find, and how to get it."""
    remarks = []
    if not config:
        remarks.append(f"{CONFIG} is missing or empty: model, recipe and device are not known.")
    if not metrics:
        remarks.append(f"{METRICS} is missing or empty: there is no loss, throughput or memory to show.")
    if not diagnosed:
        remarks.append(
            f"{DIAGNOSTICS} is missing or empty: nothing is known of FP8 tensors and gradients. "
            "`python -m jax_fp8 train --diagnose-every 10` writes it, a row every 10 steps."
        )
    elif not any(sample.places for samples in diagnosed.values() for sample in samples):
        remarks.append(f"{DIAGNOSTICS} names no FP8 tensors: the model has none, as in bfloat16.")
    return remarks
