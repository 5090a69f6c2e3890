"""Standard output and error that never stop a program, also when they are closed, full, or missing from the start.

    python -m jax_fp8 train | head -1        the reader leaves after one line; the run continues and saves
    python -m jax_fp8 train >&- 2>&-         there are no streams; files of the run do not get descriptors 0 to 2
    python -m jax_fp8 plan ... > /dev/full   one message says that output is lost, and the exit status is 1

Characters that a stream cannot encode are written as escapes.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


class Stream:
    """Standard output or error that discards text after a failed write. `lost` is the reason, or "" where the reader
    has closed a pipe: with `| head` that is no error.
    """

    def __init__(self, stream: TextIO):
        self._stream, self.lost = stream, ""
        if getattr(stream, "errors", "") == "strict" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
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
        """Point the descriptor at the null device. Text that is still in a buffer goes there too, without an error."""
        with contextlib.suppress(OSError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


class Streams:
    """Both streams of a program; see `surviving`."""

    def __init__(self, output: Stream, errors: Stream):
        self._output, self._errors = output, errors

    def status(self, status: int) -> int:
        """The exit status of a program that would end with `status`: 1 instead of 0 where output was lost."""
        self._output.flush()
        self._errors.flush()
        if self._output.lost:
            print(f"the rest of what was printed is lost: {self._output.lost}", file=self._errors)
            return status or 1
        return status


@contextlib.contextmanager
def surviving() -> Iterator[Streams]:
    """In this context printing never raises, and files that are opened get descriptors above 2."""
    _fill_descriptors()
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


def one_line(error: object) -> str:
    """A message on one line. Paths in it may have any characters; those that cannot be printed become escapes."""
    line = " ".join(part.strip() for part in str(error).splitlines())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)


def _fill_descriptors() -> None:
    """Open the null device where descriptors 0 to 2 are free. Otherwise a checkpoint would get one of them, and
    libraries that print would write into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system takes the lowest free descriptor
