"""A profile of chosen steps: `--profile 20:24` → jax.profiler → `runs/<name>/profile/<run>`.

The device has nothing to do when it begins and when it ends, so the profile has these steps and nothing else.
Steps that a run which goes on has behind it are left out.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jax_fp8.run.progress import Progress

VIEWER = "https://ui.perfetto.dev"


class Profile:
    """That of one training run, as a context; an interruption leaves what there is of it.

    Args:
      folder: where it is written.
      steps: that it has.
      progress: which waits for the device before it begins and ends, and leaves its time out of tokens/s.
    """

    def __init__(self, folder: Path, steps: range, progress: Progress):
        self.folder, self.steps, self._progress = folder, steps, progress
        self._first = 0  # of its steps, while it runs

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The call of a step."""
        if step not in self.steps:
            yield
            return
        if not self._first:
            with self._progress.pause():
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # calls of Python functions would be most of it
                jax.profiler.start_trace(self.folder, profiler_options=options)
            self._first = step
        with jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield

    def end(self, step: int) -> None:
        """After the last of its steps, write it, and say so."""
        if not self._first or step < self.steps[-1]:
            return
        first = self._first
        with self._progress.pause():
            self._stop()
        self._progress.say(
            f"the profile of steps {first} to {step} is below {self.folder}; open its *.trace.json.gz at "
            f"{VIEWER}, or `tensorboard --logdir {self.folder}` (pip install tensorboard xprof)"
        )

    def _stop(self):
        if self._first:
            self._first = 0
            jax.profiler.stop_trace()
