"""A profile of chosen steps: `--profile 20:24` → jax.profiler → `runs/<name>/profile/<run>`.

The profile begins and ends while the device is idle, so it has no part of other steps. A resumed run profiles
only those of the steps that it still trains.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_fp8.run.progress import Progress

VIEWER = "https://ui.perfetto.dev"


class Profile:
    """The profile of one training run, as a context. If the run is interrupted, the steps so far are written.

    Args:
      folder: where the profile is written.
      steps: the steps to profile.
      progress: waits for the device before the profile begins and ends, and leaves this time out of tokens/s.
    """

    def __init__(self, folder: Path, steps: range, progress: Progress):
        self.folder, self.steps, self._progress = folder, steps, progress
        self._first = 0  # the first profiled step while the profiler runs, else 0

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context in which this step is called; starts the profiler before the first step of the profile."""
        if step not in self.steps:
            yield
            return
        if not self._first:
            with self._progress.pause():
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # or most of the profile would be calls of Python functions
                jax.profiler.start_trace(self.folder, profiler_options=options)
            self._first = step
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield

    def end(self, step: int) -> None:
        """After the last step of the profile, write it, and print where it is."""
        if not self._first or step < self.steps[-1]:
            return
        first = self._first
        with self._progress.pause():
            self._stop()
        self._progress.say(
            f"the profile of steps {first} to {step} is below {self.folder}; open its *.trace.json.gz at "
            f"{VIEWER}, or `tensorboard --logdir {self.folder}` (pip install tensorboard xprof)"
        )

    def _stop(self) -> None:
        if self._first:
            self._first = 0
            jax.profiler.stop_trace()
