"""Files of tokens, `.bin`: the numbers of tokens, two or four bytes each, and nothing else; several are one stream.

They are mapped into memory, so they may be larger than it.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_fp8.core.files import Unreadable, reading
from jax_fp8.run.batches import Joined

SUFFIX = ".bin"
HELD_OUT_PART = 20  # the last twentieth of the tokens is held out


def map_tokens(files: Sequence[Path], dtype: str, flag: str) -> Joined:
    """The tokens of all files, in their order."""
    stored, parts = np.dtype(dtype).newbyteorder("<"), []
    for file in files:
        try:
            with reading(file) as opened:
                size = opened.seek(0, 2)
                if size % stored.itemsize:
                    raise Unreadable(f"{size:,} bytes, no multiple of {stored.itemsize},")
                if size:
                    opened.seek(0)
                    parts.append(np.memmap(opened, stored, "r"))  # type: ignore[call-overload]
        except (Unreadable, OSError) as error:
            raise ValueError(
                f"{flag} must have files of tokens of --token-dtype {dtype}, got {error} for {file}; say the dtype of "
                "the file"
            ) from None
    if not parts:
        raise ValueError(f"{flag} must hold tokens, but {files[0] if len(files) == 1 else 'every file'} is empty")
    return Joined(parts)


def divided(tokens: Joined) -> tuple[Joined, Joined]:
    """The tokens to train on, and the last twentieth, which is held out."""
    kept, parts = len(tokens) - len(tokens) // HELD_OUT_PART, ([], [])
    start = 0
    for part in tokens.parts:
        cut = min(max(kept - start, 0), len(part))
        for side, piece in zip(parts, (part[:cut], part[cut:]), strict=True):
            if len(piece):
                side.append(piece)
        start += len(part)
    train, held_out = parts
    return Joined(train), Joined(held_out or [tokens.parts[0][:0]])
