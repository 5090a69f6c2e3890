"""The progress line of a run, and the rows of its log.

losses of steps, on the device ─READ_BEHIND steps later→ mean of every few steps → metrics.jsonl, and one line:

delayed 200/1000 |██    | loss 2.312 val 2.405 1.23M tok/s 612 TF/s 62% bf16 31% fp8 34.3 GiB 12:34 left

Model FLOPs count each product of the model once, forward and backward, even if remat computes it again. Their share of
the bfloat16 peak is the usual MFU. With FP8 GEMMs that share may exceed 1, so the share of the FP8 peak is shown beside
it.
"""

import collections
import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import jax
import tqdm

from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.plan.gpt_plans import operations_of_a_token
from jax_fp8.plan.peaks import Peak, peak_of
from jax_fp8.report.run_format import JsonObject
from jax_fp8.run.logs import LOG_EVERY, Logbook
from jax_fp8.run.spikes import READ_BEHIND, Watch

COLUMNS = 100  # of the line, at most
BAR = 4  # columns of the bar, at least
NOTHING: dict[str, float | None] = {"model_tflops": None, "bf16_utilization": None, "fp8_utilization": None}


class Device(Protocol):
    """The part of a jax device that `Speed` reads."""

    def memory_stats(self) -> Mapping[str, int] | None: ...


class Speed(NamedTuple):
    """Turns tokens a second into model TFLOP/s and utilization of one device, and reads its peak memory.

    Args:
      operations: model FLOPs to train on one token.
      devices: how many devices share the work.
      peak: of one device; None where it is not known.
      device: the device of this process whose memory is read.
    """

    operations: float
    devices: int
    peak: Peak | None
    device: Device

    @classmethod
    def for_model(cls, model: GPTConfig, mesh: jax.sharding.Mesh, is_frozen: bool = False) -> "Speed":
        device = mesh.local_devices[0]
        return cls(operations_of_a_token(model, is_frozen), mesh.size, peak_of(device.device_kind), device)

    def figures(self, tokens_per_second: float | None) -> dict[str, float | None]:
        """The entries of a row of the log; None where nothing is known."""
        return self._utilization(tokens_per_second) | {"peak_memory_gib": self._peak_memory()}

    def _utilization(self, tokens_per_second: float | None) -> dict[str, float | None]:
        if tokens_per_second is None:
            return NOTHING
        rate = tokens_per_second * self.operations / self.devices
        figures = NOTHING | {"model_tflops": float(f"{rate / 1e12:.4g}")}
        if self.peak is not None:
            figures |= {"bf16_utilization": round(rate / self.peak.bf16, 4)}
            figures |= {"fp8_utilization": round(rate / self.peak.fp8, 4)}
        return figures

    def _peak_memory(self) -> float | None:
        """The peak in GiB; None on a CPU, which has no such statistics."""
        most = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        return None if most is None else round(most / 2**30, 2)


