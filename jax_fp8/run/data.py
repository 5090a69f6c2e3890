"""The data of a run: from the files of --data to the tokenizer, and the batches to train and to validate on.

    text files        ─joined, all in memory→ one stream ───────────────────────────┐
    .bin              ─mapped→ one stream ──────────────────────────────────────────┤→ Windows
    .jsonl, .parquet  ─--text-field→ documents ─token cache→ one stream ────────────┘
                                               └─--pack→ rows of whole documents ───┐→ Packed
                      ─--chat→ conversations, learned tokens ─token cache→ rows ────┘

The options decide what the files are, and their names must agree: no file is read as another kind than its own.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_fp8.core.files import Unreadable, shortened, shown
from jax_fp8.run.batches import Batches, Packed, Tokens, Windows
from jax_fp8.run.conversations import MESSAGES, TOOLS, Conversations, Document
from jax_fp8.run.encoders import ByteEncoder, Encoder, LibraryEncoder, is_file, load_named
from jax_fp8.run.packing import Rows, beginnings, pack, whole_texts
from jax_fp8.run.records import JSON_LINES, PARQUET, check_can_be_encoded, fields_of, is_of_records, read_records
from jax_fp8.run.settings import Settings
from jax_fp8.run.text import read_corpus, standard_library, user_files
from jax_fp8.run.token_cache import HELD_OUT, HELD_OUT_EVERY, TRAIN, Documents, cached_documents, fingerprint_of_files
from jax_fp8.run.token_files import SUFFIX, divided, map_tokens

TOGETHER = 256  # documents that the tokenizer gets at once
DATA, VALIDATION = "--data", "--validation-data"


class Data(NamedTuple):
    encoder: Encoder
    train: Batches
    held_out: Batches


def read_data(settings: Settings, encoder: Encoder | None = None) -> Data:
    """The tokenizer and the batches that the settings describe.

    Args:
      encoder: the tokenizer, if it is known already; None for that of the settings.
    """
    files = standard_library() if settings.data is None else user_files(settings.data)
    validation = settings.validation_data
    held_out = None if validation is None else user_files(validation, VALIDATION)
    if encoder is None and is_file(settings.tokenizer):
        encoder = load_named(Path(settings.tokenizer))
    if settings.chat or settings.text_field:
        return _of_records(settings, files, held_out, encoder)
    for flag, some in ((DATA, files), (VALIDATION, held_out or [])):
        _check_is_no_record(flag, some)
    is_of_tokens = _is_of_tokens(files)
    if held_out is not None and _is_of_tokens(held_out) != is_of_tokens:
        raise ValueError(
            f"{VALIDATION} must have files of the same kind as {DATA}, got {shortened(str(held_out[0]))} beside "
            f"{shortened(str(files[0]))}; name others"
        )
    if is_of_tokens:
        return _of_token_files(settings, files, held_out, encoder)
    return _of_text(settings, files, held_out, encoder)


# ---- text ------------------------------------------------------------------------------------------------------------


def _of_text(settings: Settings, files: list[Path], validation: list[Path] | None, encoder: Encoder | None) -> Data:
    corpus = read_corpus(files, None, validation)
    found: Encoder = ByteEncoder() if encoder is None else encoder
    if encoder is None and settings.tokenizer == "bpe":
        found = LibraryEncoder.trained_on(corpus.train, settings.vocab_size, settings.cache)
    return Data(found, *(_windows(settings, found.encode(text)) for text in corpus))


def _windows(settings: Settings, tokens: Tokens, vocab_size: int | None = None) -> Windows:
    return Windows(tokens, settings.seed, settings.batch_size, settings.seq_len, vocab_size)


# ---- files of tokens -------------------------------------------------------------------------------------------------


def _is_of_tokens(files: Sequence[Path]) -> bool:
    """Whether all files have tokens."""
    return bool(files) and all(file.name.endswith(SUFFIX) for file in files)


def _of_token_files(
    settings: Settings, files: list[Path], validation: list[Path] | None, encoder: Encoder | None
) -> Data:
    if encoder is None and settings.tokenizer == "bpe":
        raise ValueError(
            f"--data with files of tokens ({SUFFIX}) needs their tokenizer, got --tokenizer bpe; name its folder"
        )
    found: Encoder = ByteEncoder() if encoder is None else encoder
    tokens = map_tokens(files, settings.token_dtype, DATA)
    if validation is None:
        train, held_out = divided(tokens)
    else:
        train, held_out = tokens, map_tokens(validation, settings.token_dtype, VALIDATION)
    return Data(found, *(_windows(settings, part, found.vocab_size) for part in (train, held_out)))


# ---- records ---------------------------------------------------------------------------------------------------------


def _of_records(settings: Settings, files: list[Path], validation: list[Path] | None, encoder: Encoder | None) -> Data:
    files = _those_of_records(files, DATA)
    fingerprint = fingerprint_of_files(files, DATA)
    found: Encoder = ByteEncoder() if encoder is None else encoder
    if encoder is None and settings.tokenizer == "bpe":
        every = HELD_OUT_EVERY if validation is None else None
        texts = (text for number, text in enumerate(_texts(settings, files, DATA), 1) if not every or number % every)
        made_of = hashlib.sha256(f"{fingerprint} {every} {settings.text_field}".encode()).hexdigest()[:16]
        found = LibraryEncoder.trained(texts, made_of, settings.vocab_size, settings.cache)
    parts = _documents(settings, found, files, DATA, fingerprint, holds_out=validation is None)
    if validation is not None:
        validation = _those_of_records(validation, VALIDATION)
        other = fingerprint_of_files(validation, VALIDATION)
        parts |= {HELD_OUT: _documents(settings, found, validation, VALIDATION, other, holds_out=False)[TRAIN]}
    return Data(found, *(_batches(settings, parts[part]) for part in (TRAIN, HELD_OUT)))


def _those_of_records(files: list[Path], flag: str) -> list[Path]:
    """The files of records. Prints which others it leaves out."""
    found = [file for file in files if is_of_records(file)]
    if not found:
        kinds = ", ".join((*JSON_LINES, PARQUET))
        raise ValueError(
            f"{flag} must have files of records ({kinds}) with --text-field or --chat, got "
            f"{shortened(str(files[0]))}; leave these options out for plain text"
        )
    for file in files:
        if file not in found:
            print(f"left out {file}: it is no file of records")
    return found


def _check_is_no_record(flag: str, files: Sequence[Path]) -> None:
    """Raise where a file of records would be read as text, or be left out as none."""
    of_records = [file for file in files if is_of_records(file)]
    if of_records and (any(file.name.endswith(JSON_LINES) for file in of_records) or len(of_records) == len(files)):
        raise ValueError(
            f"{flag} has records in {of_records[0]}, with {fields_of(of_records[0], flag)}; say --text-field NAME for "
            f"the field that has the text, or --chat for conversations in the field {MESSAGES}"
        )


def _texts(settings: Settings, files: Iterable[Path], flag: str) -> Iterator[str]:
    field = settings.text_field
    for file in files:
        for record in read_records(file, field, flag):
            text = record.fields[field]
            try:
                if not isinstance(text, str):
                    raise Unreadable(shown(text))
                check_can_be_encoded(text)
            except Unreadable as error:
                raise ValueError(
                    f"--text-field {field} must be a text in every record, got {error} in {record.where}; name another "
                    "field, or mend the record"
                ) from None
            yield text


def _documents(
    settings: Settings, encoder: Encoder, files: list[Path], flag: str, fingerprint: str, holds_out: bool
) -> dict[str, Documents]:
    """The documents of files, encoded, or from the cache."""
    made_of = [fingerprint, encoder.identity]
    if settings.chat:
        if not isinstance(encoder, LibraryEncoder):
            raise ValueError(
                "--chat needs a tokenizer with a chat template, got bytes as tokens; name one with --tokenizer"
            )
        where = "the tokenizer" if not is_file(settings.tokenizer) else settings.tokenizer
        conversations = Conversations(encoder, where)
        special = sorted(encoder.beside.special.items())
        made_of += ["chat", str(encoder.beside.template), repr(special)]
        records = chain.from_iterable(read_records(file, MESSAGES, flag, (TOOLS,)) for file in files)
        documents = chain.from_iterable(map(conversations.encode, _together(records)))
    else:
        made_of += ["text", settings.text_field, str(getattr(encoder, "end", None))]
        encoded = map(encoder.encode_documents, _together(_texts(settings, files, flag)))
        documents = (Document(tokens, None) for tokens in chain.from_iterable(encoded))
    return dict(cached_documents(documents, made_of, settings.cache, encoder.vocab_size, holds_out))


def _together(items: Iterable) -> Iterator[list]:
    """Lists of so many items that the tokenizer library uses all cores."""
    iterator = iter(items)
    while some := list(islice(iterator, TOGETHER)):
        yield some


def _batches(settings: Settings, documents: Documents) -> Batches:
    if not (settings.chat or settings.pack):
        return _windows(settings, documents.tokens)
    starts, lengths = documents.starts, documents.lengths.astype(np.int64)
    if documents.learned is None:
        pieces = whole_texts(starts, lengths, settings.seq_len)
    else:
        pieces = beginnings(starts, lengths, documents.learned, settings.seq_len)
        _print_what_is_cut(lengths, len(pieces[0]), settings.seq_len)
    rows: Rows = pack(*pieces, settings.seq_len + 1)
    return Packed(documents.tokens, documents.learned, rows, settings.seed, settings.batch_size, settings.seq_len)


def _print_what_is_cut(lengths: np.ndarray, used: int, seq_len: int) -> None:
    cut, unused = int((lengths > seq_len + 1).sum()), len(lengths) - used
    if cut or unused:
        print(
            f"of {len(lengths):,} conversations, {cut:,} are longer than --seq-len {seq_len} and lose their end, and "
            f"{unused:,} have nothing to learn in it and are left out"
        )
