"""Ctrl-C and SIGTERM: the first signal asks a run to end after its step, the second one ends the process at once.

Python calls its signal handlers only between two instructions of Python, and compiling a step is one call that takes a
minute. So a thread listens for signals as well: it prints an answer at once, and can end the process at once.

Several processes must end after the same step, whichever of them gets the signal. jax chooses that step when any of
them gets a SIGTERM, so there the handler of Ctrl-C sends a SIGTERM to its own process (`all_end` in devices.py).
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

FAILED = 1  # exit status of a run that began and could not continue
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Leaving:
    """The signals that a run has got, as a context of the main thread. While the run trains, the first signal is only
    noted, and `is_asked` tells it after the step; at any other time it raises KeyboardInterrupt.

    `status` is the exit status of a run that a signal has ended: 128 and the signal's number, as in shells.

    Args:
      all_end: for several processes: says of a step whether all processes must end after it. jax notes SIGTERM for it.
    """

    def __init__(self, all_end: Callable[[int], bool] | None = None):
        self.status = 128 + signal.SIGINT
        self._all_end, self._asked, self._training, self._count = all_end, False, False, 0

    def __enter__(self) -> "Leaving":
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        numbers = (signal.SIGINT,) if self._all_end else SIGNALS
        self._handlers_before = {number: signal.signal(number, self._handle) for number in numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno())
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._sender.close()  # which ends the thread
        self._thread.join()
        self._receiver.close()

    @contextlib.contextmanager
    def after_a_step(self) -> Iterator[None]:
        """The training loop, which must call `is_asked` after every step."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def is_asked(self, step: int) -> bool:
        """Whether the run must end after this step; several processes return True after the same step."""
        return self._all_end(step) if self._all_end else self._asked

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.status = 128 + number
        if not self._training:
            raise KeyboardInterrupt
        self._asked = True
        if self._all_end:
            os.kill(os.getpid(), signal.SIGTERM)  # which jax tells to the other processes

    def _listen(self) -> None:
        """Read one byte for every signal, its number. Python's C handler writes it at once (`signal.set_wakeup_fd`),
        whatever the main thread is doing.
        """
        while number := self._receiver.recv(1):
            if number[0] not in SIGNALS:
                continue
            self._count += 1
            if self._count == 2:
                os._exit(128 + number[0])
            if self._training or self._asked:
                print("\nends after this step; once more, and it ends at once", file=sys.stderr, flush=True)


def leave(status: int) -> None:
    """End the process. After a failure it ends at once, without joining threads: one of Orbax's may wait forever for a
    folder that could not be created.
    """
    if status == FAILED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
