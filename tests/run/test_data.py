"""The data of a run, of each kind: what is read, resumed, and read by two processes; what is refused."""

import json
import re

import chats
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jax_fp8.run import batches as batching
from jax_fp8.run import checks, train
from jax_fp8.run.data import read_data
from jax_fp8.run.devices import fingerprint, joined
from jax_fp8.run.settings import defaults, parse
from jax_fp8.run.text import read_corpus

SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 32 --steps 6 --eval-every 3".split()
SMALL += "--sample-tokens 4 --recipe current".split()
TEXTS = [{"text": f"{' '.join(chats.WORDS[number % 7 :])}, {number}", "id": number} for number in range(80)]


@pytest.fixture
def files(tmp_path):
    """The options of each kind of data."""
    chats.write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    for number in range(25):
        (tmp_path / f"text/{number}.txt").write_text(" ".join(chats.WORDS[number % 9 :]) * 3)
    (tmp_path / "shards").mkdir()
    chats.write_lines(tmp_path / "shards/1.jsonl", TEXTS[:30])
    chats.write_lines(tmp_path / "shards/2.jsonl.gz", TEXTS[30:])
    (tmp_path / "shards/README.md").write_text("of shards")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TEXTS), tmp_path / "texts.parquet")
    chats.write_lines(tmp_path / "chat.jsonl", chats.conversations(90))
    (tmp_path / "tokens").mkdir()
    for number in range(3):
        part = np.random.default_rng(number).integers(0, 300, 900).astype("<u2")
        (tmp_path / f"tokens/{number}.bin").write_bytes(part.tobytes())
    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer")]
    lines = ["--data", str(tmp_path / "shards"), "--text-field", "text"]
    return {
        "text": ["--data", str(tmp_path / "text"), *tokenizer],
        "bytes of lines": lines,
        "bpe of lines": [*lines, "--tokenizer", "bpe", "--vocab-size", "300"],
        "packed lines": [*lines, "--pack", *tokenizer],
        "parquet": ["--data", str(tmp_path / "texts.parquet"), "--text-field", "text", *tokenizer],
        "chat": ["--data", str(tmp_path / "chat.jsonl"), "--chat", *tokenizer],
        "tokens": ["--data", str(tmp_path / "tokens"), *tokenizer],
    }  # fmt: skip


KINDS = ["text", "bytes of lines", "bpe of lines", "packed lines", "parquet", "chat", "tokens"]


def read(flags, cache, *more):
    return read_data(parse([*SMALL, *flags, "--cache", str(cache), *more]))


def test_text_is_read_as_before(book, tmp_path):
    """Bits of batches, and the fingerprint by which checkpoints know them."""
    for flags in ([], ["--tokenizer", "bpe", "--vocab-size", "300"]):
        encoder, data, held_out = read(["--data", str(book), *flags], tmp_path)
        corpus = read_corpus([book])
        train_tokens, held_tokens = encoder.encode(corpus.train), encoder.encode(corpus.held_out)
        starts = np.random.default_rng((0, 7)).integers(0, len(train_tokens) - 32, size=4)
        expected = np.stack([train_tokens[start : start + 33] for start in starts])
        np.testing.assert_array_equal(data.training(7), expected)
        assert data.training(7).dtype == np.int32 and held_out.size == len(held_tokens)
        assert joined(data.digest, held_out.digest) == fingerprint(train_tokens.tobytes(), held_tokens.tobytes())


def test_lines_and_parquet_are_the_same_documents(files, tmp_path):
    encoder, lines, held = read(files["parquet"], tmp_path)
    other = ["--data", str(tmp_path / "shards"), *files["parquet"][2:]]
    _, same, same_held = read(other, tmp_path)
    assert (lines.digest, held.digest) == (same.digest, same_held.digest)
    whole = encoder.decode(np.asarray(lines.tokens)).split("<|im_end|>")
    assert TEXTS[0]["text"] in whole[0] and held.size < lines.size / 10
    assert TEXTS[19]["text"] not in encoder.decode(np.asarray(lines.tokens))
    assert TEXTS[19]["text"] in encoder.decode(np.asarray(held.tokens))


