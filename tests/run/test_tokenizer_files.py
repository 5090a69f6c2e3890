"""The files beside a tokenizer.json: what they say, how they are copied, and which are refused."""

import json
import os

import chats
import pytest

from jax_fp8.run import tokenizer_files
from jax_fp8.run.tokenizer_files import check_no_other, copied_files, read_beside, write_tokenizer


def write(folder, **files):
    for name, content in files.items():
        path = folder / {"settings": "tokenizer_config.json", "template": "chat_template.jinja"}.get(name, name)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def test_special_tokens_and_template_wherever_they_are(tmp_path):
    assert read_beside(tmp_path, "").template is None and read_beside(tmp_path, "").special == {}
    write(tmp_path, settings={"eos_token": {"content": "</s>"}, "bos_token": None, "chat_template": "a"})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "older", "unk_token": "?"}')
    found = read_beside(tmp_path, "")
    assert found.special == {"eos_token": "</s>", "unk_token": "?"} and found.template == "a"
    write(
        tmp_path,
        settings={"chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]},
    )
    assert read_beside(tmp_path, "").template == "c"
    write(tmp_path, template="d é".encode())
    assert read_beside(tmp_path, "").template == "d é"


HOSTILE = {
    "no JSON": ({"settings": b"{"}, "tokenizer_config.json must be a JSON object"),
    "a list": ({"settings": []}, "tokenizer_config.json must be a JSON object"),
    "a number as token": ({"settings": {"eos_token": 1}}, "1 as eos_token"),
    "an object as template": ({"settings": {"chat_template": {"a": 1}}}, "as its chat template"),
    "a nameless template": ({"settings": {"chat_template": [{"name": "default", "template": 1}]}}, "1 as its chat"),
    "not UTF-8": ({"template": b"\xff"}, "bytes that are not UTF-8 in chat_template.jinja"),
    "a huge template": ({"template": b"a" * (2**18 + 1)}, "a chat template of 262,145 characters"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_sentence(case, tmp_path):
    files, words = HOSTILE[case]
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=words) as raised:
        read_beside(tmp_path, "copy it again")
    assert str(raised.value).endswith("; copy it again") and len(str(raised.value).splitlines()) == 1


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "merges.txt")
    with pytest.raises(ValueError, match=r"merges.txt must be a file of a tokenizer, got a pipe; copy it again"):
        read_beside(tmp_path, "copy it again")
    with pytest.raises(ValueError, match=r"merges.txt must be a file of a tokenizer, got a pipe"):
        copied_files(tmp_path)


def test_files_are_copied_and_never_those_of_another_model(tmp_path):
    source, target = chats.write_tokenizer(tmp_path / "a"), tmp_path / "b"
    target.mkdir()
    files = copied_files(source)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    check_no_other(target, files)
    assert write_tokenizer(target, files) == ["tokenizer.json", "tokenizer_config.json"]
    assert copied_files(target) == files and write_tokenizer(target, files) == []
    check_no_other(target, files)
    (target / "chat_template.jinja").write_text("another")
    with pytest.raises(ValueError, match=r"without another model's chat_template.jinja, got .*; choose another"):
        check_no_other(target, files)
    with pytest.raises(ValueError, match=r"without another model's tokenizer.json"):
        check_no_other(target, {})


def test_transformers_finds_a_tokenizer_that_has_no_settings(tmp_path):
    written = write_tokenizer(tmp_path, {"tokenizer.json": b"{}"}, is_for_transformers=True)
    assert written == ["tokenizer.json", "tokenizer_config.json"]
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert described == tokenizer_files.OWN_SETTINGS
    (tmp_path / "bytes").mkdir()
    assert write_tokenizer(tmp_path / "bytes", {}, is_for_transformers=True) == []
