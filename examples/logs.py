"""Logs of a run: files of one JSON object a line, of which a run that goes on keeps what a checkpoint knows of.

metrics.jsonl        loss and speed, one row every few steps
diagnostics.jsonl    what FP8 does to each tensor, one row a diagnosed step
events.jsonl         steps that changed nothing, and why
"""

import collections
import json
import os
from pathlib import Path

METRICS, DIAGNOSTICS, EVENTS = LOGS = ("metrics", "diagnostics", "events")


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
        left = dict(counts)
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept, rows = [], []
        for line in lines:
            if not line.endswith("\n"):  # the process was killed, or the disk was full, in the middle of it
                break
            row = json.loads(line)
            if left.get(row["run"], 0):
                left[row["run"]] -= 1
                rows.append(row)
                kept.append(line)
        if any(left.values()):
            lost = sum(left.values())
            print(f"{self.path} has lost {lost} rows from before the checkpoint; the run goes on without them")
        if kept != lines:
            replace(self.path, "".join(kept))
        self._counts = collections.Counter(row["run"] for row in rows)
        return rows


def replace(path: Path, text: str) -> None:
    """Write a file that is there as it was or as it is now, whenever the process is killed."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file)
    unfinished.replace(path)
