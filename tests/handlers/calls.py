"""A call of a handler as a value, its text for the program, and the outcome that the program reports."""

import dataclasses
import math
import pathlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# XLA's numbers for dtypes, and bytes of an element.
PRED, S8, S16, S32, S64, U8, U16, U32, U64 = range(1, 10)
F16, F32, F64, BF16, E5M2, E4M3 = 10, 11, 12, 16, 19, 20
BYTES = {PRED: 1, S8: 1, S16: 2, S32: 4, S64: 8, U8: 1, U16: 2, U32: 4, U64: 8}
BYTES |= {F16: 2, F32: 4, F64: 8, BF16: 2, E5M2: 1, E4M3: 1}
SCALARS = {np.dtype(bool): PRED, np.dtype(np.int32): S32, np.dtype(np.int64): S64}
SCALARS |= {np.dtype(np.float32): F32, np.dtype(np.float64): F64, np.dtype(np.uint8): U8}

MOST_BYTES = 1 << 26  # of a buffer that is really allocated
TIMEOUT = 240  # seconds for a batch of calls, in case a kernel never ends

# Outcomes, by their first word, that no call may have.
VIOLATIONS = ("crash", "exception", "kernel", "changed")


@dataclass(frozen=True)
class Buffer:
    """An operand or a result.

    Args:
      content: a seed of random bytes, 0 for zeros, -1 for any, or an array.
      offset: bytes after an address divisible by 256.
      alias: the operand whose memory a result shares.
      placed: whether it has an address.
      trusted: whether a kernel may rely on its contents.
    """

    dtype: int
    shape: tuple[int, ...]
    content: int | np.ndarray = 0
    offset: int = 0
    alias: int = -1
    placed: bool = True
    trusted: bool = False

    def words(self) -> str:
        extent = math.prod(self.shape) * BYTES[self.dtype]
        # A buffer whose dims exceed all memory is allocated with the fewest bytes.
        there = extent if 0 <= extent <= MOST_BYTES else 64
        content = f"x{self.content.tobytes().hex()}" if isinstance(self.content, np.ndarray) else str(self.content)
        dims = " ".join(map(str, self.shape))
        return (
            f"{self.dtype} {len(self.shape)} {dims} {there if self.placed else -1} {self.offset} {self.alias} {content}"
        )


Attribute = str | bool | np.generic | np.ndarray | Mapping[str, "Attribute"]


@dataclass(frozen=True)
class Call:
    target: str
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def words(self) -> str:
        parts = [self.target]
        for buffers in (self.operands, self.results):
            parts += [str(len(buffers)), *(buffer.words() for buffer in buffers)]
        return " ".join([*parts, _all_words(self.attributes)]) + "\n"

    def with_buffers(self, operands: Sequence[Buffer], results: Sequence[Buffer]) -> "Call":
        return dataclasses.replace(self, operands=tuple(operands), results=tuple(results))

    def having(self, **attributes: Attribute) -> "Call":
        return dataclasses.replace(self, attributes={**self.attributes, **attributes})


def _all_words(attributes):
    return " ".join(
        [str(len(attributes)), *(f"{name} {_attribute_words(attributes[name])}" for name in sorted(attributes))]
    )


def _attribute_words(value):
    if isinstance(value, Mapping):
        return f"d 0 0 x {_all_words(value)}"
    if isinstance(value, str):
        return f"t 0 0 x{value.encode().hex()}"
    array = np.asarray(value)
    return f"{'v' if array.ndim else 's'} {SCALARS[array.dtype]} {array.size} x{array.tobytes().hex()}"


def run(program: pathlib.Path, calls: Iterable[Call], *, stops: bool = False) -> list[str]:
    """The outcome of each: "ok", "error <stage> <code> <message>", or a violation with its description.

    Args:
      stops: whether to stop at the first call that crashes the program; else a new program continues after it.
    """
    calls, outcomes = list(calls), []
    while len(outcomes) < len(calls):
        words = "".join(call.words() for call in calls[len(outcomes) :])
        options = "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1:allow_user_segv_handler=1"
        done = subprocess.run(
            [program],
            input=words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            env={
                "LD_LIBRARY_PATH": str(program.parent),
                "ASAN_OPTIONS": options,
                "UBSAN_OPTIONS": "print_stacktrace=0",
            },
        )
        outcomes += done.stdout.split("\n")[:-1]
        if len(outcomes) < len(calls):
            outcomes.append(f"crash {_report(done.stderr)}")
            if stops:
                break
    return outcomes


def _report(text):
    """The sentence and the first places in csrc from a sanitizer's report."""
    lines = text.splitlines()
    told = [line for line in lines if "ERROR:" in line or "runtime error:" in line][:1]
    places = [line.strip() for line in lines if "csrc/" in line and line not in told][:2]
    return " | ".join([*told, *places]) or text[-300:].replace("\n", " ")


def message_of(outcome: str) -> str:
    """The text of an error."""
    return outcome.split(" ", 3)[3].replace("\v", "\n")
