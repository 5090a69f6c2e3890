"""The folder of a run, `runs/<name>/`: made, locked and written. Its format is in report/run_format.py."""

import contextlib
import errno
import fcntl
import importlib.metadata
import io
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from matplotlib.figure import Figure

from jax_fp8.core.files import write_bytes, write_text
from jax_fp8.report.run_format import LOGS, METRICS, PICTURE, TOKENIZER, CannotResume, write_config
from jax_fp8.run.logs import Log

PICTURE_BYTES = 2**20  # and configuration, at most
TRIAL_BYTES = 2**24  # that are written to see whether there is room; beyond them the disk is asked


class Existing(NamedTuple):
    """A run that continues: its folder, and of each of its logs how many rows it had of each of its runs."""

    path: Path
    rows: dict[str, dict[str, int]]


class Folder:
    """A new `runs/<name>/`, with room for logs of so many bytes; or that of a run that goes on. `rows` are those of
    metrics.jsonl.

    A name already taken gets a number: nothing is ever overwritten. ValueError where nothing can be written.
    Of several processes one writes; to the others it is a folder that they leave alone.
    """

    def __init__(self, parent: Path, name: str, size: int, is_written: bool = True, existing: Existing | None = None):
        self.is_written, self.rows, self.existing = is_written, [], existing
        self._logs: dict[str, Log] = {}
        self.path = existing.path if existing else parent / name
        if not is_written:
            return
        if existing is None:
            self._make(parent, name)
        self._try_to_write(PICTURE_BYTES + size)
        if self.path.name != name and existing is None:
            print(f"{parent / name} exists already and is left as it is; this run is written to {self.path}")

    def _make(self, parent: Path, name: str) -> None:
        number = 1
        while True:
            self.path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                self.path.mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
            except OSError as error:
                raise ValueError(
                    f"a run needs a folder to write to, got {error.strerror} for {self.path}; choose one by --output"
                ) from None

    def _try_to_write(self, size: int) -> None:
        """Write as much as a run will, and remove it: a full disk shows now, and not after training."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as trial:
                trial.write(bytes(min(size, TRIAL_BYTES)))
            if size > shutil.disk_usage(self.path).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.remove()
            raise ValueError(
                f"a run writes up to {math.ceil(size / 2**20):,} MiB, got {error.strerror} in {self.path.parent}; "
                "free some space, or choose another folder by --output"
            ) from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from going on with the run meanwhile: rows and checkpoints of both would mix. The system
        takes the lock away when the process ends, however it does.
        """
        if not self.is_written:
            yield
            return
        number = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # of a file system without locks
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CannotResume(
                        f"a run must be alone in its folder, but another process is writing to {self.path}; wait until "
                        "it has ended, or choose another --name"
                    ) from None
            yield
        finally:
            os.close(number)

    def like_that_of_the_first(self, path: Path, goes_on: bool) -> "Folder":
        """Of a process that writes no log: where the first one writes, and all of them their parts of checkpoints."""
        self.path, self.existing = path, Existing(path, {}) if goes_on else None
        return self

    def remove(self) -> None:
        """Leave nothing of a run that cannot begin."""
        if self.is_written and self.existing is None:
            self.path.rmdir()

    def write_config(self, settings: dict, model: dict, computed_with: dict) -> None:
        if self.is_written:
            write_config(self.path, settings, model, computed_with)

    def write_tokenizer(self, text: str) -> None:
        """Once, for programs that read checkpoints."""
        path = self.path / TOKENIZER
        if self.is_written and not path.exists():
            write_text(path, text)

    def take_up(self) -> None:
        """Keep of the log what was there when the checkpoint was saved, and read it: what came later will come again.
        Of a new run there is nothing to keep, and it is done once.
        """
        existing, self.existing = self.existing, None
        if existing is None or not self.is_written:
            return
        for name in LOGS:
            rows = self._log(name).take_up(existing.rows.get(name, {}))
            if name == METRICS:
                self.rows = rows

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each log the rows of each run, for `take_up`; on the disk, when this returns."""
        return {name: self._log(name).counts() for name in LOGS}

    def append(self, log: str, row: dict) -> None:
        if log == METRICS:
            self.rows.append(row)
        self._log(log).append(row)

    def _log(self, name) -> Log:
        if name not in self._logs:
            self._logs[name] = Log(self.path / name, self.is_written)
        return self._logs[name]

    def plot(self, title: str) -> None:
        """Training and validation loss of every run of this folder, on one plot; the first is drawn thin, over the
        second, for they may lie on each other.
        """
        if not self.is_written:
            return
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        runs = dict.fromkeys(row["run"] for row in self.rows)
        for color, width, run in zip(("tab:green", "silver"), (1.2, 5), runs, strict=False):
            for key, style, label in (("loss", "-", "training"), ("val_loss", "o--", "validation")):
                points = [
                    (row["step"], row[key]) for row in self.rows if row["run"] == run and row.get(key) is not None
                ]
                alpha = 0.5 if key == "loss" else 1.0
                steps, losses = zip(*points, strict=True) if points else ((), ())
                look = {"color": color, "alpha": alpha, "linewidth": width, "markersize": 4 + width, "zorder": -width}
                axes.plot(steps, losses, style, label=f"{run}, {label}", **look)
        axes.set(title=title, xlabel="step", ylabel="cross entropy, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=130)
        write_bytes(self.path / PICTURE, picture.getvalue())


def versions(mesh: Mesh) -> dict[str, Any]:
    """What a run was computed with."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = mesh.devices.flat[0]
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "device": f"{mesh.size} x {device.device_kind}",
    }