class Progress:
    """Progress bar and log of one training run. Losses stay on the device until they are `READ_BEHIND` steps old. Only
    the first loss after a program was compiled is read at once, which shows that the program runs.

    The training loss is the mean over the steps since the last row, without skipped ones. Tokens/s counts neither
    compilation nor validation. The time left is estimated from all steps so far, with validations. An interrupted run
    logs the steps that the device has finished.

    Args:
      log: gets the rows.
      steps: of the whole run.
      tokens_per_step: on all devices.
      speed: turns tokens/s into the other figures.
      watch: reads the losses, and decides which steps count.
      notes: of the checkpoint that the run resumes from; None for a new run.
    """

    def __init__(
        self,
        log: Logbook,
        steps: int,
        tokens_per_step: int,
        speed: Speed,
        watch: Watch,
        notes: JsonObject | None = None,
    ):
        self.log, self.steps, self.watch = log, steps, watch
        self.tokens_per_step, self.speed = tokens_per_step, speed
        notes = notes or {"step": 0, "losses": [], "val_loss": math.nan}
        self.pending, self.last_step = collections.deque(), notes["step"]
        self.losses, self.val_loss, self.tokens_per_second = list(notes["losses"]), notes["val_loss"], None
        self.counted, self.started = 0, None  # steps timed since the last row, and when they began
        self._began, self._first = None, 0  # when the first loss was read, and its step
        self._mean = math.nan  # loss of the last row
        self._called: set[str] = set()  # programs that are compiled
        self._figures = speed.figures(None)
        self._columns = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)
        self.bar = tqdm.tqdm(
            total=steps,
            initial=self.last_step,
            bar_format=self._format(),
            mininterval=0.5,
            ncols=self._columns,
            disable=not log.is_written,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self.watch.hurry()
            self.catch_up()
            if self.losses:
                self._write(self.last_step, None)
        self.bar.close()

    @contextlib.contextmanager
    def calling(self, program: str) -> Iterator[None]:
        """The context in which a program is called. Its first call compiles it, and no figure counts that time."""
        if program in self._called:
            yield
            return
        self._called.add(program)
        self.catch_up()
        began = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - began
        self.started = None  # the next loss is read at once, and its step is not timed

    def add(self, step: int, metrics: Mapping[str, PyTree], val_loss: jax.Array | None = None) -> None:
        """Take the metrics of one step and, if there was a validation after it, the validation loss. The device may
        still be computing both.
        """
        self.pending.append((step, metrics, val_loss))
        behind = 0 if step == self.steps or self.started is None else READ_BEHIND
        while len(self.pending) > behind:
            self._read(*self.pending.popleft())

    def notes(self) -> JsonObject:
        """The entries of a checkpoint's notes with which a resumed run logs the same rows. Waits for the last step."""
        self.catch_up()
        return {"losses": self.losses.copy(), "val_loss": self.val_loss, **self.log.notes(), **self.watch.notes()}

    def start(self, val_loss: jax.Array) -> None:
        """Log the validation loss before the first step."""
        self._write(0, float(val_loss))

    def catch_up(self) -> None:
        """Wait for the last step, and read all losses."""
        while self.pending:
            self._read(*self.pending.popleft())

    def say(self, text: str) -> None:
        """Print above the progress line."""
        if self.log.is_written:
            self.bar.write(text)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context for work that needs an idle device; its time is left out of tokens/s."""
        self.catch_up()
        yield
        self.leave_out()

    def leave_out(self) -> None:
        """Restart the clock of tokens/s, to leave out the time since the last step, whose loss must have been read."""
        self.started, self.counted = time.perf_counter(), 0

    def _read(self, step: int, metrics: Mapping[str, PyTree], val_loss: jax.Array | None) -> None:
        float(metrics["loss"])  # waits until the device has finished this step
        self.last_step = step
        self._count(step)
        loss = self.watch.read(step, metrics, self.say)
        if loss is None:
            self.leave_out()
        else:
            self.losses.append(loss)
        if val_loss is not None or step % LOG_EVERY == 0:
            self._write(step, None if val_loss is None else float(val_loss))
            self.leave_out()
        self._show()
        self.bar.update()

    def _count(self, step: int) -> None:
        """Count a step and its time. The first step after a compilation only starts the clock."""
        now = time.perf_counter()
        if self._began is None:
            self._began, self._first = now, step
        if self.started is None:
            self.started, self.counted = now, 0
        else:
            self.counted += 1
            self.tokens_per_second = self.counted * self.tokens_per_step / (now - self.started)

    def _write(self, step: int, val_loss: float | None) -> None:
        """Log the row of a step, and begin the next mean."""
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        speed = None if self.tokens_per_second is None else round(self.tokens_per_second)
        finite = val_loss if val_loss is not None and math.isfinite(val_loss) else None
        row = {"loss": loss, "tokens_per_second": speed, "val_loss": finite}
        self.log.add_metrics(step, row | self.speed.figures(speed))
        self.losses.clear()
        self._mean = self._mean if loss is None else loss
        self.val_loss = self.val_loss if val_loss is None else val_loss
        self._show()

    def _show(self) -> None:
        self._figures = self.speed.figures(self.tokens_per_second)
        self.bar.bar_format = self._format()

    def _format(self) -> str:
        """tqdm's format of the line, with as many figures as fit; the bar takes the remaining columns."""
        before, parts = f"{self.log.run} {self.last_step}/{self.steps} |", self._parts()
        while len(parts) > 2 and len(before) + BAR + 2 + len(" ".join(parts.values())) > self._columns:
            parts.pop(next(name for name in EXPENDABLE if name in parts))
        return f"{self.log.run} {{n_fmt}}/{{total_fmt}} |{{bar}}| {' '.join(parts.values())}"

    def _parts(self) -> dict[str, str]:
        loss = self._mean if math.isfinite(self._mean) else (self.losses[-1] if self.losses else math.nan)
        parts = {"loss": f"loss {_number(loss)}", "val": f"val {_number(self.val_loss)}"}
        figures = self._figures
        if self.tokens_per_second is not None:
            parts["tokens"] = f"{_short(self.tokens_per_second)} tok/s"
        if figures["bf16_utilization"] is not None:
            parts["tflops"] = f"{figures['model_tflops']:.0f} TF/s"
            parts["peaks"] = f"{figures['bf16_utilization']:.0%} bf16 {figures['fp8_utilization']:.0%} fp8"
        if figures["peak_memory_gib"] is not None:
            parts["memory"] = f"{figures['peak_memory_gib']:.1f} GiB"
        if (seconds := self._seconds_left()) is not None:
            parts["left"] = f"{tqdm.tqdm.format_interval(seconds)} left"
        return parts

    def _seconds_left(self) -> float | None:
        """The remaining steps at the mean time of all steps but the first, with validations and checkpoints."""
        if self._began is None or self.last_step == self._first:
            return None
        return (time.perf_counter() - self._began) / (self.last_step - self._first) * (self.steps - self.last_step)


EXPENDABLE = ("tflops", "memory", "tokens", "peaks", "left")  # in the order in which a narrow line drops them


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _short(value: float) -> str:
    """Three digits and a unit: 987, 12.3k, 1.23M."""
    units = ["", "k", "M", "G"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g}{units[0]}"
