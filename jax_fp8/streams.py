"""What a program prints, also where nobody reads it: work goes on when a stream is closed, full, or never was.

    python -m jax_fp8 train | head -1        the reader has gone after a line; the run trains on and saves
    python -m jax_fp8 train >&- 2>&-         there are no streams; the files of the run do not get their numbers
    python -m jax_fp8 plan ... > /dev/full   what cannot be written is said once, and the exit status is 1

Characters that a stream cannot show are written as escapes.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Stream:
    """Standard output or error, which swallows what can no longer be written. `lost` says why, but for a reader that
    has gone: that is how `head` ends well.
    """

    def __init__(self, stream: Any):
        self._stream, self.lost = stream, ""
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._surviving():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._give_up()
        except OSError as error:
            self.lost = self.lost or error.strerror or str(error)
            self._give_up()

    def _give_up(self) -> None:
        """From here on the system writes to nowhere: what is still in a buffer must go somewhere, too."""
        with contextlib.suppress(OSError):  # a stream without a number
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


class Streams:
    """Both of a program; see `surviving`."""

    def __init__(self, output: Stream, errors: Stream):
        self._output, self._errors = output, errors

    def status(self, status: int) -> int:
        """The exit status of a program that ends with this one: 1 where it printed in vain."""
        self._output.flush()
        self._errors.flush()
        if self._output.lost:
            print(f"the rest of what was printed is lost: {self._output.lost}", file=self._errors)
            return status or 1
        return status


@contextlib.contextmanager
def surviving() -> Iterator[Streams]:
    """In this context, printing does not raise, and files that are opened get numbers above 2."""
    _fill_numbers()
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as stack:
        output, errors = (
            Stream(stack.enter_context(open(os.devnull, "r+")) if stream is None else stream) for stream in before
        )
        sys.stdout, sys.stderr = output, errors  # type: ignore[assignment]
        try:
            yield Streams(output, errors)
        finally:
            output.flush()
            errors.flush()
            sys.stdout, sys.stderr = before


def one_line(error: Any) -> str:
    """A message on one line, though a path in it may have any character."""
    line = " ".join(part.strip() for part in str(error).splitlines())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _fill_numbers() -> None:
    """Or a checkpoint that is opened would be what a library prints to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
