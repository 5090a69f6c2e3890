"""A finding: one sentence of the report about a problem in the run, and its remedy."""

from typing import NamedTuple

from jax_fp8.report.diagnosed import Place

CRITICAL, WARNING, NOTE = LEVELS = ("critical", "warning", "note")


class Finding(NamedTuple):
    """A sentence about a run, and what to do.

    Args:
      level: one of LEVELS.
      kind: the kind of problem; the report groups findings by it.
      weight: orders the findings of a kind; larger is worse.
      place: the tensor that it is about, if any: the row of the map to show.
      run: the name of the run that it is about.
    """

    level: str
    kind: str
    sentence: str
    remedy: str
    weight: float = 0.0
    place: Place | None = None
    run: str = ""
