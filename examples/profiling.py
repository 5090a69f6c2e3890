"""A profile of chosen steps: `--profile 20:24` → jax.profiler → `runs/<name>/profile/<run>`.

The device finishes the step before the first and the last one of them, so the profile has these steps and nothing else.
Steps that a run which goes on has behind it are left out.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

VIEWER = "https://ui.perfetto.dev"


def parse_steps(text: str, steps: int) -> range:
    """`20:24` → the steps from 20 to 24; none of an empty text."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last <= steps:
        raise ValueError(
            f"--profile must be FIRST:LAST, two of the steps 1 to {steps}, got {text!r}; "
            f"say --profile {min(2, steps)}:{min(5, steps)}"
        )
    return range(first, last + 1)


def profiled_steps(settings: Any, is_first: bool) -> range:
    """Those that this process profiles: of several, the first one does."""
    return parse_steps(settings.profile if is_first else "", settings.steps)


class Profile:
    """That of one training run, as a context; an interruption leaves what there is of it.

    Args:
      folder: where it is written.
      steps: that it has.
    """

    def __init__(self, folder: Path, steps: range):
        self.folder, self.steps, self._is_running, self._first = folder, steps, False, 0

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    @contextlib.contextmanager
    def around(self, step: int, state: Any) -> Iterator[None]:
        """The call of a step; the state is the one before it."""
        if step not in self.steps:
            yield
            return
        if not self._is_running:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would be most of it
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._is_running, self._first = True, step
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield

    def end(self, step: int, state: Any) -> str | None:
        """After the last of its steps, write it, and say so; the state is the one after the step."""
        if not self._is_running or step < self.steps[-1]:
            return None
        jax.block_until_ready(state)
        self._stop()
        return (
            f"the profile of steps {self._first} to {step} is below {self.folder}; open its *.trace.json.gz at "
            f"{VIEWER}, or `tensorboard --logdir {self.folder}` (pip install tensorboard xprof)"
        )

    def _stop(self):
        if self._is_running:
            self._is_running = False
            jax.profiler.stop_trace()
