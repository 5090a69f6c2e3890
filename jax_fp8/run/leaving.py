"""Ctrl-C and SIGTERM: the first asks a run to end after its step, the second one ends the process at once.

Python runs its own handlers between two lines of Python, and a step that is being compiled is one line for a minute. So
a thread listens as well: it answers at once, and can leave at once.

Several processes must end after the same step, whichever of them is told. jax agrees on one when any of them gets a
SIGTERM, so there Ctrl-C becomes one (processes.py).
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

FAILED = 1  # exit status of a run that began and could not go on
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Leaving:
    """What a run knows of signals. While it trains, the first one is heard after a step; else it raises
    KeyboardInterrupt. To be used by the main thread, as a context.

    `status` is the exit status then, as shells have it.

    Args:
      all_end: of several processes: whether all are to end after this step; it hears of SIGTERM by itself.
    """

    def __init__(self, all_end: Callable[[int], bool] | None = None):
        self.status = 128 + signal.SIGINT
        self._all_end, self._asked, self._training, self._count = all_end, False, False, 0

    def __enter__(self) -> "Leaving":
        self._listening, self._told = socket.socketpair()
        self._told.setblocking(False)
        numbers = (signal.SIGINT,) if self._all_end else SIGNALS
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._told.fileno())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._told.close()  # which ends the thread
        self._thread.join()
        self._listening.close()

    @contextlib.contextmanager
    def after_a_step(self) -> Iterator[None]:
        """Here `is_asked` is called after every step."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def is_asked(self, step: int) -> bool:
        """Whether the run is to end after this step; of several processes, all say so after the same one."""
        return self._all_end(step) if self._all_end else self._asked

    def _handle(self, number, _frame):
        self.status = 128 + number
        if not self._training:
            raise KeyboardInterrupt
        self._asked = True
        if self._all_end:
            os.kill(os.getpid(), signal.SIGTERM)  # of which the others hear too

    def _listen(self):
        """The kernel's word for every signal, one byte each, whatever the main thread is doing."""
        while told := self._listening.recv(1):
            if told[0] not in SIGNALS:
                continue
            self._count += 1
            if self._count == 2:
                os._exit(128 + told[0])
            if self._training or self._asked:
                print("\nends after this step; once more, and it ends at once", file=sys.stderr, flush=True)


def leave(status: int) -> None:
    """End the process. After a failure at once: threads may still wait for what will never come, such as Orbax's for a
    folder that could not be made.
    """
    if status == FAILED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
