"""One thing that stands out in a run, as the report says it."""

from typing import NamedTuple

from jax_fp8.report.diagnosed import Place

CRITICAL, WARNING, NOTE = LEVELS = ("critical", "warning", "note")


class Finding(NamedTuple):
    """A sentence, and what to do.

    Args:
      kind: what it is about; findings of a kind stand together.
      weight: how bad it is among its kind, larger is worse.
      place: the row of the map that shows it.
      run: that it is about.
    """

    level: str
    kind: str
    sentence: str
    remedy: str
    weight: float = 0.0
    place: Place | None = None
    run: str = ""
