"""What went wrong in Orbax, in a few words, and nothing else on the screen.

Of one array that cannot be written or read, Orbax and what it stands on tell at length, and Python tells of all that
was dropped with it. Here one sentence says it.
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
    """Where one array fails, Orbax drops what it was doing with the others, of which Python would tell one by one, also
    when this has ended: threads of its own come back later. So then it stays quiet.
    """
    hook = sys.unraisablehook

    def tell(unraisable):
        error = unraisable.exc_value
        if type(error) is not Exception and "Event loop is closed" not in str(error):
            hook(unraisable)

    sys.unraisablehook = tell
    try:
        yield
    except BaseException:
        gc.collect()
        raise
    sys.unraisablehook = hook


def reason(error: BaseException) -> str:
    """What went wrong, in a few words: Orbax and what it stands on say much more."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "a file that is no longer JSON"
    if type(error) is Exception:
        return "an array that cannot be read"
    text = str(error.args[0] if error.args else error)
    if found := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(found[1]))
    return REASONS.get(text.partition(":")[0], " ".join(text.split())[:150])
