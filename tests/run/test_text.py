"""The text of a run: what is read and held out, tokens and back, and which batch is whose."""

import errno
import json
import os
import threading

import numpy as np
import pytest

from jax_fp8.run import text


def test_documents_are_held_out_and_files_that_are_not_text_left_out(tmp_path, capsys):
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


def test_a_file_that_cannot_be_read_is_one_sentence(book, monkeypatch):
    def denied(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", denied)  # root may read everything
    with pytest.raises(ValueError, match=r"files that can be read, got Permission denied for .*book.txt; name other"):
        text.read_corpus([book])


def test_a_folder_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch):
    """And is not left out, with all text below it."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open/a.txt").write_text("a text")
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/b.txt").write_text("another")
    files = text.user_files(tmp_path)
    assert [file.name for file in files] == ["b.txt", "a.txt"]
    scandir = os.scandir

    def denied(path):
        if os.fspath(path).endswith("closed"):  # root may read everything
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ValueError, match=r"folders that can be read, got Permission denied for .*closed; name other"):
        text.user_files(tmp_path)


def test_what_is_left_out_of_a_folder_is_named(tmp_path, capsys):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c.txt").write_text("elsewhere")
    (data / "sub/a.txt").write_text("a text")
    (data / "link.txt").symlink_to(data / "sub/a.txt")
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "broken").symlink_to(tmp_path / "nothing")
    (data / ".git").mkdir()
    (data / ".git/c.txt").write_text("hidden")
    os.mkfifo(data / "pipe")
    assert [file.name for file in text.user_files(data)] == ["link.txt", "a.txt"]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"left out {data / 'broken'}: it is not a regular file",
        f"left out {data / 'linked'}: it is a link to a folder; name that folder to read it",
        f"left out {data / 'pipe'}: it is not a regular file",
    ]
    with pytest.raises(ValueError, match=r"--data must name a file or a folder, but .* is something else; name a text"):
        text.user_files(data / "pipe")
    with pytest.raises(ValueError, match=r"--data must name a file or a folder, but .* does not exist"):
        text.user_files(tmp_path / ("n" * 5000))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_text_they_came_from(tokenizer, book, tmp_path):
    content = book.read_bytes()
    encoder = text.ByteEncoder() if tokenizer == "bytes" else text.PairEncoder.trained_on(content, 300, tmp_path)
    ids = encoder.encode(content)
    assert encoder.decode(ids) == content.decode()
    assert ids.max() < encoder.vocab_size
    assert len(encoder.encode(b"")) == 0


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000)
    batch = text.training_batch(tokens, 3, 0, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert (np.diff(batch) == 1).all()
    assert (batch == text.training_batch(tokens, 3, 0, 4, 16)).all()
    assert (batch != text.training_batch(tokens, 4, 0, 4, 16)).any()
    assert (batch != text.training_batch(tokens, 3, 1, 4, 16)).any()
    everything = np.concatenate(text.validation_batches(tokens, 2, 4, 16))
    assert everything.shape == (8, 17) and everything.min() == 0 and everything.max() == 999
    assert (text.training_batch(np.arange(17), 1, 0, 2, 16) == np.arange(17)).all()  # the last token is within reach


DAMAGED = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "binary": lambda text: b"\xff\xfe" + text,
    "no JSON": lambda text: b"a tokenizer",
    "an empty object": lambda text: b"{}",
    "a list": lambda text: b"[]",
    "another kind of model": lambda text: text.replace(b'"BPE"', b'"ABC"'),
    "a vocabulary of texts": lambda text: text.replace(b'"!":0', b'"!":"0"'),
    "a name twice": lambda text: text.replace(b'"!":0', b'"!":0,"!":1'),
    "a number beyond the vocabulary": lambda text: text.replace(b'"!":0', b'"!":70000'),
    "no merges": lambda text: text.replace(b'"merges"', b'"merged"'),
}


@pytest.mark.parametrize("damage", [*DAMAGED, "a pipe", "a folder"])
def test_a_damaged_tokenizer_is_one_sentence(damage, book, tmp_path):
    pairs, content = text.PairEncoder, book.read_bytes()
    pairs.trained_on(content, 300, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    whole = json.dumps(json.loads(path.read_text()), separators=(",", ":")).encode()
    path.write_bytes(whole)
    assert pairs.trained_on(content, 300, tmp_path / "cache").vocab_size <= 300
    path.unlink()
    if damage in DAMAGED:
        assert DAMAGED[damage](whole) != whole
        path.write_bytes(DAMAGED[damage](whole))
    else:
        (os.mkfifo if damage == "a pipe" else os.mkdir)(path)
    with pytest.raises(ValueError, match=f"{path} must (be a tokenizer|have at most 300 tokens).*, got ") as raised:
        pairs.trained_on(content, 300, tmp_path / "cache")
    assert str(raised.value).endswith("; remove it, and the run learns it again") and "\n" not in str(raised.value)


def test_a_tokenizer_that_cuts_texts_does_not_cut_here(book, tmp_path):
    """As files of Hugging Face may say, for a program that reads one sentence at a time."""
    pairs, content = text.PairEncoder, book.read_bytes()
    whole = pairs.trained_on(content, 300, tmp_path)
    whole.tokenizer.enable_truncation(5)
    (tmp_path / "tokenizer.json").write_text(whole.text())
    assert len(whole.encode(content)) <= 5 * -(-len(content) // 65_536)
    assert (
        pairs.load(tmp_path / "tokenizer.json", "").decode(pairs.load(tmp_path / "tokenizer.json", "").encode(content))
        == content.decode()
    )


def test_two_runs_that_learn_one_tokenizer(book, tmp_path):
    """And what lies where one of them used to write is left alone."""
    pairs, content = text.PairEncoder, book.read_bytes()
    encoder = pairs.trained_on(content, 300, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.unlink()
    threads = [threading.Thread(target=pairs.trained_on, args=(content, 300, tmp_path / "cache")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file for file in (tmp_path / "cache").iterdir()] == [path]
    assert pairs.load(path, "").identity == encoder.identity
