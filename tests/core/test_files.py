"""Files out, whole or not at all whoever else writes; and files in, of which only regular ones of a known size are."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jax_fp8.core import files
from jax_fp8.core.files import Unreadable, is_plain_name, parse_json, read_bytes, read_json, read_text, replacing

pytestmark = pytest.mark.versions

# ---- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [replacing, lambda path: open(path, "wb")], ids=["ours", "in place"])
def test_two_writers_of_one_path_leave_the_file_of_one(opened, tmp_path):
    """What is written in place is a mixture, which shows that the order of writes makes one."""
    path = tmp_path / "file"
    with opened(path) as one:
        with opened(path) as other:
            for file, letter in ((one, b"a"), (other, b"b"), (other, b"b"), (one, b"a")):
                file.write(letter * 1000)
                file.flush()
    assert (path.read_bytes() in (b"a" * 2000, b"b" * 2000)) == (opened is replacing)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import files
for _ in range(200):
    files.write_bytes(sys.argv[2], sys.argv[3].encode() * 100_000)
"""


def test_two_processes_that_write_one_path(tmp_path):
    path = tmp_path / "file"
    command = [sys.executable, "-c", WRITER, str(Path(files.__file__).parent), str(path)]
    writers = [subprocess.Popen([*command, letter]) for letter in "ab"]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            content = path.read_bytes()
            assert content in (b"a" * 100_000, b"b" * 100_000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("link", ["file", "file.part", "file.unfinished"])
def test_a_link_in_the_way_is_not_followed(link, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / link).symlink_to(precious)
    files.write_text(tmp_path / "file", "new")
    assert precious.read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new" and not (tmp_path / "file").is_symlink()
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    files.write_text(tmp_path / "nowhere", "new")
    assert not (tmp_path / "nothing").exists()


def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "ours", "")
        (tmp_path / "any").write_text("")
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ValueError("made badly")], ids=repr)
def test_what_is_not_finished_leaves_the_file_before(error, tmp_path):
    files.write_text(tmp_path / "file", "before")
    with pytest.raises(type(error)), replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise error
    assert (tmp_path / "file").read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_file_before(tmp_path):
    resource = pytest.importorskip("resource")
    files.write_text(tmp_path / "file", "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write_bytes(tmp_path / "file", bytes(10_000))
        files.write_bytes(tmp_path / "small", bytes(100))  # negative control
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "small"]


def test_what_is_no_place_for_a_file(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, sentence in {
        "folder": "Is a directory",
        "device": "Not a regular file",
        "pipe": "Not a regular file",
        "loop": "Too many levels of symbolic links",
        "nowhere/file": "No such file",
        "zero\0": "Invalid argument",
        "n" * 256: "File name too long",
    }.items():
        with pytest.raises(OSError, match=sentence):
            files.write_text(tmp_path / name, "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["device", "folder", "loop", "pipe"]
    files.write_text(tmp_path / ("ü" * 127), "the longest name that there is")


# ---- in --------------------------------------------------------------------------------------------------------------


def test_a_file_and_a_link_to_it_are_read(tmp_path):
    (tmp_path / "file").write_text("\ufeffgrün\n", encoding="utf-8")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "file") == read_text(tmp_path / "link") == "grün\n"
    assert read_bytes(tmp_path / "file", most=9) == "\ufeffgrün\n".encode()
    assert read_bytes("/proc/self/stat")  # a file of the system, which tells no size


def make(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif kind == "folder":
        path.mkdir()
    elif kind == "latin":
        path.write_bytes(b"gr\xfcn")


@pytest.mark.parametrize(
    ("kind", "arrived"),
    [
        ("pipe", "a pipe"),
        ("socket", "No such device"),
        ("device", "a device"),
        ("folder", "a folder"),
        ("nothing", "No such file or directory"),
        ("sparse", "1,099,511,627,776 bytes, of which at most 67,108,864 are read"),
        ("latin", "bytes that are not UTF-8, the first at 2"),
    ],
)
def test_what_is_not_read(kind, arrived, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file", kind)
    with pytest.raises(Unreadable, match=arrived):
        read_text(tmp_path / "file")


def test_a_file_of_the_system_that_does_not_end():
    with pytest.raises(Unreadable, match="more than 4 bytes"):
        read_bytes("/proc/self/stat", most=4)
    with pytest.raises(Unreadable, match="a name that no file can have"):
        read_bytes("zero\0")


@pytest.mark.parametrize(
    ("text", "arrived"),
    [
        ("", r"no JSON \(Expecting value"),
        ('{"a": 1', "no JSON"),
        ('{"a": 1} 2', r"no JSON \(Extra data"),
        ("[]", "a list in place of a JSON object"),
        ("3", "a number in place"),
        ("null", "null in place"),
        ('"a"', "a text in place"),
        ("true", "true or false in place"),
        ('{"a": {"b": 1, "b": 1}}', "JSON that says 'b' twice"),
        ('{"a": NaN}', "JSON with NaN, which is no number of JSON"),
        ('{"a": -Infinity}', "JSON with -Infinity"),
        ('{"a": ' + "[" * 100_000, "JSON that is nested too deeply"),
        ('{"a": ' * 100 + "1" + "}" * 100, "JSON that is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", r"no JSON \(Exceeds the limit"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_json_object(text, arrived, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(Unreadable, match=arrived) as raised:
        read_json(tmp_path / "file")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_json_that_is_read(tmp_path):
    content = {"a": [1, {"b": None}], "c": "grün"}
    for _ in range(60):
        content = {"deeper": content}
    (tmp_path / "file").write_text(json.dumps(content))
    assert read_json(tmp_path / "file") == content
    assert parse_json('{"a": Infinity}', float) == {"a": float("inf")}


def test_names_that_stay_in_their_folder():
    for name in ("model-00001-of-00002.safetensors", "größe", "a b", ".hidden", "a..b"):
        assert is_plain_name(name)
    for name in ("", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0", "a\nb", "n" * 256, 5, None, ["x"], "\ud800"):
        assert not is_plain_name(name)


def test_what_a_file_says_fits_into_a_message():
    assert files.shown("a\nb") == r"'a\nb'"
    for value in ("x" * 10**6, ["x" * 1000] * 1000, {"a": "x" * 1000}, 10**4000):
        assert len(files.shown(value)) <= 100