def test_byte_pairs_are_learned_from_the_field_and_not_from_what_is_held_out(tmp_path):
    """Records with another word in each field, and one more in those that are held out."""
    words = [{"text": "abcabc " * 9, "other": "xyzxyz " * 9} for _ in range(59)]
    words.insert(19, {"text": "qkqkqk " * 99, "other": ""})
    path = chats.write_lines(tmp_path / "a.jsonl", words)

    def learned(*flags):
        given = ["--data", str(path), "--tokenizer", "bpe", "--vocab-size", "280", *flags]
        return set(
            "".join(token for token in read(given, tmp_path / "cache")[0].tokenizer.get_vocab() if len(token) > 1)
        )

    assert "a" in learned("--text-field", "text") and "q" not in learned("--text-field", "text")
    assert "x" in learned("--text-field", "other") and "a" not in learned("--text-field", "other")
    assert "q" in learned("--text-field", "text", "--validation-data", str(path))  # negative control


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_read_parts_that_together_are_the_batch_of_one(kind, files, tmp_path):
    _, data, held_out = read(files[kind], tmp_path / "one")
    _, other, other_held = read(files[kind], tmp_path / "two")  # which another process would have
    parts = np.arange(2), np.arange(2, 4)
    for step in (1, 50):
        both = [side.training(step, rows) for side, rows in zip((data, other), parts, strict=True)]
        jax.tree.map(
            lambda whole, *two: np.testing.assert_array_equal(whole, np.concatenate(two)), data.training(step), *both
        )
    both = [side.validation(rows) for side, rows in zip((held_out, other_held), parts, strict=True)]
    jax.tree.map(
        lambda whole, *two: np.testing.assert_array_equal(whole, np.concatenate(two, 1)), held_out.validation(), *both
    )


