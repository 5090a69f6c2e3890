"""Files of records: which records they have, and what is refused in one sentence."""

import gzip
import json
import sys

import chats
import pyarrow
import pytest

from jax_fp8.run import records

RECORDS = [{"text": f"a text, number {number} — naïve"} for number in range(700)]


def texts(path, field="text"):
    return [record.fields[field] for record in records.read_records(path, field, "--data")]


@pytest.mark.parametrize("kind", records.JSON_LINES)
def test_lines_are_records(kind, tmp_path):
    path = chats.write_lines(tmp_path / f"a{kind}", RECORDS)
    if kind.endswith(".zst"):
        path.write_bytes(pyarrow.compress(path.read_bytes(), codec="zstd", asbytes=True))
    assert texts(path) == [record["text"] for record in RECORDS]
    assert records.is_of_records(path) and not records.is_of_records(tmp_path / "a.txt")
    assert records.fields_of(path, "--data") == "the field text"


def test_empty_lines_are_no_records_and_count(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    found = list(records.read_records(tmp_path / "a.jsonl", "text", "--data"))
    assert [record.where.split(" of ")[0] for record in found] == ["line 1", "line 4"]
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert texts(tmp_path / "empty.jsonl") == []


DAMAGED = {
    "no JSON": (b"a text\n", "no JSON"),
    "a list": (b'["a"]\n', "a list in place of a JSON object"),
    "half a record": (b'{"text": "a', "no JSON"),
    "a missing field": (b'{"a": 1, "b": 2}\n', "the fields a, b"),
    "no field": (b"{}\n", "no field"),
    "a name twice": (b'{"text": "a", "text": "b"}\n', "says 'text' twice"),
    "NaN": (b'{"text": NaN}\n', "NaN"),
    "deep nesting": (b'{"text": ' + b"[" * 300 + b"]" * 300 + b"}\n", "nested too deeply"),
    "very deep nesting": (b'{"text": ' + b"[" * 300_000 + b"]" * 300_000 + b"}\n", "nested too deeply"),
    "not UTF-8": (b'{"text": "\xff"}\n', "UTF-8"),
    "zeros": (bytes(100), "no JSON"),
    "a huge line": (b'{"text": "' + b"a" * 5_000 + b'"}\n', "more than 4,096 bytes in line 2"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_record_is_one_sentence(case, tmp_path, monkeypatch):
    if case == "a huge line":
        monkeypatch.setattr(records, "MOST_LINE", 4096)
    content, words = DAMAGED[case]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + content)
    found = records.read_records(tmp_path / "a.jsonl", "text", "--data")
    assert next(found).fields == {"text": "a"}
    with pytest.raises(ValueError, match=r"--data must hold records with a field 'text', got .*; name the field") as e:
        list(found)
    assert words in str(e.value) and "line 2" in str(e.value)
    assert len(str(e.value)) < 400 and len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("kind", records.JSON_LINES[1:])
def test_a_damaged_stream_is_one_sentence(kind, tmp_path):
    content = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    packed = gzip.compress(content) if kind.endswith("gz") else pyarrow.compress(content, codec="zstd", asbytes=True)
    for damaged in (packed[: len(packed) // 2], b"no stream", packed[:-8] + b"\0" * 8 if kind.endswith("gz") else b"a"):
        (tmp_path / f"a{kind}").write_bytes(damaged)
        with pytest.raises(
            ValueError, match=rf"--data must hold records with a field 'text', got .* in .*a{kind}; name"
        ):
            texts(tmp_path / f"a{kind}")


def test_a_field_may_have_any_name(tmp_path):
    path = chats.write_lines(tmp_path / "a.jsonl", [{"a\nb": "c"}])
    assert texts(path, "a\nb") == ["c"]
    with pytest.raises(ValueError, match="got the field a b in line 1 of") as raised:
        texts(path)
    assert len(str(raised.value).splitlines()) == 1


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "jax_fp8.run.parquet", raising=False)
    monkeypatch.delattr("jax_fp8.run.parquet", raising=False)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ValueError, match=r'needs pyarrow to read .parquet and .zst files, .*`pip install "jax_fp8\[data\]"`'
    ):
        texts(tmp_path / "a.parquet")
