"""Tokenizers: bytes, byte pairs that a run learns from its text, and any tokenizer.json of the library `tokenizers`.

text ─encode→ token ids ─decode→ text          one stream: a beginning at most, and no ends
documents ─encode_documents→ ids of each       each with the tokens that separate it from the next
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jax_fp8.core.files import Unreadable, parse_json, read_text, shortened, write_text
from jax_fp8.models.limits import MOST
from jax_fp8.report.run_format import TOKENIZER
from jax_fp8.run.tokenizer_files import Beside, read_beside

CHUNK = 1 << 16  # characters in each text that the tokenizer library gets
SEPARATOR = "\n"  # between documents, where a tokenizer has no token that ends a text


class Encoder(Protocol):
    """A tokenizer: bytes to ids below `vocab_size`, and back. `identity` tells two tokenizers apart."""

    vocab_size: int
    identity: str

    def encode(self, text: bytes) -> np.ndarray: ...  # (tokens,)

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]: ...  # of each, (tokens,)

    def decode(self, ids: np.ndarray) -> str: ...

    def files(self) -> Mapping[str, bytes]: ...  # by name, the files from which it can be made again


class ByteEncoder:
    """One token a byte: there is nothing to learn, and no text that it cannot encode."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]:
        return [self.encode((text + SEPARATOR).encode(errors="replace")) for text in documents]

    def decode(self, ids: np.ndarray) -> str:
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")

    def files(self) -> Mapping[str, bytes]:
        return {}


class LibraryEncoder:
    """A tokenizer of the library `tokenizers`; `beside` has what its other files say."""

    def __init__(self, tokenizer: Tokenizer, beside: Beside | None = None):
        self.tokenizer, self.beside = tokenizer, beside or Beside()
        # Ids may have gaps: a token that was added may have a number far above the others.
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        self.identity = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]

    @classmethod
    def trained_on(cls, text: bytes, vocab_size: int, cache: Path) -> "LibraryEncoder":
        """The byte-level byte-pair encoding of `text`: a frequent sequence of bytes becomes one token, and any text can
        be encoded. It is read from the cache folder if one was trained on the same text before.
        """
        return cls.trained(chunks(text), hashlib.sha256(text).hexdigest()[:16], vocab_size, cache)

    @classmethod
    def trained(cls, texts: Iterable[str], fingerprint: str, vocab_size: int, cache: Path) -> "LibraryEncoder":
        """As `trained_on`, of texts that need not be in memory at once. `fingerprint` tells them from other texts."""
        if vocab_size <= 256:
            raise ValueError(f"--vocab-size must exceed the 256 single bytes, got {vocab_size}")
        path = cache / f"bpe-{vocab_size}-{fingerprint}.json"
        if not os.path.lexists(path):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                _train(texts, vocab_size, path)
            except OSError as error:
                raise ValueError(
                    f"--cache must be a folder that can be written to, got {error.strerror} for {cache}; choose another"
                ) from error
        encoder = cls(_read(path, "remove it, and the run learns it again"))
        if encoder.vocab_size > vocab_size:
            raise ValueError(
                f"{path} must have at most {vocab_size} tokens, numbered from 0, got {encoder.vocab_size}; remove it, "
                "and the run learns it again"
            )
        return encoder

    @classmethod
    def load(cls, path: Path, remedy: str) -> "LibraryEncoder":
        """The encoder of a tokenizer.json, and of the files beside it. Truncation and padding, which some files switch
        on, are switched off.

        Args:
          remedy: what the user can do if a file cannot be used; the end of the ValueError's sentence.
        """
        return cls(_read(path, remedy), read_beside(path.parent, remedy))

    def text(self) -> str:
        """The content of a tokenizer.json, which `load` reads."""
        return self.tokenizer.to_str()

    def files(self) -> Mapping[str, bytes]:
        return {TOKENIZER: self.text().encode(), **self.beside.files}

    @property
    def end(self) -> int | None:
        """The token that ends a text; None where the tokenizer names none."""
        name = self.beside.special.get("eos_token")
        return None if name is None else self.tokenizer.token_to_id(name)

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text; only before the first of them is there a token that begins a text, if there is one."""
        parts = chunks(text)
        encodings = self.tokenizer.encode_batch_fast(parts[:1])
        encodings += self.tokenizer.encode_batch_fast(parts[1:], add_special_tokens=False)
        return np.concatenate([np.asarray(encoding.ids, np.int32) for encoding in encodings] or [np.empty(0, np.int32)])

    def encode_documents(self, documents: Sequence[str]) -> list[np.ndarray]:
        end = self.end
        texts = list(documents) if end is not None else [text + SEPARATOR for text in documents]
        found = [np.asarray(encoding.ids, np.int32) for encoding in self.tokenizer.encode_batch_fast(texts)]
        return [ids if end is None or (len(ids) and ids[-1] == end) else np.append(ids, np.int32(end)) for ids in found]

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode([int(token) for token in ids])


def is_file(tokenizer: str) -> bool:
    """Whether this value of --tokenizer names files, and no tokenizer that a run makes itself."""
    return tokenizer not in ("", "bytes", "bpe")


def load_named(path: Path, flag: str = "--tokenizer") -> LibraryEncoder:
    """The encoder of a tokenizer.json, or of a folder of Hugging Face."""
    file = path / TOKENIZER if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise ValueError(
            f"{flag} must be bytes, bpe, a {TOKENIZER} or a folder that has one, got {shortened(str(path))}; name one "
            "that exists"
        )
    return LibraryEncoder.load(file, "copy it again")


def load_copy(folder: Path, identity: str) -> LibraryEncoder:
    """The encoder of which a run keeps a copy in its folder; it must be the one that the checkpoint notes."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{path} must have the tokenizer of the run, got no such file; resume the run to write it")
    encoder = LibraryEncoder.load(path, "remove it, and resume the run to write it again")
    if encoder.identity != identity:
        raise ValueError(f"{path} must be the tokenizer of the checkpoint, got another one; put back that of the run")
    return encoder


def _read(path: Path, remedy: str) -> Tokenizer:
    try:
        text = read_text(path)
        parse_json(text)
        return _tokenizer_of(text)
    except Unreadable as error:
        raise ValueError(f"{path} must be a tokenizer, got {error}; {remedy}") from None


def _train(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn pairs and write them to a file, whole, so that another run at the same time never reads half a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    write_text(path, tokenizer.to_str())


def _tokenizer_of(text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_batch_fast(["a text"])  # some files load, but cannot encode
    except Exception as error:
        # The library raises Exception itself if the text is not a tokenizer.
        if type(error) is not Exception:
            raise
        raise Unreadable(f"none that the library tokenizers can load ({shortened(str(error))})") from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < MOST["vocab_size"]:
        raise Unreadable(f"tokens with numbers up to {largest:,}")
    return tokenizer


def chunks(text: bytes) -> list[str]:
    characters = text.decode(errors="replace")
    return [characters[start : start + CHUNK] for start in range(0, len(characters), CHUNK)]
