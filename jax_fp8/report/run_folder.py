"""Read the configuration and the logs of a run from its folder. run_format.py has their format.

A folder has one run, or the two runs of `--compare`: "delayed" and "bf16", for example. A killed process leaves a last
line that is incomplete; it is ignored. A resumed run may log steps again; the last row of a step counts.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

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
    JsonObject,
    check_row,
)

FILES = (CONFIG, *LOGS)
NO_ROW = (TypeError, KeyError, AttributeError, ValueError, OverflowError, RecursionError)
MOST_LINE, MOST_LOG = 2**26, 2**33  # bytes of a row, and of a log
LAST_TIME = 253_402_300_799.0  # the last second of the year 9999
LARGEST = 1e30  # of a number in a log; larger ones cannot be drawn, and count as not measured

Row = TypeVar("Row")


class Metrics(NamedTuple):
    """The rows of one run in metrics.jsonl: steps i64 (rows,), ascending, and by name the values f64 (rows,), NaN where
    nothing was measured.
    """

    steps: np.ndarray
    values: dict[str, np.ndarray]

    def last(self, name: str) -> tuple[int, float] | None:
        """The step and the value of the last row with a finite value; None if there is none."""
        rows = np.flatnonzero(np.isfinite(self.values[name]))
        return (int(self.steps[rows[-1]]), float(self.values[name][rows[-1]])) if len(rows) else None


class Event(NamedTuple):
    """A step that was skipped, or after which the run stopped; `sample` has no tensors if it was not diagnosed."""

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
    """The content of a run's folder.

    Args:
      config: the content of config.json; empty if there is no such file.
      metrics, diagnosed: by the name of a run, in the order in which they ran.
      remarks: sentences about missing files, and about rows that were ignored.
      begun, ended: when the first and the last of its files were written.
    """

    path: Path
    config: JsonObject
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
    """Read a run; ValueError if the folder has none."""
    path = Path(folder)
    try:
        return _read_run(path)
    except OSError as error:
        raise _cannot_read(error.filename, error.strerror) from None


def _cannot_read(path: object, arrived: object) -> ValueError:
    return ValueError(
        f"a report needs to read the files of a run, got {arrived} for {path}; change its permissions, or move it"
    )


def _read_run(path: Path) -> RunFolder:
    files = [path / name for name in FILES if (path / name).exists()]
    if not files:
        raise ValueError(
            f"a report is made of a run's folder with at least one of {', '.join(FILES)}, got {path} without; "
            "name a folder that `python -m jax_fp8 train` wrote, such as runs/tiny-delayed"
        )
    remarks: list[str] = []
    config = _read_config(path / CONFIG, remarks)
    metrics = _by_run(_read_rows(path / METRICS, _metrics_of, remarks))
    diagnosed = _by_run(_read_rows(path / DIAGNOSTICS, sample_of, remarks))
    events = _read_rows(path / EVENTS, _event_of, remarks)
    remarks += _missing(config, metrics, diagnosed)
    seconds = [min(max(file.stat().st_mtime, 0.0), LAST_TIME) for file in files]
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


def _read_config(path: Path, remarks: list[str]) -> JsonObject:
    if not path.exists():
        return {}
    try:
        content = read_bytes(path, MOST_CONFIG).decode(errors="replace")
    except Unreadable as error:
        raise _cannot_read(path, error) from None
    try:
        return parse_json(content, _unknown)
    except Unreadable as error:
        remarks.append(f"{path.name} is not a JSON object, and was ignored: it has {error}.")
        return {}


def _unknown(_: str) -> None:
    """Reads the constants NaN and Infinity as null."""


def _read_rows(path: Path, convert: Callable[[JsonObject], Row], remarks: list[str]) -> list[tuple[str, Row]]:
    """The rows of a log, each with the name of its run. Adds a remark about lines that are not rows and were ignored,
    unless it is only a last line that is incomplete.
    """
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
            f"{count} of {path.name} could not be read, the first is line {broken[0]:,}; the report ignores such lines."
        )
    return rows


def _lines(path: Path) -> Iterator[str]:
    """The lines of a log; a line that is longer than MOST_LINE is cut short."""
    try:
        with reading(path, MOST_LOG) as file:
            while line := file.readline(MOST_LINE):
                yield _ended(line, file).decode(errors="replace")
    except Unreadable as error:
        raise _cannot_read(path, error) from None


def _ended(line: bytes, file: IO[bytes]) -> bytes:
    """The line that begins with these bytes, cut short if it is longer. Moves the file to the next line."""
    rest = line
    while not rest.endswith(b"\n"):
        rest = file.readline(MOST_LINE)
        if not rest:
            return line
    return line if rest is line else line[:80] + b"\n"


def _metrics_of(row: JsonObject) -> tuple[int, list[float]]:
    values = [number_of(row.get(name)) for name in MEASURED]
    return row["step"], [value if abs(value) < LARGEST else math.nan for value in values]


def _event_of(row: JsonObject) -> Event:
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


def _missing(config: JsonObject, metrics: Collection[str], diagnosed: Mapping[str, list[Sample]]) -> list[str]:
    """Remarks about the parts of a report that cannot be shown, and how to get them."""
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
