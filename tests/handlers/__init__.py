"""The handlers of csrc on a CPU, called as XLA calls them, under AddressSanitizer and UBSan.

`build` compiles a program from the handlers, the kernels as tests/emulation runs them, and a fake cuBLASLt. `run`
passes calls to it and returns the outcome of each. `contracts` has valid calls of every handler, and `mutations` makes
invalid calls from them. A handler must refuse an invalid call in one sentence, or the call must do nothing that a
sanitizer finds. A buffer's memory ends where its dims say.
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
