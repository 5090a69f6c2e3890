"""The handlers of csrc on a CPU, called as XLA calls them, under AddressSanitizer and UBSan.

`build` makes a program of handlers, of kernels as tests/emulation has them, and of a cuBLASLt that is made up; `run`
hands it calls and says what came of each. `contracts` has calls that every handler must take, `mutations` makes wrong
ones of them. A wrong call is refused by one sentence, or does nothing that a sanitizer finds: a buffer's memory ends
where its dims say.
"""

from handlers.build import build, has_sanitizers, operation_of, targets
from handlers.calls import VIOLATIONS, Buffer, Call, message_of, run
from handlers.contracts import contracts
from handlers.mutations import has_memory, mutations

__all__ = [
    "VIOLATIONS",
    "Buffer",
    "Call",
    "build",
    "contracts",
    "has_memory",
    "has_sanitizers",
    "message_of",
    "mutations",
    "operation_of",
    "run",
    "targets",
]
