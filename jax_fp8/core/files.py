"""Reading and writing a user's files. A file is written whole or not at all; its kind and size are checked at reading.

    replacing(path)    a new file of its own name in the same folder ─os.replace→ path
    read_bytes(path)   a regular file of at most so many bytes, or `Unreadable`
    read_json(path)    the same, and one JSON object: each name once, not nested deeply

A file may come from a stranger. A device never ends, a pipe blocks its reader, and a few bytes of JSON may ask for more
memory than there is. So everything is checked before it is read. The caller knows what the file must be and what the
user should do: `Unreadable` says only what arrived, in a few words that fit after "got".
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

JsonObject = dict[str, Any]  # values by name

MOST_BYTES = 2**26  # of a file that is read whole, unless its reader says otherwise
MOST_DEPTH = 64  # of nested lists and objects in JSON
LONGEST_NAME = 255  # bytes, the limit of file systems
SHOWN = 100  # characters of a file's content in a message
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class Unreadable(ValueError):
    """Says in a few words what arrived in place of a file that can be read."""


# ---- out -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A new file for bytes, which takes the place of `path` when the block ends, and is removed when the block raises.

    Readers and other writers see the old file or a whole new one, never a part. A link at `path` is replaced, and its
    target stays as it is. The permissions are those of any new file. OSError where `path` cannot be replaced, such as a
    folder or a device.
    """
    path = Path(path)
    _check_can_be_replaced(path)
    unfinished, descriptor = _create_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write a file whole, or leave the old one; as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike, text: str) -> None:
    """The same of text, in UTF-8."""
    write_bytes(path, text.encode())


def _check_can_be_replaced(path: Path) -> None:
    try:
        mode = path.stat().st_mode  # of the target of a link: a link to a device is a device
    except FileNotFoundError:
        return
    except ValueError:  # a path with a zero byte
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, "Not a regular file", str(path))


def _create_beside(path: Path) -> tuple[Path, int]:
    """A new file in the same folder under a random name, and its open descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    while True:
        unfinished = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")
        with contextlib.suppress(FileExistsError):
            return unfinished, os.open(unfinished, flags, 0o666)  # the umask takes bits away


# ---- in --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | os.PathLike, most: int | None = None) -> Iterator[IO[bytes]]:
    """A regular file, open for reading bytes; `Unreadable` where it is none, or has more than `most` bytes. Links are
    followed.
    """
    with _as_unreadable():
        # O_NONBLOCK: opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        _check_is_regular(os.fstat(descriptor), most)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _check_is_regular(status: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(next((words for is_kind, words in KINDS if is_kind(status.st_mode)), "no regular file"))
    if most is not None and status.st_size > most:
        raise Unreadable(f"{status.st_size:,} bytes, of which at most {most:,} are read")


def read_bytes(path: str | os.PathLike, most: int | None = MOST_BYTES) -> bytes:
    """All bytes of a regular file; `Unreadable` where it is none, or has more than `most`."""
    with reading(path, most) as file, _as_unreadable():
        content = file.read() if most is None else file.read(most + 1)  # files such as those in /proc have a size of 0
    if most is not None and len(content) > most:
        raise Unreadable(f"more than {most:,} bytes")
    return content


def read_text(path: str | os.PathLike, most: int | None = MOST_BYTES) -> str:
    """A regular file as text in UTF-8, with or without a byte order mark; `Unreadable` as for `read_bytes`."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"bytes that are not UTF-8, the first at {error.start:,}") from None


def read_json(
    path: str | os.PathLike, most: int = MOST_BYTES, constant: Callable[[str], object] | None = None
) -> JsonObject:
    """The JSON object in a file; `Unreadable` where there is none. `constant` as in `parse_json`."""
    return parse_json(read_text(path, most), constant)


def parse_json(text: str | bytes, constant: Callable[[str], object] | None = None) -> JsonObject:
    """The JSON object in a text; `Unreadable` where there is none.

    Args:
      constant: gives the value for NaN and Infinity, which Python writes and JSON does not have; None refuses them.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_without_twins, parse_constant=constant or _no_constant)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("JSON that is nested too deeply") from None
    except UnicodeDecodeError:
        raise Unreadable("bytes that are not UTF-8") from None
    except ValueError as error:
        raise Unreadable(f"no JSON ({shortened(str(error))})") from None
    if not isinstance(parsed, dict):
        raise Unreadable(f"{_described(parsed)} in place of a JSON object")
    if _is_deep(parsed):
        raise Unreadable("JSON that is nested too deeply")
    return parsed


def is_plain_name(name: object) -> bool:
    """Whether this can be the name of a file in a folder, and does not lead out of the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        return False
    return len(name.encode(errors="surrogatepass")) <= LONGEST_NAME


def shown(value: object, most: int = SHOWN) -> str:
    """A value from a file, as a message shows it: on one line, in at most so many characters."""
    return shortened(repr(value[:most] if isinstance(value, str | bytes | list) else value), most)


def shortened(text: str, most: int = SHOWN) -> str:
    """A text on one line, cut to at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


@contextlib.contextmanager
def _as_unreadable() -> Iterator[None]:
    """Raise errors of the operating system as `Unreadable`."""
    try:
        yield
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    except ValueError:  # a path with a zero byte
        raise Unreadable("a name that no file can have") from None


def _without_twins(pairs: list[tuple[str, object]]) -> JsonObject:
    values: JsonObject = {}
    for name, value in pairs:
        if name in values:
            raise Unreadable(f"JSON that says {shown(name)} twice")
        values[name] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise Unreadable(f"JSON with {name}, which is no number of JSON")


def _described(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_deep(value: dict | list) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in level if isinstance(child, dict | list)]
        if not level:
            return False
    return True
