"""The files of --data, and their text: files → documents → (train, held out). The same files give the same text."""

import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from jax_fp8.core.files import Unreadable, read_bytes

HELD_OUT_EVERY = 20  # every 20th file is held out for validation; of fewer files, the last 20th of their text


class Corpus(NamedTuple):
    """Text to train on, and text that is held out for validation."""

    train: bytes
    held_out: bytes


def standard_library() -> list[Path]:
    """Python sources of the running interpreter's standard library, without its tests."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return python_sources(Path(sysconfig.get_path("stdlib")), excluded)


def python_sources(root: Path, excluded: Collection[str] = ()) -> list[Path]:
    """Every `.py` file below `root`, in a fixed order, without those in a folder that has an excluded name."""
    return [path for path in sorted(root.rglob("*.py")) if not set(excluded).intersection(path.relative_to(root).parts)]


def user_files(path: Path, flag: str = "--data") -> list[Path]:
    """The file at `path`, or the files below it in a fixed order (hidden ones left out)."""
    if not os.path.exists(path):
        raise ValueError(f"{flag} must name a file or a folder, but {path} does not exist")
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise ValueError(f"{flag} must name a file or a folder, but {path} is something else; name a text file")
    files = sorted(files_below(path, flag))
    if not files:
        raise ValueError(f"{flag} must hold text, but the folder {path} has no files; name a folder with text files")
    return files


def files_below(root: Path, flag: str) -> Iterator[Path]:
    """Regular files below a folder, without hidden ones. Prints which others it leaves out. A folder that cannot be
    listed is a ValueError, or else a part of the text would be missing silently.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"{flag} must hold folders that can be read, got {error.strerror} for {error.filename}; name other files, "
            "or change its permissions"
        ) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            print(f"left out {Path(folder, name)}: it is a link to a folder; name that folder to read it")
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if os.path.isfile(file):
                yield file
            else:
                print(f"left out {file}: it is not a regular file")


def read_corpus(files: list[Path], max_bytes: int | None = None, validation: list[Path] | None = None) -> Corpus:
    """Read files in order, up to `max_bytes` in all. The text of the files `validation` is held out.

    Without `validation`, every 20th file is held out, so that both parts are alike. If there are fewer than 20 files,
    the last 20th of their text is.
    """
    documents = read_documents(files, "--data", max_bytes)
    if validation is not None:
        return Corpus(b"\n".join(documents), b"\n".join(read_documents(validation, "--validation-data")))
    if len(documents) >= HELD_OUT_EVERY:
        held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        del documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        return Corpus(b"\n".join(documents), b"\n".join(held_out))
    text = b"\n".join(documents)
    cut = len(text) - len(text) // HELD_OUT_EVERY
    return Corpus(text[:cut], text[cut:])


def read_documents(files: list[Path], flag: str, max_bytes: int | None = None) -> list[bytes]:
    """The content of each file that is UTF-8 text. Prints which files it leaves out (pictures, archives); if that is
    every file, it is a ValueError.
    """
    documents, size, left_out = [], 0, 0
    for file in files:
        try:
            content = read_bytes(file, most=None)
        except Unreadable as error:
            raise ValueError(
                f"{flag} must hold files that can be read, got {error} for {file}; name other files"
            ) from error
        if not is_text(content):
            left_out += 1
            if len(files) > 1:
                print(f"left out {file}: it is not UTF-8 text")
            continue
        documents.append(content)
        size += len(content)
        if max_bytes is not None and size >= max_bytes:
            documents[-1] = content[: len(content) - (size - max_bytes)]
            break
    if left_out == len(files):
        raise ValueError(
            f"{flag} must hold UTF-8 text, but {files[0] if left_out == 1 else 'no file of the folder'} "
            f"{'does not' if left_out == 1 else 'does'}; name a text file, or convert it (iconv --to-code utf-8)"
        )
    if not any(documents):
        raise ValueError(f"{flag} must hold text, but {files[0] if len(files) == 1 else 'every file'} is empty")
    return documents


def is_text(content: bytes) -> bool:
    """Whether this is UTF-8 without zero bytes, which text does not have."""
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
