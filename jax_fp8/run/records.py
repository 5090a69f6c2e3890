"""Files of records: .jsonl, plain or compressed by gzip or zstd, and .parquet → each record, and where it is from.

    line 17 of data.jsonl   {"text": "..."} or {"messages": [...]}

Files are read piece by piece, never whole, for they may be larger than the host's memory. They come from strangers:
lines have a largest length, JSON a largest depth, and the field that is asked for must have the right type.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, NamedTuple

from jax_fp8.core.files import JsonObject, Unreadable, parse_json, reading, shortened, shown

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = ".parquet"
RECORDS = (*JSON_LINES, PARQUET)
NEED_PYARROW = (".jsonl.zst", PARQUET)
MOST_LINE = 2**26  # bytes
SHOWN_FIELDS = 8  # of a record, in a message


class Record(NamedTuple):
    """The fields of a record, and where it is from, for messages."""

    fields: JsonObject
    where: str


def is_of_records(file: Path) -> bool:
    return file.name.endswith(RECORDS)


def read_records(file: Path, field: str, flag: str, others: tuple[str, ...] = ()) -> Iterator[Record]:
    """The records of a file, in order. Each must have the field.

    Args:
      field: its name, for parquet one of the columns that are read.
      flag: the option that names the file, for messages.
      others: fields that a record may have, too, and that the caller reads.
    """
    try:
        for number, fields in enumerate(_rows(file, field, others), 1):
            unit = "row" if file.name.endswith(PARQUET) else "line"
            if fields is None:  # an empty line
                continue
            where = f"{unit} {number:,} of {file}"
            if field not in fields:
                raise Unreadable(f"{_named(fields)} in {where}")
            yield Record(fields, where)
    except Unreadable as error:
        raise ValueError(
            f"{flag} must hold records with a field {shown(field)}, got {error}; name the field, or mend the file"
        ) from None


def check_can_be_encoded(text: str) -> None:
    """`Unreadable` where a text has half of a character, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"half of a character, \\u{ord(text[error.start]):x},") from None


def fields_of(file: Path, flag: str) -> str:
    """The names of the fields of the first record, in words, for a message that asks which of them is meant."""
    if file.name.endswith(PARQUET):
        names = _pyarrow(flag).column_names(file)
        return ", ".join(map(str, names[:SHOWN_FIELDS]))
    try:
        first = next((fields for fields in _lines(file, flag) if fields is not None), {})
    except Unreadable as error:
        return f"no record ({error})"
    return _named(first)


def _rows(file: Path, field: str, others: tuple[str, ...]) -> Iterator[JsonObject | None]:
    if file.name.endswith(PARQUET):
        return _pyarrow("--data").read_rows(file, (field, *others))
    return _lines(file, "--data")


def _lines(file: Path, flag: str) -> Iterator[JsonObject | None]:
    """The object in each line; None for an empty line."""
    with reading(file) as raw:
        try:
            for number, line in enumerate(_split(_opened(raw, file, flag)), 1):
                if len(line) > MOST_LINE:
                    raise Unreadable(f"more than {MOST_LINE:,} bytes in line {number:,} of {file}")
                try:
                    yield parse_json(line.removeprefix(b"\xef\xbb\xbf")) if line.strip() else None
                except Unreadable as error:
                    raise Unreadable(f"{error} in line {number:,} of {file}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            raise Unreadable(f"{shortened(str(error))} in {file}") from None


def _opened(raw: IO[bytes], file: Path, flag: str) -> IO[bytes] | gzip.GzipFile:
    if file.name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    return _pyarrow(flag).decompressed(raw) if file.name.endswith(".zst") else raw


def _split(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while line := file.readline(MOST_LINE + 1):
        yield line


def _named(fields: JsonObject) -> str:
    names = ", ".join(shortened(name, 40) for name in list(fields)[:SHOWN_FIELDS])
    return f"{'the fields ' if len(fields) != 1 else 'the field '}{names}" if fields else "no field"


def _pyarrow(flag: str) -> ModuleType:
    """The module that needs pyarrow, which only these files need."""
    try:
        from jax_fp8.run import parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ValueError(
            f'{flag} needs pyarrow to read .parquet and .zst files, got no such package; `pip install "jax_fp8[data]"`'
        ) from None
    return parquet
