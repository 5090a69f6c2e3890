"""What a run shows while it lasts, and what it leaves: `runs/<name>/` with config.json, metrics.jsonl and loss.png."""

import collections
import importlib.metadata
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tqdm
from jax.sharding import Mesh
from matplotlib.figure import Figure

ROW_BYTES = 256  # of the log, at most
PICTURE_BYTES = 2**20  # and configuration, at most
READ_BEHIND = 2  # a loss is read this many steps late, so that the device never waits for the host


class Existing(NamedTuple):
    """A run that goes on: its folder, and how many rows of log it had of each of its runs."""

    path: Path
    rows: dict[str, int]


class Folder:
    """A new `runs/<name>/`, with room for so many rows of log; or that of a run that goes on.

    A name already taken gets a number: nothing is ever overwritten. ValueError where nothing can be written.
    Of several processes one writes; to the others it is a folder that they leave alone.
    """

    def __init__(self, parent: Path, name: str, rows: int, is_written: bool = True, existing: "Existing | None" = None):
        self.is_written, self.rows, self.existing = is_written, [], existing
        self.path = existing.path if existing else parent / name
        if not is_written:
            return
        if existing is None:
            self._make(parent, name)
        self._try_to_write(PICTURE_BYTES + ROW_BYTES * rows)
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
        trial = self.path / "trial"
        try:
            trial.write_bytes(bytes(size))
        except OSError as error:
            trial.unlink(missing_ok=True)
            self.remove()
            raise ValueError(
                f"a run writes up to {math.ceil(size / 2**20)} MiB, got {error.strerror} in {self.path.parent}; "
                "free some space, or choose another folder by --output"
            ) from None
        trial.unlink()

    def like_that_of_the_first(self, path: Path, goes_on: bool) -> "Folder":
        """Of a process that writes no log: where the first one writes, and all of them their parts of checkpoints."""
        self.path, self.existing = path, Existing(path, {}) if goes_on else None
        return self

    def remove(self) -> None:
        """Leave nothing of a run that cannot begin."""
        if self.is_written and self.existing is None:
            self.path.rmdir()

    def write_config(self, config: dict) -> None:
        if self.is_written:
            _replace(self.path / "config.json", json.dumps(config, indent=2, default=str) + "\n")

    def take_up(self) -> None:
        """Keep of the log what was there when the checkpoint was saved, and read it: what came later will come again.
        Of a new run there is nothing to keep, and it is done once.
        """
        if self.existing is None or not self.is_written:
            self.existing = None
            return
        log, left, self.existing = self.path / "metrics.jsonl", dict(self.existing.rows), None
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        kept = []
        for line in lines:
            if not line.endswith("\n"):  # the process was killed, or the disk was full, in the middle of it
                break
            row = json.loads(line)
            if left.get(row["run"], 0):
                left[row["run"]] -= 1
                self.rows.append(row)
                kept.append(line)
        if any(left.values()):
            print(f"{log} has lost {sum(left.values())} rows from before the checkpoint; the run goes on without them")
        if self.is_written and kept != lines:
            _replace(log, "".join(kept))

    def counts(self) -> dict[str, int]:
        """Rows of each run, for `take_up`; on the disk, when this returns."""
        if self.is_written and self.rows:
            with (self.path / "metrics.jsonl").open("a") as file:
                os.fsync(file)
        return dict(collections.Counter(row["run"] for row in self.rows))

    def append(self, row: dict) -> None:
        self.rows.append(row)
        if not self.is_written:
            return
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

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
                points = [(row["step"], row[key]) for row in self.rows if row["run"] == run and row[key] is not None]
                alpha = 0.5 if key == "loss" else 1.0
                steps, losses = zip(*points, strict=True) if points else ((), ())
                look = {"color": color, "alpha": alpha, "linewidth": width, "markersize": 4 + width, "zorder": -width}
                axes.plot(steps, losses, style, label=f"{run}, {label}", **look)
        axes.set(title=title, xlabel="step", ylabel="cross entropy, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / "loss.png", dpi=130)


def versions(mesh: Mesh) -> dict[str, Any]:
    """What a run was computed with."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = mesh.devices.flat[0]
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "device": f"{mesh.size} x {device.device_kind}",
    }


def _replace(path: Path, text: str) -> None:
    """Write a file that is there as it was or as it is now, whenever the process is killed."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file)
    unfinished.replace(path)


class Progress:
    """Progress bar and log of one training run. Losses stay on the device until they are `READ_BEHIND` steps old.

    Training loss is averaged over the steps since the last row; tokens/s counts neither compilation nor validation.
    A run that is interrupted logs the steps that the device has finished. One that goes on begins with the `notes` of
    the one before.
    """

    def __init__(
        self, folder: Folder, run: str, steps: int, tokens_per_step: int, log_every: int, notes: dict | None = None
    ):
        self.folder, self.run, self.steps = folder, run, steps
        self.tokens_per_step, self.log_every = tokens_per_step, log_every
        notes = notes or {"step": 0, "losses": [], "val_loss": math.nan}
        self.pending, self.last_step = collections.deque(), notes["step"]
        self.losses, self.val_loss, self.tokens_per_second = list(notes["losses"]), notes["val_loss"], None
        self.counted = self.started = None  # steps timed since the last row, and when they began
        look = {"desc": f"{run:>7}", "unit": "step", "mininterval": 0.5, "disable": not folder.is_written}
        self.bar = tqdm.tqdm(total=steps, initial=self.last_step, **look)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is KeyboardInterrupt:
            self._catch_up()
            if self.losses:
                self._write(self.last_step, None)
        self.bar.close()

    def add(self, step: int, loss: jax.Array, val_loss: jax.Array | None = None) -> None:
        """Take the loss of one step, and the validation loss after it where there is one; both may still be running."""
        self.pending.append((step, loss, val_loss))
        while len(self.pending) > (0 if step == self.steps else READ_BEHIND):
            self._read(*self.pending.popleft())

    def notes(self) -> dict:
        """What a checkpoint keeps, so that the log goes on as if nothing had been; waits for the last step."""
        self._catch_up()
        return {"losses": self.losses.copy(), "val_loss": self.val_loss, "rows": self.folder.counts()}

    def start(self, val_loss: jax.Array) -> None:
        """Take the validation loss before the first step."""
        self._write(0, float(val_loss))

    def _catch_up(self):
        while self.pending:
            self._read(*self.pending.popleft())

    def _read(self, step, loss, val_loss):
        self.losses.append(float(loss))  # waits until the device has finished this step
        self.last_step = step
        now = time.perf_counter()
        if not math.isfinite(self.losses[-1]):
            raise FloatingPointError(
                f"the loss of {self.run} is {self.losses[-1]} at step {step}; lower --learning-rate"
            )
        if self.started is None:
            self.started, self.counted = now, 0  # the first step was compilation
        else:
            self.counted += 1
            self.tokens_per_second = self.counted * self.tokens_per_step / (now - self.started)
        if val_loss is not None or step % self.log_every == 0:
            self._write(step, None if val_loss is None else float(val_loss))
            self.started, self.counted = time.perf_counter(), 0
        self.bar.update()

    def _write(self, step, val_loss):
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        speed = None if self.tokens_per_second is None else round(self.tokens_per_second)
        self.folder.append(
            {"run": self.run, "step": step, "loss": loss, "tokens_per_second": speed, "val_loss": val_loss}
        )
        self.losses.clear()
        self.val_loss = self.val_loss if val_loss is None else val_loss
        shown = {"loss": "-" if loss is None else f"{loss:.3f}", "val": f"{self.val_loss:.3f}"}
        self.bar.set_postfix(shown | ({} if speed is None else {"tokens/s": f"{speed:,}"}))