@pytest.mark.parametrize("kind", ["packed lines", "parquet", "chat", "tokens"])
def test_a_run_resumes_exactly(kind, files, tmp_path, monkeypatch):
    options = [*SMALL, *files[kind], "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "runs")]
    options += ["--checkpoint-every", "2"]
    assert train.main([*options, "--name", "whole"]) == 0
    cls = batching.Windows if kind in ("parquet", "tokens") else batching.Packed
    make = cls.training

    def stopping(self, step, *rows):
        if step == 5:
            raise KeyboardInterrupt
        return make(self, step, *rows)

    monkeypatch.setattr(cls, "training", stopping)
    assert train.main([*options, "--name", "mine"]) == 130
    monkeypatch.setattr(cls, "training", make)
    moved = tmp_path / "tokenizer"  # the run keeps a copy
    moved.rename(tmp_path / "elsewhere")
    assert train.main([*options, "--resume", "mine"]) == 0
    rows = [
        [json.loads(line) for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "mine")
    ]
    whole, mine = ([(row["step"], row["loss"], row["val_loss"]) for row in one] for one in rows)
    assert whole == mine and whole[-1][0] == 6 and whole[-1][2] < whole[0][2]
    notes = [
        json.loads((tmp_path / f"runs/{name}/checkpoints/6/notes/metadata").read_text()) for name in ("whole", "mine")
    ]
    assert notes[0]["arrays"] == notes[1]["arrays"] and notes[0]["text"] == notes[1]["text"]
    assert (tmp_path / "runs/mine/tokenizer_config.json").exists()


# ---- refused ---------------------------------------------------------------------------------------------------------


def refused(flags, tmp_path, capsys):
    """The sentence of a run that does not begin."""
    given = [*SMALL, *flags, "--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "runs")]
    assert train.main(given) == 2, flags
    assert not (tmp_path / "runs").exists()
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


def test_what_cannot_be_read_is_one_sentence(files, tmp_path, capsys):
    lines, chat = tmp_path / "shards/1.jsonl", tmp_path / "chat.jsonl"
    few = chats.write_lines(tmp_path / "few.jsonl", TEXTS[:3])
    numbers = chats.write_lines(tmp_path / "numbers.jsonl", [{"text": 1}] * 30)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.txt").write_text("a text")
    chats.write_lines(tmp_path / "mixed/b.jsonl", TEXTS)
    chats.write_tokenizer(tmp_path / "silent", None)
    tokenizer, text, bins = files["chat"][-2:], ["--text-field", "text"], str(tmp_path / "tokens")
    cases = [
        (["--data", lines], "records in .*1.jsonl, with the fields text, id; say --text-field NAME .* or --chat for"),
        (["--data", tmp_path / "mixed"], "records in .*b.jsonl, with the fields text, id; say --text-field NAME"),
        (["--data", tmp_path / "texts.parquet"], "records in .*texts.parquet, with text, id; say --text-field NAME"),
        (["--data", tmp_path / "text", *text], "files of records .* with --text-field or --chat, got .*; leave these"),
        (["--data", lines, "--text-field", "body"], "a field 'body', got the fields text, id in line 1 of"),
        (["--data", lines, "--text-field", "id"], "--text-field id must be a text in every record, got 0 in line 1 of"),
        (["--data", numbers, *text], "--text-field text must be a text in every record, got 1 in line 1 of"),
        (["--data", empty, *text], "at least one batch of 129 tokens to train on, got 0; give more text"),
        (["--data", few, *text, "--pack", "--batch-size", "32"], "at least one batch of 32 sequences of --seq-"),
        (["--data", empty, "--chat", *tokenizer], "at least one batch of 4 sequences of --seq-len 32, got 0"),
        (["--data", lines, "--chat", *tokenizer], "a field 'messages', got the fields text, id in line 1 of"),
        (["--data", chat, "--chat"], "--chat needs a tokenizer with a chat template, got --tokenizer bytes"),
        (["--data", chat, "--chat", "--tokenizer", "bpe"], "a tokenizer with a chat template, got --tokenizer bpe"),
        (["--data", chat, "--chat", "--tokenizer", tmp_path / "silent"], "--chat needs a tokenizer with a chat templ"),
        (["--data", chat, "--chat", *text], "--chat reads conversations from the field messages, got also"),
        (["--data", chat, "--pack"], "--pack keeps the documents of --text-field whole, got none"),
        ([*text], "--chat and --text-field are for files of records, got no --data"),
        (["--data", chat, "--chat", *tokenizer, "--recipe", "delayed", "--fp8-attention", "--seq-len", "128"], "no do"),
        (["--data", chat, "--chat", *tokenizer, "--mesh", "pipe=2", "--num-layers", "2"], "packs documents .* pipe"),
        (["--data", chat, "--chat", *tokenizer, "--remat", "offload:1"], "packs documents .*offload:N"),
        (["--data", chat, "--tokenizer", ""], "--tokenizer must be bytes, bpe, a tokenizer.json .*got none; name one"),
        (["--data", bins, "--tokenizer", "bpe"], r"\(.bin\) needs their tokenizer, got --tokenizer bpe"),
        (["--data", bins, "--validation-data", lines], "--validation-data has records in"),
        (["--data", bins, "--validation-data", tmp_path / "text"], "files of the same kind as --data, got .*txt"),
        (["--data", tmp_path / "text", "--validation-data", bins], "files of the same kind as --data, got .*bin"),
        (["--data", lines, *text, "--validation-data", tmp_path / "text"], "--validation-data must have files"),
        (["--data", chat, "--chat", *tokenizer, "--validation-data", empty], "--validation-data must hold a doc"),
    ]  # fmt: skip
    for flags, words in cases:
        sentence = refused(list(map(str, flags)), tmp_path, capsys)
        assert re.search(words, sentence), (flags, sentence)
        assert sentence.startswith("python -m jax_fp8 train: ") and len(sentence) < 600


def test_tokens_of_another_tokenizer_end_a_run(files, tmp_path, capsys):
    """As soon as one is read; a vocabulary of 256 bytes does not have them."""
    flags = [*SMALL, *files["tokens"][:2], "--output", str(tmp_path / "runs")]
    assert train.main(flags) == 1
    assert "tokens must be below 256, the size of the vocabulary, got" in capsys.readouterr().err.splitlines()[-1]


def test_other_files_of_a_folder_are_named(files, tmp_path, capsys):
    read(files["packed lines"], tmp_path)
    assert f"left out {tmp_path / 'shards/README.md'}: it is no file of records" in capsys.readouterr().out


def test_long_conversations_are_counted(files, tmp_path, capsys):
    read(files["chat"], tmp_path)
    said = capsys.readouterr().out
    assert "encoding the text once; later runs read its tokens from" in said
    assert "conversations, " in said and "longer than --seq-len 32 and lose their end" in said
    _, data, _ = read(files["chat"], tmp_path, "--seq-len", "512")
    assert data.rows.tokens > 5000 and not capsys.readouterr().out  # the cache has the tokens of all lengths
    assert checks.check_size(data, data, defaults("tiny")) is None
