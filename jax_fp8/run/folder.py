"""The folder of a run, `runs/<name>/`: how it is created, locked and written. report/run_format.py has its format."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh
from matplotlib.figure import Figure

from jax_fp8.core.files import write_bytes
from jax_fp8.report.run_format import LOGS, METRICS, PICTURE, CannotResume, JsonObject, write_config
from jax_fp8.run.logs import Log
from jax_fp8.run.tokenizer_files import write_tokenizer

PICTURE_BYTES = 2**20  # of picture and configuration together, at most
TRIAL_BYTES = 2**24  # at most so many are written as a trial; for the rest, the disk's free space is compared


class Existing(NamedTuple):
    """A run to resume: its folder and, by log and name of a run, how many rows were there at the checkpoint."""

    path: Path
    rows: dict[str, dict[str, int]]


class Folder:
    """A new folder `runs/<name>/`, or that of a resumed run. `rows` are those of metrics.jsonl.

    If the name is taken, the new folder gets a number: nothing is ever overwritten. Of several processes only one
    writes; for the others every method that writes does nothing.

    Args:
      parent: the folder that has the run folders.
      size: bytes of all logs, which the disk must have room for.
      is_written: whether this process writes.
      existing: the run to resume, if any.

    Raises:
      ValueError: where the folder cannot be written to.
    """

    def __init__(self, parent: Path, name: str, size: int, is_written: bool = True, existing: Existing | None = None):
        self.is_written, self.existing = is_written, existing
        self.rows: list[JsonObject] = []
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
                    f"a run needs a folder to write to, got {error.strerror} for {self.path}; choose one with --output"
                ) from None

    def _try_to_write(self, size: int) -> None:
        """Write as much as the run will, and remove it: so a full disk ends the run before training, not after it."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as trial:
                trial.write(bytes(min(size, TRIAL_BYTES)))
            if size > shutil.disk_usage(self.path).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.remove()
            raise ValueError(
                f"a run writes up to {math.ceil(size / 2**20):,} MiB, got {error.strerror} in {self.path.parent}; "
                "free some space, or choose another folder with --output"
            ) from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder, so that no other process resumes the same run: rows and checkpoints of both would mix. The
        operating system releases the lock when the process ends, however it ends.
        """
        if not self.is_written:
            yield
            return
        number = os.open(self.path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # raised by a file system without locks
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CannotResume(
                        f"only one process may write to {self.path}, but another one is writing to it; wait until it "
                        "has ended, or choose another --name"
                    ) from None
            yield
        finally:
            os.close(number)

    def follow(self, path: Path, is_resumed: bool) -> "Folder":
        """Use the folder that the first process has chosen: all processes write their shards of checkpoints to it."""
        self.path, self.existing = path, Existing(path, {}) if is_resumed else None
        return self

    def remove(self) -> None:
        """Remove the new folder of a run that cannot begin."""
        if self.is_written and self.existing is None:
            self.path.rmdir()

    def write_config(
        self, settings: Mapping[str, object], model: Mapping[str, object], computed_with: Mapping[str, object]
    ) -> None:
        if self.is_written:
            write_config(self.path, settings, model, computed_with)

    def write_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Write the files of the tokenizer, which `generate` and `export` read, those that are not there yet."""
        if self.is_written:
            write_tokenizer(self.path, files)

    def take_up(self) -> None:
        """Cut the logs of a resumed run back to the rows from before its checkpoint, and read these: training logs the
        later steps again. Does nothing for a new run, or when called again.
        """
        existing, self.existing = self.existing, None
        if existing is None or not self.is_written:
            return
        for name in LOGS:
            rows = self._log(name).take_up(existing.rows.get(name, {}))
            if name == METRICS:
                self.rows = rows

    def counts(self) -> dict[str, dict[str, int]]:
        """By log and name of a run, how many rows there are, for `take_up`. They are on the disk when this returns."""
        return {name: self._log(name).counts() for name in LOGS}

    def append(self, log: str, row: JsonObject) -> None:
        if log == METRICS:
            self.rows.append(row)
        self._log(log).append(row)

    def _log(self, name: str) -> Log:
        if name not in self._logs:
            self._logs[name] = Log(self.path / name, self.is_written)
        return self._logs[name]

    def plot(self, title: str) -> None:
        """Plot training and validation loss of every run of this folder. The curve of the first run is thin and drawn
        over the thick one of the second, so that both can be seen where they coincide.
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
                axes.plot(
                    steps,
                    losses,
                    style,
                    label=f"{run}, {label}",
                    color=color,
                    alpha=alpha,
                    linewidth=width,
                    markersize=4 + width,
                    zorder=-width,
                )
        axes.set(title=title, xlabel="step", ylabel="cross entropy, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=130)
        write_bytes(self.path / PICTURE, picture.getvalue())


def versions(mesh: Mesh) -> dict[str, str]:
    """The device of a run, and the versions of Python and of the packages that compute."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = mesh.devices.flat[0]
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "device": f"{mesh.size} x {device.device_kind}",
    }
