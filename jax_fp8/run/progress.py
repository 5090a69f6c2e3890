"""What a run shows while it lasts, and the rows of its log.

losses of steps, on the device ─READ_BEHIND steps later→ mean of every few steps → metrics.jsonl, and one line:

delayed 200/1000 |██    | loss 2.312 val 2.405 1.23M tok/s 612 TF/s 62% bf16 31% fp8 34.3 GiB 12:34 left

Model FLOPs are those of the model's products, forward and backward, whether a step computes some of them again or not.
Their share of the peak in bfloat16 is what is called MFU elsewhere. In FP8 it may exceed 1, so the share of the peak in
FP8 stands beside it.
"""

import collections
import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import tqdm

from jax_fp8.models.config import GPTConfig
from jax_fp8.plan.gpt_plans import operations_of_a_token
from jax_fp8.plan.peaks import Peak, peak_of
from jax_fp8.run.logs import LOG_EVERY, Logbook
from jax_fp8.run.spikes import READ_BEHIND, Watch

COLUMNS = 100  # of the line, at most
BAR = 4  # columns that the bar itself needs, at least
NOTHING = {"model_tflops": None, "bf16_utilization": None, "fp8_utilization": None}


class Speed(NamedTuple):
    """What turns tokens a second into model TFLOP/s, utilization and memory of one device.

    Args:
      operations: model FLOPs that training on a token needs.
      devices: that share the work.
      peak: of one of them; None where it is not known.
      device: of this process, whose memory is looked at.
    """

    operations: float
    devices: int
    peak: Peak | None
    device: Any

    @classmethod
    def of(cls, model: GPTConfig, mesh: jax.sharding.Mesh) -> "Speed":
        device = mesh.local_devices[0]
        return cls(operations_of_a_token(model), mesh.size, peak_of(device.device_kind), device)

    def figures(self, tokens_per_second: float | None) -> dict[str, float | None]:
        """As a row of the log has them; None where nothing is known."""
        return self._of_products(tokens_per_second) | {"peak_memory_gib": self._peak_memory()}

    def _of_products(self, tokens_per_second):
        if tokens_per_second is None:
            return NOTHING
        rate = tokens_per_second * self.operations / self.devices
        found = NOTHING | {"model_tflops": float(f"{rate / 1e12:.4g}")}
        if self.peak is not None:
            found |= {"bf16_utilization": round(rate / self.peak.bf16, 4)}
            found |= {"fp8_utilization": round(rate / self.peak.fp8, 4)}
        return found

    def _peak_memory(self) -> float | None:
        """GiB; a CPU has no such statistics."""
        most = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        return None if most is None else round(most / 2**30, 2)


