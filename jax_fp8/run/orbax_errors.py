"""The reason of an error in Orbax, in a few words, and no other output.

When one array cannot be written or read, Orbax and TensorStore log long messages, and Python warns of every coroutine
that was dropped with it. This module silences them; `reason` has the few words that the run's own message needs.
"""

import contextlib
import gc
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

REASONS = {
    "RESOURCE_EXHAUSTED": "No space left on device",
    "NOT_FOUND": "a file is missing",
    "DATA_LOSS": "a file is damaged",
    "OUT_OF_RANGE": "a file is cut short",
}

for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress Python's warnings about coroutines that Orbax drops when one array fails.

    After an error they stay suppressed, because Orbax's own threads drop coroutines later as well. If the block ends
    well, Python's hook is restored.
    """
    hook = sys.unraisablehook

    def warn(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        if type(error) is not Exception and "Event loop is closed" not in str(error):
            hook(unraisable)

    sys.unraisablehook = warn
    try:
        yield
    except BaseException:
        gc.collect()
        raise
    sys.unraisablehook = hook


def reason(error: BaseException) -> str:
    """Why it failed, in a few words that fit after "got"; the text of Orbax's own errors is much longer."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "a file that is no longer JSON"
    if type(error) is Exception:
        return "an array that cannot be read"
    text = str(error.args[0] if error.args else error)
    if match := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(match[1]))
    return REASONS.get(text.partition(":")[0], " ".join(text.split())[:150])
