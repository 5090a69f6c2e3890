"""Files of a user in and out: whole or not at all when they are written, of a known kind and size when they are read.

    replacing(path)    a new file of its own name in the same folder ─os.replace→ path
    read_bytes(path)   a regular file of at most so many bytes, or `Unreadable`
    read_json(path)    the same, and one JSON object: each name once, not nested deeply

A file may come from a stranger. A device has no end, a pipe has no beginning, and a few bytes of JSON may ask for more
memory than there is. So everything is checked before it is read. Whoever asks for a file knows what it must be and what
to do: `Unreadable` says only what arrived, in a few words that fit after "got".
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 2**26  # of a file that is read whole, unless its reader says otherwise
MOST_DEPTH = 64  # of lists and objects of JSON in one another
LONGEST_NAME = 255  # bytes, as file systems have it
SHOWN = 100  # characters of what a file says, in a message
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class Unreadable(ValueError):
    """What arrived in place of a file that can be read, in a few words."""


# ---- out -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A new file for bytes, which takes the place of `path` when the block ends well, and is removed when it does not.

    Readers and other writers see the old file or one of the new ones, never a part. A link at `path` is replaced, and
    what it leads to stays as it is. The permissions are those of any new file. OSError where this cannot be done, as
    where `path` is a folder or a device.
    """
    path = Path(path)
    _check_can_be_replaced(path)
    unfinished, number = _create_beside(path)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write a file whole, or leave what is there; as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike, text: str) -> None:
    """The same of text, in UTF-8."""
    write_bytes(path, text.encode())


def _check_can_be_replaced(path: Path) -> None:
    try:
        mode = path.stat().st_mode  # of what a link leads to: one to a device is a device
    except FileNotFoundError:
        return
    except ValueError:  # a path with a zero in it
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, "Not a regular file", str(path))


def _create_beside(path: Path) -> tuple[Path, int]:
    """A file in the same folder whose name nobody knows, and its open descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    while True:
        unfinished = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
        with contextlib.suppress(FileExistsError):
            return unfinished, os.open(unfinished, flags, 0o666)  # less what the umask takes away


# ---- in --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | os.PathLike, most: int | None = None) -> Iterator[IO[bytes]]:
    """A regular file, open for reading bytes; `Unreadable` where it is none, or has more than `most` bytes. Links are
    followed.
    """
    with _in_words():
        # Without waiting for whoever writes to a pipe.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_is_regular(os.fstat(number), most)
    except BaseException:
        os.close(number)
        raise
    with os.fdopen(number, "rb") as file:
        yield file


def _check_is_regular(found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(next((words for is_kind, words in KINDS if is_kind(found.st_mode)), "no regular file"))
    if most is not None and found.st_size > most:
        raise Unreadable(f"{found.st_size:,} bytes, of which at most {most:,} are read")


def read_bytes(path: str | os.PathLike, most: int | None = MOST_BYTES) -> bytes:
    """All bytes of a regular file; `Unreadable` where it is none, or has more than `most`."""
    with reading(path, most) as file, _in_words():
        content = file.read() if most is None else file.read(most + 1)  # files of the system tell a size of 0
    if most is not None and len(content) > most:
        raise Unreadable(f"more than {most:,} bytes")
    return content


def read_text(path: str | os.PathLike, most: int | None = MOST_BYTES) -> str:
    """The same as text in UTF-8, with or without a byte order mark."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"bytes that are not UTF-8, the first at {error.start:,}") from None


def read_json(
    path: str | os.PathLike, most: int = MOST_BYTES, constant: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """The JSON object that a file is; `Unreadable` where it is none. `constant` as in `parse_json`."""
    return parse_json(read_text(path, most), constant)


def parse_json(text: str | bytes, constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The JSON object that a text is; `Unreadable` where it is none.

    Args:
      constant: what NaN and Infinity stand for, which Python writes and JSON does not have; None refuses them.
    """
    try:
        found = json.loads(text, object_pairs_hook=_without_twins, parse_constant=constant or _no_constant)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("JSON that is nested too deeply") from None
    except UnicodeDecodeError:
        raise Unreadable("bytes that are not UTF-8") from None
    except ValueError as error:
        raise Unreadable(f"no JSON ({shortened(str(error))})") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{_described(found)} in place of a JSON object")
    if _is_deep(found):
        raise Unreadable("JSON that is nested too deeply")
    return found


def is_plain_name(name: Any) -> bool:
    """Whether this is the name of a file in a folder, and no way out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        return False
    return len(name.encode(errors="surrogatepass")) <= LONGEST_NAME


def shown(value: Any, most: int = SHOWN) -> str:
    """A value that a file has, for a message: on one line, and not longer than a message may be."""
    return shortened(repr(value[:most] if isinstance(value, str | bytes | list) else value), most)


def shortened(text: str, most: int = SHOWN) -> str:
    """On one line, and at most so many characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except ValueError:  # a path with a zero in it
        raise Unreadable("a name that no file can have") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Unreadable(f"JSON that says {shown(name)} twice")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise Unreadable(f"JSON with {name}, which is no number of JSON")


def _described(found: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(found), "a number")


def _is_deep(found: Any) -> bool:
    level = [found]
    for _ in range(MOST_DEPTH):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in level if isinstance(child, dict | list)]
        if not level:
            return False
    return True
