"""Tokenizers of a run: tokens and back, those that are damaged, and those of Hugging Face."""

import json
import os
import threading

import chats
import pytest
import tokenizers

from jax_fp8.run import encoders


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_text_they_came_from(tokenizer, book, tmp_path):
    content = book.read_bytes()
    encoder = (
        encoders.ByteEncoder() if tokenizer == "bytes" else encoders.LibraryEncoder.trained_on(content, 300, tmp_path)
    )
    ids = encoder.encode(content)
    assert encoder.decode(ids) == content.decode()
    assert ids.max() < encoder.vocab_size
    assert len(encoder.encode(b"")) == 0


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
    pairs, content = encoders.LibraryEncoder, book.read_bytes()
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
    pairs, content = encoders.LibraryEncoder, book.read_bytes()
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
    pairs, content = encoders.LibraryEncoder, book.read_bytes()
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


# ---- of Hugging Face -------------------------------------------------------------------------------------------------


def test_documents_end_with_the_token_that_ends_a_text(tmp_path):
    encoder = encoders.load_named(chats.write_tokenizer(tmp_path / "a"))
    end = encoder.tokenizer.token_to_id(chats.END)
    found = encoder.encode_documents(["a model learns", "", f"eight{chats.END}"])
    assert [ids[-1] for ids in found] == [end] * 3 and [list(ids).count(end) for ids in found] == [1] * 3
    assert encoder.decode(found[0][:-1]) == "a model learns"
    (tmp_path / "a/tokenizer_config.json").unlink()
    found = encoders.load_named(tmp_path / "a/tokenizer.json").encode_documents(["a model learns", ""])
    assert [encoder.decode(ids) for ids in found] == ["a model learns\n", "\n"]
    assert [bytes(ids) for ids in encoders.ByteEncoder().encode_documents(["é", ""])] == ["é\n".encode(), b"\n"]


def test_a_text_begins_once(tmp_path, monkeypatch):
    """However many parts the library gets it in, and each document begins by itself."""
    encoder = encoders.load_named(chats.write_tokenizer(tmp_path))
    begin = encoder.tokenizer.token_to_id(chats.EOS)
    encoder.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{chats.EOS} $A", special_tokens=[(chats.EOS, begin)]
    )
    monkeypatch.setattr(encoders, "CHUNK", 10)
    ids = encoder.encode(b"a model learns to predict bytes")
    assert ids[0] == begin and list(ids).count(begin) == 1
    assert [list(ids).count(begin) for ids in encoder.encode_documents(["a", "model"])] == [1, 1]


def test_the_size_of_a_vocabulary_is_beyond_its_last_token(tmp_path):
    folder = chats.write_tokenizer(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"][-1]["id"] = 999
    (folder / "tokenizer.json").write_text(json.dumps(described))
    assert encoders.load_named(folder).vocab_size == 303 or encoders.load_named(folder).vocab_size == 1000
    described["model"]["vocab"]["far"] = 2**24
    (folder / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        ValueError, match=r"must be a tokenizer, got tokens with numbers up to 16,777,216; copy it again"
    ):
        encoders.load_named(folder)


def test_a_tokenizer_that_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / ("n" * 3000)):
        with pytest.raises(
            ValueError, match=r"--tokenizer must be bytes, bpe, a tokenizer.json or a folder that has one"
        ):
            encoders.load_named(path)


def test_a_copy_must_be_the_one_of_the_checkpoint(tmp_path):
    encoder = encoders.load_named(chats.write_tokenizer(tmp_path))
    assert encoders.load_copy(tmp_path, encoder.identity).beside.template == chats.PLAIN
    with pytest.raises(ValueError, match="must be the tokenizer of the checkpoint, got another one"):
        encoders.load_copy(tmp_path, "another")
    assert encoder.files().keys() == {"tokenizer.json", "tokenizer_config.json"}
