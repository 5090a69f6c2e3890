"""Real text for a convergence run: Python sources, tokenized once, and the order in which every run reads them.

files → without duplicates → (train, held out) → token ids on the device → windows of `seq_len + 1`, gathered there

The text functions and the tokenizer are those of `python -m jax_fp8 train`. A comparison needs more, which is here: the
same sample of a large corpus for every run, no document in both parts, and epochs without repeated windows.
"""

import dataclasses
import hashlib
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.run import batches, encoders, text


@dataclasses.dataclass(frozen=True)
class Reading:
    """How much text to read, the tokens, and the batches."""

    vocab_size: int = 32_768
    seq_len: int = 1024
    batch_size: int = 16
    steps: int = 1500
    validation_tokens: int = 524_288
    seed: int = 0
    max_bytes: int = 80_000_000
    tokenizer_bytes: int = 16_000_000

    @property
    def tokens_read(self) -> int:
        return self.steps * self.batch_size * self.seq_len


@dataclasses.dataclass(frozen=True)
class Data:
    """Tokens on the device, and the windows that each step and the validation read."""

    tokens: jax.Array  # int32 (tokens,)
    starts: jax.Array  # int32 (steps, batch)
    validation: list[jax.Array]  # int32 (batch, seq + 1) each
    description: str

    def batch(self, step: int, seq_len: int) -> jax.Array:
        """The windows of one step, gathered on the device. # (batch, seq + 1)"""
        return _gather(self.tokens, self.starts, step, seq_len)


def python_files() -> list[pathlib.Path]:
    """Sources of the interpreter's standard library and installed packages, shuffled by a hash of their names.

    The shuffle depends on the names alone, so any first part of the list is a sample of the whole.
    """
    roots = {pathlib.Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    names = {file: str(file.relative_to(root)) for root in sorted(roots) for file in text.python_sources(root)}
    return sorted(names, key=lambda file: hashlib.sha256(names[file].encode()).digest())


def distinct(files: list[pathlib.Path], max_bytes: int) -> list[pathlib.Path]:
    """Files up to `max_bytes`, each content once: a copy in the held-out part would have been trained on."""
    kept, seen, size = [], set(), 0
    for file in files:
        content = file.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen or not text.is_text(content):
            continue
        seen.add(digest)
        kept.append(file)
        size += len(content)
        if size >= max_bytes:
            break
    return kept


def prepare(reading: Reading, data: pathlib.Path | None, cache: pathlib.Path) -> Data:
    """Collect the text, tokenize it, and fix the order of all batches from the seed."""
    files = distinct(python_files() if data is None else text.user_files(data), reading.max_bytes)
    corpus = text.read_corpus(files, reading.max_bytes)
    encoder = encoders.LibraryEncoder.trained_on(corpus.train[: reading.tokenizer_bytes], reading.vocab_size, cache)
    train, held_out = encoder.encode(corpus.train), encoder.encode(corpus.held_out)
    if len(held_out) < reading.validation_tokens:
        raise ValueError(
            f"the held-out text must have at least {reading.validation_tokens:,} tokens, got {len(held_out):,}; "
            "give more text or raise --max-bytes"
        )
    count = reading.validation_tokens // (reading.batch_size * reading.seq_len)
    validation = batches.validation_batches(held_out, count, reading.batch_size, reading.seq_len)
    return Data(
        tokens=jnp.asarray(train, jnp.int32),
        starts=jnp.asarray(window_order(len(train), reading)),
        validation=[jnp.asarray(batch) for batch in validation],
        description="; ".join(
            [
                f"{len(files):,} files, {(len(corpus.train) + len(corpus.held_out)) / 1e6:,.1f} MB",
                f"vocabulary {encoder.vocab_size:,}, {len(corpus.train) / len(train):.2f} bytes a token",
                f"{reading.tokens_read / len(train):.2f} epochs of {len(train):,} training tokens",
                f"validation on {count * reading.batch_size * reading.seq_len:,} of {len(held_out):,} held-out tokens",
            ]
        ),
    )


def window_order(num_tokens: int, reading: Reading) -> np.ndarray:
    """Starts of every step's windows: an epoch is a permutation of windows that do not overlap. # (steps, batch)"""
    windows = (num_tokens - 1) // reading.seq_len
    if windows < reading.batch_size:
        raise ValueError(
            f"the training text must fill a batch of {reading.batch_size} x {reading.seq_len} tokens, "
            f"got {num_tokens:,} tokens; give more text"
        )
    generator = np.random.default_rng(reading.seed)
    wanted = reading.steps * reading.batch_size
    epochs = [generator.permutation(windows) for _ in range(-(-wanted // windows))]
    order = np.concatenate(epochs)[:wanted].reshape(reading.steps, reading.batch_size)
    return (order * reading.seq_len).astype(np.int32)


@jax.jit(static_argnames="seq_len")
def _gather(tokens, starts, step, seq_len):
    return tokens[starts[step][:, None] + jnp.arange(seq_len + 1)]
