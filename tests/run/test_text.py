"""The files of --data: what is read, held out, and left out."""

import errno
import os

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
