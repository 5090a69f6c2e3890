"""Documents → tokens in one file of the folder --cache, mapped into memory. So a run holds neither texts nor tokens.

    documents ─each twentieth─→ "held_out.tokens", "held_out.lengths", with a mask "held_out.learned"
              ─the others─────→ "train.tokens", "train.lengths", with a mask "train.learned"

The name of the file has a fingerprint of all that its content depends on: the files of the text, the tokenizer, the
field. So another run on the same text finds it, and two processes may write it at the same time.
"""

import contextlib
import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from jax_fp8.core.files import Unreadable, reading
from jax_fp8.models.tensor_file import Tensor, map_arrays, write_arrays
from jax_fp8.run.conversations import Document

HELD_OUT_EVERY = 20  # every 20th document is held out for validation; of fewer documents, the last one
FORMAT = b"1"  # of these files; another one would have another fingerprint
TRAIN, HELD_OUT = "train", "held_out"
BLOCK = 2**24  # bytes that are read at once


class Documents(NamedTuple):
    """Tokens of documents, one after the other.

    Args:
      tokens: of all documents.
      lengths: the number of tokens of each.
      learned: which tokens are learned; None: all are.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    learned: np.ndarray | None

    @property
    def starts(self) -> np.ndarray:
        """The number of each document's first token."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths


def fingerprint_of_files(files: Sequence[Path], flag: str) -> str:
    """A fingerprint of the bytes of all files in their order."""
    found = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        try:
            with reading(file) as opened:
                while block := opened.read(BLOCK):
                    content.update(block)
        except (Unreadable, OSError) as error:
            raise ValueError(
                f"{flag} must hold files that can be read, got {error} for {file}; name other files"
            ) from error
        found.update(content.digest())
    return found.hexdigest()


def cached_documents(
    documents: Iterable[Document], made_of: Sequence[str], cache: Path, vocab_size: int, holds_out: bool
) -> Mapping[str, Documents]:
    """The documents to train on and those held out, by TRAIN and HELD_OUT: read from the cache, or else written to it.

    Args:
      documents: are only read if the cache does not have them.
      made_of: what they depend on; names the file.
      holds_out: whether some are held out.
    """
    name = hashlib.sha256("\n".join(made_of).encode() + FORMAT + bytes([holds_out])).hexdigest()[:32]
    path = cache / f"tokens-{name}.safetensors"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            print(f"encoding the text once; later runs read its tokens from {path}")
            _write(path, documents, np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32), holds_out)
    except OSError as error:
        raise ValueError(
            f"--cache must be a folder with room for the tokens of the text, got {error.strerror} for {cache}; choose "
            "another"
        ) from error
    try:
        arrays = map_arrays(path)
    except ValueError as error:
        raise ValueError(f"the tokens of the text must be as they were written: {error}; or remove the file") from None
    names = (TRAIN, HELD_OUT) if holds_out else (TRAIN,)
    found = {part: _documents_in(arrays, part) for part in names}
    if not all(map(_fit_together, found.values())):
        raise ValueError(f"{path} must have the tokens of a text, got other arrays; remove it, and the run writes it")
    return found


def _documents_in(arrays: Mapping[str, np.ndarray], part: str) -> Documents:
    none = np.empty(0, np.uint32)
    tokens, lengths = arrays.get(f"{part}.tokens", none), arrays.get(f"{part}.lengths", none)
    return Documents(tokens, np.asarray(lengths), arrays.get(f"{part}.learned"))


def _fit_together(documents: Documents) -> bool:
    tokens, lengths, learned = documents
    return (
        tokens.ndim == lengths.ndim == 1
        and int(lengths.sum(dtype=np.int64)) == len(tokens)
        and (learned is None or learned.shape == tokens.shape)
    )


def _write(path: Path, documents: Iterable[Document], dtype: np.dtype, holds_out: bool) -> None:
    """Write the tokens document by document to files without a name, and from these the file."""
    with contextlib.ExitStack() as stack:
        parts = {name: _Part(stack, name, dtype, path.parent) for name in (TRAIN, HELD_OUT)}
        for name, document in _divided(documents, holds_out):
            parts[name].add(document)
        write_arrays(path, {name: tensor for part in parts.values() for name, tensor in part.tensors().items()})


def _divided(documents: Iterable[Document], holds_out: bool) -> Iterator[tuple[str, Document]]:
    """Each document with the part that it belongs to."""
    first: list[Document] = []  # until it is known whether there are more
    for number, document in enumerate(documents, 1):
        if not holds_out:
            yield TRAIN, document
        elif number < HELD_OUT_EVERY:
            first.append(document)
        else:
            yield from ((TRAIN, one) for one in first)
            first = []
            yield HELD_OUT if number % HELD_OUT_EVERY == 0 else TRAIN, document
    for one in first[:-1]:
        yield TRAIN, one
    for one in first[-1:]:
        yield HELD_OUT, one


class _Part:
    """The documents to train on, or those held out, while they are written."""

    def __init__(self, stack: contextlib.ExitStack, name: str, dtype: np.dtype, folder: Path):
        self.name, self.dtype, self.lengths = name, dtype, array("I")
        self._tokens, self._learned = (stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2))
        self._has_mask = False

    def add(self, document: Document) -> None:
        self.lengths.append(len(document.tokens))
        self._tokens.write(document.tokens.astype(self.dtype).data)
        if document.learned is not None:
            self._has_mask = True
            self._learned.write(document.learned.view(np.uint8).data)

    def tensors(self) -> dict[str, Tensor]:
        """The arrays to write, by their names in the file."""
        lengths = np.asarray(self.lengths, np.uint32)
        found = {"tokens": _mapped(self._tokens, self.dtype), "lengths": Tensor.from_array(lengths)}
        if self._has_mask:
            found["learned"] = _mapped(self._learned, np.dtype(bool))
        return {f"{self.name}.{kind}": tensor for kind, tensor in found.items()}


def _mapped(file: IO[bytes], dtype: np.dtype) -> Tensor:
    """All of a file as an array that is not read yet."""
    size = file.tell() // dtype.itemsize
    file.flush()
    return Tensor((size,), dtype, lambda: np.memmap(file, dtype, "r") if size else np.empty(0, dtype))