class Progress:
    """Progress bar and log of one training run. Losses stay on the device until they are `READ_BEHIND` steps old, but
    for the first one of a program, which shows that it runs.

    Training loss is averaged over the steps since the last row, without those that were skipped; tokens/s counts
    neither compilation nor validation. The time that is left is that of all steps so far, with validations.
    A run that is interrupted logs the steps that the device has finished. One that goes on begins with the `notes` of
    the one before.
    """

    def __init__(
        self, log: Logbook, steps: int, tokens_per_step: int, speed: Speed, watch: Watch, notes: dict | None = None
    ):
        self.log, self.steps, self.watch = log, steps, watch
        self.tokens_per_step, self.speed = tokens_per_step, speed
        notes = notes or {"step": 0, "losses": [], "val_loss": math.nan}
        self.pending, self.last_step = collections.deque(), notes["step"]
        self.losses, self.val_loss, self.tokens_per_second = list(notes["losses"]), notes["val_loss"], None
        self.counted, self.started = 0, None  # steps timed since the last row, and when they began
        self._began = self._first = None  # when the first loss was read, and of which step it was
        self._mean = math.nan  # of the last row
        self._called = set()  # programs
        self._figures = speed.figures(None)
        self._columns = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns)
        look = {"mininterval": 0.5, "ncols": self._columns, "disable": not log.is_written}
        self.bar = tqdm.tqdm(total=steps, initial=self.last_step, bar_format=self._format(), **look)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is KeyboardInterrupt:
            self.watch.hurry()
            self.catch_up()
            if self.losses:
                self._write(self.last_step, None)
        self.bar.close()

    @contextlib.contextmanager
    def calling(self, program: str) -> Iterator[None]:
        """The call of a program, which is compiled the first time: of that no figure knows."""
        if program in self._called:
            yield
            return
        self._called.add(program)
        self.catch_up()
        began = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - began
        self.started = None  # the next loss is read at once, and what it took is not known

    def add(self, step: int, metrics: dict[str, Any], val_loss: jax.Array | None = None) -> None:
        """Take the metrics of one step, and the validation loss after it where there is one, which may still run."""
        self.pending.append((step, metrics, val_loss))
        behind = 0 if step == self.steps or self.started is None else READ_BEHIND
        while len(self.pending) > behind:
            self._read(*self.pending.popleft())

    def notes(self) -> dict:
        """What a checkpoint keeps, so that the log goes on as if nothing had been; waits for the last step."""
        self.catch_up()
        found = {"losses": self.losses.copy(), "val_loss": self.val_loss}
        return found | self.log.notes() | self.watch.notes()

    def start(self, val_loss: jax.Array) -> None:
        """Take the validation loss before the first step."""
        self._write(0, float(val_loss))

    def catch_up(self) -> None:
        """Wait for the last step, and read all losses."""
        while self.pending:
            self._read(*self.pending.popleft())

    def say(self, text: str) -> None:
        """Print above the line."""
        if self.log.is_written:
            self.bar.write(text)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is done while the device has nothing to do; it is left out of tokens/s."""
        self.catch_up()
        yield
        self.leave_out()

    def leave_out(self) -> None:
        """Of tokens/s, what was done since the last step, whose loss has been read."""
        self.started, self.counted = time.perf_counter(), 0

    def _read(self, step, metrics, val_loss):
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

    def _count(self, step):
        """Of the time; what went by while a program was compiled does not count."""
        now = time.perf_counter()
        if self._began is None:
            self._began, self._first = now, step
        if self.started is None:
            self.started, self.counted = now, 0
        else:
            self.counted += 1
            self.tokens_per_second = self.counted * self.tokens_per_step / (now - self.started)

    def _write(self, step, val_loss):
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        speed = None if self.tokens_per_second is None else round(self.tokens_per_second)
        known = val_loss if val_loss is not None and math.isfinite(val_loss) else None
        row = {"loss": loss, "tokens_per_second": speed, "val_loss": known}
        self.log.add_metrics(step, row | self.speed.figures(speed))
        self.losses.clear()
        self._mean = self._mean if loss is None else loss
        self.val_loss = self.val_loss if val_loss is None else val_loss
        self._show()

    def _show(self):
        self._figures = self.speed.figures(self.tokens_per_second)
        self.bar.bar_format = self._format()

    def _format(self) -> str:
        """The line: as much as fits, and what is left of it is the bar."""
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
        if (left := self._seconds_left()) is not None:
            parts["left"] = f"{tqdm.tqdm.format_interval(left)} left"
        return parts

    def _seconds_left(self) -> float | None:
        """By the mean of all steps but the first, with everything that was done between them."""
        if self._began is None or self.last_step == self._first:
            return None
        return (time.perf_counter() - self._began) / (self.last_step - self._first) * (self.steps - self.last_step)


EXPENDABLE = ("tflops", "memory", "tokens", "peaks", "left")  # what the line does without first


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


def _short(value: float) -> str:
    """Three digits and a unit, as 987, 12.3k, 1.23M."""
    units = ["", "k", "M", "G"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g}{units[0]}"
