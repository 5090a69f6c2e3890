"""Which steps are not taken: those whose loss is NaN or infinite and, with --skip-spikes, far above those before.

    limit = median + 6 * spread, of the last 64 losses of steps that were taken
    spread = 1.4826 * median of |loss - median|, but at least 1 % of the median

The spread of a normal distribution is its standard deviation. A few spikes among the losses hardly move a median.
There is no limit before 48 losses: in the first steps they fall too fast. A loss is read READ_BEHIND steps late, so the
limit of a step knows the losses up to the third step before it: always these, however the run was interrupted, so a run
that goes on has the same limits.

The device compares loss and limit, and a step above it changes nothing (`step(state, batch, skip_above=limit)`). A run
whose steps are skipped again and again learns nothing, and ends.
"""

import math
import statistics
from collections import deque
from typing import Any

READ_BEHIND = 2  # a loss is read this many steps late, so that the device never waits for the host
WINDOW, WARM_UP = 64, 48  # losses that count, and before there is a limit
FACTOR, LEAST_SPREAD, NORMAL = 6, 0.01, 1.4826
NO_LIMIT = math.inf  # below which a loss must be finite


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
