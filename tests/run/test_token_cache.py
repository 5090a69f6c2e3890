"""The cache of tokens: which documents are held out, who finds it again, and what is refused."""

import errno
import os

import numpy as np
import pytest

from jax_fp8.run import token_cache
from jax_fp8.run.conversations import Document
from jax_fp8.run.token_cache import HELD_OUT, TRAIN, cached_documents, fingerprint_of_files


def documents(count, has_mask=False):
    for number in range(count):
        tokens = np.full(number % 5 + 1, number, np.int32)
        yield Document(tokens, tokens % 2 == 0 if has_mask else None)


def numbers(found):
    return [int(found.tokens[start]) for start in found.starts]


@pytest.mark.parametrize(("count", "held_out"), [(1, [0]), (2, [1]), (19, [18]), (20, [19]), (45, [19, 39]), (0, [])])
def test_each_twentieth_document_is_held_out(count, held_out, tmp_path):
    found = cached_documents(documents(count), ["a"], tmp_path, 300, holds_out=True)
    assert numbers(found[HELD_OUT]) == held_out
    assert numbers(found[TRAIN]) == [number for number in range(count) if number not in held_out]
    assert numbers(cached_documents(documents(count), ["a"], tmp_path, 300, holds_out=False)[TRAIN]) == [*range(count)]


def test_the_cache_is_found_again_and_only_by_who_would_write_the_same(tmp_path):
    def gone():
        raise AssertionError("documents were read again")
        yield

    first = cached_documents(documents(30, True), ["a", "b"], tmp_path, 300, True)
    again = cached_documents(gone(), ["a", "b"], tmp_path, 300, True)
    for part in (TRAIN, HELD_OUT):
        for mine, theirs in zip(first[part], again[part], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(again[TRAIN].learned, again[TRAIN].tokens % 2 == 0)
    assert again[TRAIN].tokens.dtype == np.uint16
    with pytest.raises(AssertionError):
        cached_documents(gone(), ["a", "c"], tmp_path, 300, True)
    with pytest.raises(AssertionError):
        cached_documents(gone(), ["a", "b"], tmp_path, 300, False)
    assert cached_documents(documents(30), ["d"], tmp_path, 2**17, True)[TRAIN].tokens.dtype == np.uint32
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_and_one_without_room(tmp_path, monkeypatch):
    cached_documents(documents(30), ["a"], tmp_path, 300, True)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"as they were written: {path} must be a whole .*; or remove"):
        cached_documents(documents(30), ["a"], tmp_path, 300, True)
    with pytest.raises(
        ValueError, match="--cache must be a folder with room for the tokens of the text, got File exists"
    ):
        cached_documents(documents(30), ["a"], path, 300, True)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(token_cache.tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"--cache must be .* got No space left on device for .*; choose another"):
        cached_documents(documents(30), ["b"], tmp_path, 300, True)


def test_a_fingerprint_is_of_the_bytes_of_all_files(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"12"), ("d", b"")):
        (tmp_path / name).write_bytes(content)
    found = [fingerprint_of_files([tmp_path / n for n in names], "--data") for names in ("ab", "ba", "c", "cd", "dc")]
    assert len(set(found)) == 5
    with pytest.raises(ValueError, match="--validation-data must hold files that can be read, got No such file"):
        fingerprint_of_files([tmp_path / "e"], "--validation-data")
