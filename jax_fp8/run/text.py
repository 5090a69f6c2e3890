"""Text in, batches of tokens out.

files → documents → (train, held out) → token ids → windows of `seq_len + 1` tokens: a model reads the first `seq_len`
of them and predicts the last `seq_len`.

Everything is deterministic: the same files, seed and step give the same batch, whatever the recipe. So the loss curves
of two recipes can be compared.
"""

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, read_text, shortened, write_text

HELD_OUT_EVERY = 20  # every 20th file is held out for validation; of fewer files, the last 20th of their text
CHUNK = 1 << 16  # characters in each text that the tokenizer library gets


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


class Encoder(Protocol):
    """A tokenizer: bytes to ids below `vocab_size`, and back. `identity` tells two tokenizers apart."""

    vocab_size: int
    identity: str

    def encode(self, text: bytes) -> np.ndarray: ...  # (tokens,)

    def decode(self, ids: np.ndarray) -> str: ...


class ByteEncoder:
    """One token a byte: there is nothing to learn, and no text that it cannot encode."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")


class PairEncoder:
    """Byte-level byte-pair encoding: a frequent sequence of bytes becomes one token, and any text can be encoded."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.identity = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]

    @classmethod
    def trained_on(cls, text: bytes, vocab_size: int, cache: Path) -> "PairEncoder":
        """The encoder trained on `text`; read from the cache folder if one was trained on the same text before."""
        if vocab_size <= 256:
            raise ValueError(f"--vocab-size must exceed the 256 single bytes, got {vocab_size}")
        path = cache / f"bpe-{vocab_size}-{hashlib.sha256(text).hexdigest()[:16]}.json"
        if not os.path.lexists(path):
            try:
                cache.mkdir(parents=True, exist_ok=True)
                _train(text, vocab_size, path)
            except OSError as error:
                raise ValueError(
                    f"--cache must be a folder that can be written to, got {error.strerror} for {cache}; choose another"
                ) from error
        encoder = cls.load(path, "remove it, and the run learns it again")
        if encoder.vocab_size > vocab_size or max(encoder.tokenizer.get_vocab().values()) >= encoder.vocab_size:
            raise ValueError(
                f"{path} must have at most {vocab_size} tokens, numbered from 0, got {encoder.vocab_size}; remove it, "
                "and the run learns it again"
            )
        return encoder

    @classmethod
    def load(cls, path: Path, remedy: str) -> "PairEncoder":
        """The encoder of a tokenizer.json. Truncation and padding, which some files switch on, are switched off.

        Args:
          remedy: what the user can do if the file cannot be used; the end of the ValueError's sentence.
        """
        try:
            text = read_text(path)
            parse_json(text)
            return cls(_tokenizer_of(text))
        except Unreadable as error:
            raise ValueError(f"{path} must be a tokenizer, got {error}; {remedy}") from None

    def text(self) -> str:
        """The content of a tokenizer.json, which `load` reads."""
        return self.tokenizer.to_str()

    def encode(self, text: bytes) -> np.ndarray:
        encodings = self.tokenizer.encode_batch_fast(chunks(text))
        return np.concatenate([np.asarray(encoding.ids, np.int32) for encoding in encodings] or [np.empty(0, np.int32)])

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode([int(token) for token in ids])


def _train(text: bytes, vocab_size: int, path: Path) -> None:
    """Learn pairs and write them to a file, whole, so that another run at the same time never reads half a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(chunks(text), trainer)
    write_text(path, tokenizer.to_str())


def _tokenizer_of(text: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_batch_fast(["a text"])  # some files load, but cannot encode
        return tokenizer
    except Exception as error:
        # The library raises Exception itself if the text is not a tokenizer.
        if type(error) is not Exception:
            raise
        raise Unreadable(f"none that the library tokenizers can load ({shortened(str(error))})") from None


def chunks(text: bytes) -> list[str]:
    characters = text.decode(errors="replace")
    return [characters[start : start + CHUNK] for start in range(0, len(characters), CHUNK)]


ALL_ROWS = slice(None)


def training_batch(
    tokens: np.ndarray, step: int, seed: int, batch_size: int, seq_len: int, rows: np.ndarray | slice = ALL_ROWS
) -> np.ndarray:
    """These rows of the batch of one step: windows at random starts, which depend on seed and step alone."""
    generator = np.random.default_rng((seed, step))
    starts = generator.integers(0, len(tokens) - seq_len, size=batch_size)
    return windows(tokens, starts[rows], seq_len)  # (rows, seq + 1)


def validation_batches(
    tokens: np.ndarray, count: int, batch_size: int, seq_len: int, rows: np.ndarray | slice = ALL_ROWS
) -> np.ndarray:
    """These rows of each of `count` batches: windows spread evenly over the held-out tokens, always the same."""
    starts = np.linspace(0, len(tokens) - seq_len - 1, count * batch_size).astype(int)
    return windows(tokens, starts.reshape(count, batch_size)[:, rows], seq_len)  # (count, rows, seq + 1)


def windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """`seq_len + 1` tokens from each start, (*starts, seq + 1)."""
    return tokens[starts[..., None] + np.arange(seq_len + 1)].astype(np.int32)
