"""The example's text: what is read and held out, tokens and back, and which batch is whose."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest


def test_documents_are_held_out_and_files_that_are_not_text_left_out(example, tmp_path, capsys):
    text = example("text")
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".hidden").write_text("secret")
    corpus = text.read_corpus(text.user_files(tmp_path))
    assert corpus.held_out == b"document 19\n\ndocument 39\n"
    assert corpus.train.count(b"document") == 38 and b"secret" not in corpus.train
    assert "picture.png" in capsys.readouterr().out
    first = b"".join(text.read_corpus(text.user_files(tmp_path), max_bytes=100))
    assert len(first.replace(b"\n\n", b"\n")) == 100


def test_a_file_that_cannot_be_read_is_one_sentence(example, book, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ValueError, match=r"files that can be read, got Permission denied for .*book.txt; name other"):
        example("text").read_corpus([book])


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_text_they_came_from(tokenizer, example, book, tmp_path):
    text, content = example("text"), book.read_bytes()
    encoder = text.ByteEncoder() if tokenizer == "bytes" else text.PairEncoder.trained_on(content, 300, tmp_path)
    ids = encoder.encode(content)
    assert encoder.decode(ids) == content.decode()
    assert ids.max() < encoder.vocab_size
    assert len(encoder.encode(b"")) == 0


def test_batches_are_a_function_of_seed_and_step(example):
    text, tokens = example("text"), np.arange(1000)
    batch = text.training_batch(tokens, 3, 0, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert (np.diff(batch) == 1).all()
    assert (batch == text.training_batch(tokens, 3, 0, 4, 16)).all()
    assert (batch != text.training_batch(tokens, 4, 0, 4, 16)).any()
    assert (batch != text.training_batch(tokens, 3, 1, 4, 16)).any()
    everything = np.concatenate(text.validation_batches(tokens, 2, 4, 16))
    assert everything.shape == (8, 17) and everything.min() == 0 and everything.max() == 999
    assert (text.training_batch(np.arange(17), 1, 0, 2, 16) == np.arange(17)).all()  # the last token is within reach
