"""Which steps are not taken: those whose loss is NaN or infinite and, with --skip-spikes, far above those before.

    limit = median + 6 * spread, of the last 64 losses of steps that were taken
    spread = 1.4826 * median of |loss - median|, but at least 1 % of the median

The spread of a normal distribution is its standard deviation. A few spikes among the losses hardly move a median.
There is no limit before 48 losses: in the first steps they fall too fast. A loss is read READ_BEHIND steps late, so the
limit of a step knows the losses up to the third step before it: always these, however the run was interrupted, so a run
that goes on has the same limits.

The device compares loss and limit, and a step above it changes nothing (`step(state, batch, skip_above=limit)`). A run
whose steps are skipped again and again learns nothing, and ends.

    options of a step → the step → its metrics ─READ_BEHIND steps later→ diagnostics.jsonl, events.jsonl, a printed line

A step that was skipped is diagnosed when its loss is read, with its own batch, and with the state of then: up to two
steps later, which were taken or skipped themselves. A diagnosed step that was skipped has its own numbers.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jax_fp8.run.logs import Logbook
from jax_fp8.run.settings import Settings
from jax_fp8.train.diagnostics import Diagnostics, find_fault

READ_BEHIND = 2  # a loss is read this many steps late, so that the device never waits for the host
WINDOW, WARM_UP = 64, 48  # losses that count, and before there is a limit
FACTOR, LEAST_SPREAD, NORMAL = 6, 0.01, 1.4826
NO_LIMIT = math.inf  # below which a loss must be finite
DIGITS = 5  # of a number in the logs


class Spikes:
    """The losses of the steps that were taken, and how many were skipped since the last of them.

    Args:
      limits: whether there is a limit beside `NO_LIMIT`.
      notes: of a run that goes on.
    """

    def __init__(self, limits: bool, notes: dict[str, Any] | None = None):
        notes = notes or {"losses": [], "skipped": 0}
        self._limits, self.skipped = limits, notes["skipped"]
        # Two more than count: at the limit of a step, those of the two steps before it may be there.
        self._losses = deque(map(tuple, notes["losses"]), maxlen=WINDOW + READ_BEHIND)

    def limit(self, step: int) -> float:
        """That of a step, which may not have begun."""
        known = [loss for before, loss in self._losses if before < step - READ_BEHIND][-WINDOW:]
        if not self._limits or len(known) < WARM_UP:
            return NO_LIMIT
        median = statistics.median(known)
        spread = NORMAL * statistics.median(abs(loss - median) for loss in known)
        return median + FACTOR * max(spread, LEAST_SPREAD * abs(median))

    def take(self, step: int, loss: float, skipped: bool) -> None:
        """The loss of a step, in the order of steps."""
        self.skipped = self.skipped + 1 if skipped else 0
        if not skipped:
            self._losses.append((step, loss))

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"losses": list(self._losses), "skipped": self.skipped}


class Watch:
    """What a training run looks at beside its loss: skipped steps, and how tensors were cast.

    Args:
      diagnose: of a step's number, what the step says that diagnoses its batch; None where it cannot.
      notes: of a run that goes on.
    """

    def __init__(
        self,
        log: Logbook,
        settings: Settings,
        diagnose: Callable[[int], Diagnostics] | None = None,
        notes: dict[str, Any] | None = None,
    ):
        self._log, self._settings, self._diagnose = log, settings, diagnose
        self._spikes = Spikes(settings.skip_spikes, (notes or {}).get("spikes"))
        self._limits: dict[int, float] = {}  # of steps that have not been read

    def options(self, step: int) -> dict[str, Any]:
        """Of the call of a step; each kind is a program of its own."""
        self._limits[step] = self._spikes.limit(step)
        every = self._settings.diagnose_every
        return {"skip_above": self._limits[step], "diagnose": bool(every) and step % every == 0}

    def read(self, step: int, metrics: dict[str, Any], say: Callable[[str], None]) -> float | None:
        """The loss of a step that was taken; None of one that was skipped, which is told. Waits for the device.

        Raises:
          FloatingPointError: where too many were skipped in a row.
        """
        loss, skipped, limit = float(metrics["loss"]), bool(metrics["skipped"]), self._limits.pop(step)
        found = _rounded(metrics["diagnostics"].rows()) if "diagnostics" in metrics else None
        if found is not None:
            self._log.add_diagnostics(step, {"loss": _known(loss)} | found)
        self._spikes.take(step, loss, skipped)
        if not skipped:
            return loss
        found = found or self._diagnosed(step, say)
        self._tell(step, loss, None if limit == NO_LIMIT else limit, found, say)
        return None

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"spikes": self._spikes.notes()}

    def hurry(self) -> None:
        """Diagnose nothing any more: it may have to be compiled."""
        self._diagnose = None

    def _diagnosed(self, step, say) -> dict[str, list[dict[str, Any]]]:
        """What there is to say of the batch of a step; nothing where it cannot be said."""
        if self._diagnose is None:
            return {}
        try:
            return _rounded(self._diagnose(step).rows())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._diagnose = None
            say("there is not enough device memory to diagnose steps that were skipped; the run goes on without")
            return {}

    def _tell(self, step, loss, limit, found, say):
        fault = find_fault(found) if found else None
        about = {"loss": _known(loss), "limit": limit, "fault": fault}
        self._log.add_event(step, {"event": "skipped"} | about | found)
        cause = f"its loss is {loss:.4g}" + (f", above {limit:.4g}" if limit is not None and loss > limit else "")
        cause += f"; {fault}" if fault else ""
        say(f"step {step} of {self._log.run} was skipped: {cause}")
        if self._spikes.skipped >= self._settings.stop_after_skips:
            self._log.add_event(step, {"event": "stopped"} | about)
            raise FloatingPointError(
                f"{self._spikes.skipped} steps of {self._log.run} in a row were skipped, the last of them is {step}: "
                f"{cause}; lower --learning-rate, or go on from a checkpoint with another --seed"
            )


def _known(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _rounded(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    def short(value):
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    return {
        kind: [{name: short(value) for name, value in row.items()} for row in found] for kind, found in rows.items()
    }
