"""Logs of a run: files of one JSON object a line, of which a run that goes on keeps what a checkpoint knows of.

metrics.jsonl        loss and speed, one row every few steps
diagnostics.jsonl    what FP8 does to each tensor, one row a diagnosed step
events.jsonl         steps that changed nothing, and why
"""

import collections
import json
import os
from pathlib import Path
from typing import Any

from notes import CannotResume, is_count, is_known

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, shown, write_bytes

METRICS, DIAGNOSTICS, EVENTS = LOGS = ("metrics", "diagnostics", "events")
# What a row is asked for when a run goes on: the losses of metrics.jsonl are drawn again.
OF_ALL = {"run": lambda value: isinstance(value, str), "step": is_count}
NEEDED = {
    METRICS: {**OF_ALL, "loss": is_known, "val_loss": is_known},
    DIAGNOSTICS: OF_ALL,
    EVENTS: OF_ALL,
}


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
            print(f"{self.path} has lost {lost} rows from before the checkpoint; the run goes on without them")
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
        """A line as JSON, with what whoever takes rows up asks them for."""
        try:
            row = parse_json(line, constant=float)
            wrong = next((name for name, holds in NEEDED[self.path.stem].items() if not holds(row.get(name))), None)
            if wrong is not None:
                raise Unreadable(f"a row whose {wrong} is {shown(row.get(wrong))}")
        except Unreadable as error:
            raise self._cannot_take_up(f"{error} in line {number}") from None
        return row

    def _cannot_take_up(self, arrived) -> CannotResume:
        return CannotResume(
            f"{self.path} must have the rows that a run wrote, one JSON object a line, got {arrived}; move it away, "
            "and the run goes on without them"
        )
