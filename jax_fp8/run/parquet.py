"""Parquet files, and streams that zstd has compressed, through pyarrow: the extra `data`."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pyarrow
from pyarrow import parquet

from jax_fp8.core.files import JsonObject, Unreadable, reading, shortened, shown

ROWS = 256  # that are in memory at once, as Python has them


def column_names(file: Path) -> list[str]:
    with reading(file) as raw:
        return _opened(raw, file).schema_arrow.names


def read_rows(file: Path, fields: tuple[str, ...]) -> Iterator[JsonObject]:
    """The rows of a file, of these columns alone; the first of them must be there."""
    with reading(file) as raw:
        table = _opened(raw, file)
        names = table.schema_arrow.names
        if fields[0] not in names:
            raise Unreadable(f"the columns {shortened(', '.join(names))} in {file}")
        if len(set(names)) < len(names):
            raise Unreadable(f"columns of which two have one name, {shown(sorted(names))}, in {file}")
        try:
            for batch in table.iter_batches(ROWS, columns=[name for name in fields if name in names]):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise Unreadable(f"{shortened(str(error))} in {file}") from None


def decompressed(raw: IO[bytes]) -> IO[bytes]:
    """The bytes that zstd has compressed."""
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))


def _opened(raw: IO[bytes], file: Path) -> parquet.ParquetFile:
    try:
        return parquet.ParquetFile(raw)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise Unreadable(f"{shortened(str(error))} in {file}") from None
