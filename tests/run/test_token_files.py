"""Files of tokens: one stream over several files, what is held out, and what is refused."""

import numpy as np
import pytest

from jax_fp8.run import batches
from jax_fp8.run.token_files import divided, map_tokens


def write(folder, *parts, dtype="<u2"):
    paths = [folder / f"{number}.bin" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(np.asarray(part, dtype).tobytes())
    return paths


@pytest.mark.parametrize(("name", "dtype"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_files_are_one_stream(name, dtype, tmp_path):
    whole = np.random.default_rng(0).integers(0, 60_000, 1000)
    files = write(tmp_path, whole[:100], [], whole[100:101], whole[101:], dtype=dtype)
    tokens = map_tokens(files, name, "--data")
    assert len(tokens) == 1000
    for step in range(1, 30):
        batch = batches.training_batch(tokens, step, 0, 8, 200)
        np.testing.assert_array_equal(batch, batches.training_batch(whole, step, 0, 8, 200))
    train, held_out = divided(tokens)
    assert (len(train), len(held_out)) == (950, 50)
    np.testing.assert_array_equal(train[np.arange(950)], whole[:950])
    np.testing.assert_array_equal(held_out[np.arange(50)], whole[950:])
    train, held_out = divided(map_tokens(write(tmp_path, whole[:970], whole[970:]), "uint16", "--data"))
    np.testing.assert_array_equal(held_out[np.arange(50)], whole[950:])


def test_what_is_no_file_of_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(7))
    with pytest.raises(ValueError, match=r"--token-dtype uint16, got 7 bytes, no multiple of 2, for .*a.bin; say the"):
        map_tokens([tmp_path / "a.bin"], "uint16", "--data")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"--data must hold tokens, but .*a.bin is empty"):
        map_tokens([tmp_path / "a.bin"], "uint16", "--data")
    with pytest.raises(ValueError, match="got a folder for"):
        map_tokens([tmp_path], "uint16", "--data")
    assert len(divided(map_tokens(write(tmp_path, [1, 2]), "uint16", "--data"))[1]) == 0


def test_a_token_beyond_the_vocabulary_ends_a_run(tmp_path):
    tokens = map_tokens(write(tmp_path, np.arange(300)), "uint16", "--data")
    assert batches.Windows(tokens, 0, 4, 64, 300).training(1).max() < 300
    with pytest.raises(batches.BadTokens, match=r"tokens must be below 200, the size of the vocabulary, got 2.*; name"):
        batches.Windows(tokens, 0, 64, 64, 200).training(1)
