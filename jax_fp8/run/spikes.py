"""Skipped steps: those whose loss is NaN or infinite and, with --skip-spikes, those whose loss is a spike.

    limit = median + 6 * spread, over the last 64 losses of steps that were not skipped
    spread = 1.4826 * median of |loss - median|, but at least 1 % of the median

For normally distributed losses, the spread is their standard deviation. A few spikes among the losses hardly change a
median. There is no limit before 48 losses, because the first losses fall too fast. The host reads each loss READ_BEHIND
steps late, so the limit of a step uses the losses up to the third step before it. It uses the same losses after an
interruption, so a resumed run has the same limits.

The device compares loss and limit, and a step above the limit changes nothing (`step(state, batch, skip_above=limit)`).
A run ends when `--stop-after-skips` steps in a row were skipped, since it learns nothing.

    options of a step → the step → its metrics ─READ_BEHIND steps later→ diagnostics.jsonl, events.jsonl, a printed line

When the host reads the loss of a skipped step, it diagnoses that step's batch with the present state, which is up to
two steps newer. If the step itself was run with `diagnose=True`, its own diagnostics are used.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypedDict

import jax

from jax_fp8.core.types import PyTree
from jax_fp8.report.run_format import JsonObject
from jax_fp8.run.logs import Logbook
from jax_fp8.run.settings import Settings
from jax_fp8.train.diagnostics import Diagnostics
from jax_fp8.train.faults import find_fault

READ_BEHIND = 2  # a loss is read this many steps late, so that the device never waits for the host
WINDOW, WARM_UP = 64, 48  # losses that a limit is computed from: at most, at least
FACTOR, LEAST_SPREAD, NORMAL = 6, 0.01, 1.4826
NO_LIMIT = math.inf  # a loss must still be finite
DIGITS = 5  # of a number in the logs

Rows = Mapping[str, list[JsonObject]]  # `Diagnostics.rows()`


class StepOptions(TypedDict):
    """Keyword arguments of a call of the step. Each value of `diagnose` makes a compiled program of its own."""

    skip_above: float
    diagnose: bool


class Spikes:
    """The losses of the steps that were not skipped, and the number of steps that were skipped since the last of them.

    Args:
      limits: whether there is a limit other than `NO_LIMIT`.
      notes: of the checkpoint that a run resumes from.
    """

    def __init__(self, limits: bool, notes: JsonObject | None = None):
        notes = notes or {"losses": [], "skipped": 0}
        self._limits, self.skipped = limits, notes["skipped"]
        # A limit must not use the losses of the two steps before its own, but they may have been read already.
        self._losses = deque(map(tuple, notes["losses"]), maxlen=WINDOW + READ_BEHIND)

    def limit(self, step: int) -> float:
        """The largest loss with which this step is not skipped."""
        known = [loss for before, loss in self._losses if before < step - READ_BEHIND][-WINDOW:]
        if not self._limits or len(known) < WARM_UP:
            return NO_LIMIT
        median = statistics.median(known)
        spread = NORMAL * statistics.median(abs(loss - median) for loss in known)
        return median + FACTOR * max(spread, LEAST_SPREAD * abs(median))

    def take(self, step: int, loss: float, skipped: bool) -> None:
        """Note the loss of a step; steps must come in their order."""
        self.skipped = self.skipped + 1 if skipped else 0
        if not skipped:
            self._losses.append((step, loss))

    def notes(self) -> JsonObject:
        """The entries of a checkpoint's notes."""
        return {"losses": list(self._losses), "skipped": self.skipped}


class Watch:
    """Decides which steps are diagnosed or skipped, and logs and prints it.

    Args:
      log: gets the diagnostics and the events.
      diagnose: from the number of a step, the diagnostics of its batch with the present state; None if it cannot.
      notes: of the checkpoint that a run resumes from.
    """

    def __init__(
        self,
        log: Logbook,
        settings: Settings,
        diagnose: Callable[[int], Diagnostics] | None = None,
        notes: JsonObject | None = None,
    ):
        self._log, self._settings, self._diagnose = log, settings, diagnose
        self._spikes = Spikes(settings.skip_spikes, (notes or {}).get("spikes"))
        self._limits: dict[int, float] = {}  # of steps whose loss has not been read

    def options(self, step: int) -> StepOptions:
        """The options with which this step must be called."""
        self._limits[step] = self._spikes.limit(step)
        every = self._settings.diagnose_every
        return {"skip_above": self._limits[step], "diagnose": bool(every) and step % every == 0}

    def read(self, step: int, metrics: Mapping[str, PyTree], say: Callable[[str], None]) -> float | None:
        """The loss of a step; None if it was skipped, which is logged and printed. Waits for the device.

        Args:
          say: prints a line.

        Raises:
          FloatingPointError: if too many steps in a row were skipped.
        """
        loss, skipped, limit = float(metrics["loss"]), bool(metrics["skipped"]), self._limits.pop(step)
        rows = _rounded(metrics["diagnostics"].rows()) if "diagnostics" in metrics else None
        if rows is not None:
            self._log.add_diagnostics(step, {"loss": _finite(loss), **rows})
        self._spikes.take(step, loss, skipped)
        if not skipped:
            return loss
        rows = rows or self._diagnosed(step, say)
        self._tell(step, loss, None if limit == NO_LIMIT else limit, rows, say)
        return None

    def notes(self) -> JsonObject:
        """The entries of a checkpoint's notes."""
        return {"spikes": self._spikes.notes()}

    def hurry(self) -> None:
        """Diagnose no more steps, because the first diagnosis compiles a program."""
        self._diagnose = None

    def _diagnosed(self, step: int, say: Callable[[str], None]) -> Rows:
        """The diagnostics of a step's batch; empty if it cannot be diagnosed."""
        if self._diagnose is None:
            return {}
        try:
            return _rounded(self._diagnose(step).rows())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._diagnose = None
            say("there is not enough device memory to diagnose skipped steps; the run continues without it")
            return {}

    def _tell(self, step: int, loss: float, limit: float | None, rows: Rows, say: Callable[[str], None]) -> None:
        """Log and print that a step was skipped, and end the run after too many of them."""
        fault = find_fault(rows) if rows else None
        about = {"loss": _finite(loss), "limit": limit, "fault": fault}
        self._log.add_event(step, {"event": "skipped", **about, **rows})
        cause = f"its loss is {loss:.4g}" + (f", above {limit:.4g}" if limit is not None and loss > limit else "")
        cause += f"; {fault}" if fault else ""
        say(f"step {step} of {self._log.run} was skipped: {cause}")
        if self._spikes.skipped >= self._settings.stop_after_skips:
            self._log.add_event(step, {"event": "stopped", **about})
            raise FloatingPointError(
                f"{self._spikes.skipped} steps of {self._log.run} in a row were skipped, the last of them is {step}: "
                f"{cause}; lower --learning-rate, or resume from a checkpoint with another --seed"
            )


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else None


def _rounded(rows: Rows) -> Rows:
    def short(value: object) -> object:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    return {
        kind: [{name: short(value) for name, value in row.items()} for row in of_kind] for kind, of_kind in rows.items()
    }
