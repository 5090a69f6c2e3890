"""JSON files beside the tensors of Hugging Face, in and out: errors name the file and say what to do."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from jax_fp8.core.files import MOST_BYTES, Unreadable, read_json, write_text


def read_object(path: Path, why: str, most: int = MOST_BYTES) -> dict[str, object]:
    """The object of a file of at most `most` bytes; `why` ends the message where there is no file."""
    if not os.path.exists(path):
        raise ValueError(f"{path} must be there: {why}; copy it too")
    try:
        return read_json(path, most)
    except Unreadable as error:
        raise ValueError(f"{path} must be a file with one JSON object, got {error}; copy it again") from None


def write_object(path: Path, described: Mapping[str, object]) -> None:
    try:
        write_text(path, json.dumps(described, indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"a model must find room in a folder, got {error}; choose another one") from error
