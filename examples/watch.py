"""What a run looks at beside its loss: how tensors were cast, every few steps, and steps that changed nothing.

    options of a step → the step → its metrics ─READ_BEHIND steps later→ diagnostics.jsonl, events.jsonl, a printed line

A step that was skipped is diagnosed when its loss is read, with its own batch, and with the state of then: up to two
steps later, which were taken or skipped themselves. A diagnosed step that was skipped has its own numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from logbook import Logbook
from settings import Settings
from spikes import NO_LIMIT, Spikes

import jax_fp8 as fp8

DIGITS = 5  # of a number in the logs


class Watch:
    """That of one training run.

    Args:
      diagnose: of a step's number, what the step says that diagnoses its batch; None where it cannot.
      notes: of a run that goes on.
    """

    def __init__(
        self,
        log: Logbook,
        settings: Settings,
        diagnose: Callable[[int], fp8.Diagnostics] | None = None,
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
        fault = fp8.find_fault(found) if found else None
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
