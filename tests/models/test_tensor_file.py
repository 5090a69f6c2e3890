"""A safetensors file as we write it: the bytes of the library, made one array at a time, and all or nothing."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.models.tensor_file import DTYPES, Tensor, map_arrays, read_metadata, write_arrays

pytestmark = pytest.mark.versions
safetensors_numpy = pytest.importorskip("safetensors.numpy")


def test_the_file_is_the_librarys(tmp_path):
    random, metadata = np.random.default_rng(0), {"format": "pt"}
    arrays = {f"layer.{i}.größe": random.normal(size=(3, i + 1)).astype(np.float32) for i in range(12)}
    arrays |= {"scalar": np.asarray(np.float32(2)), "nothing": np.zeros((0, 4), np.float32), "z": np.ones(3, np.uint8)}
    write_arrays(tmp_path / "ours", {name: Tensor.of(array) for name, array in arrays.items()}, metadata)
    safetensors_numpy.save_file(arrays, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert read_metadata(tmp_path / "ours") == metadata


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_is_mapped_is_what_was_written(dtype, tmp_path):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    write_arrays(tmp_path / "file", {"a": Tensor.of(array.T), "b": Tensor.of(jnp.asarray(array))})
    found = map_arrays(tmp_path / "file")
    assert all(isinstance(each, np.memmap) and each.dtype == array.dtype for each in found.values())
    assert found["a"].tobytes() == array.T.tobytes() and found["b"].tobytes() == array.tobytes()
    assert read_metadata(tmp_path / "file") == {}


def test_arrays_are_made_one_at_a_time_and_cast(tmp_path):
    log = []

    def make(name):
        log.append(f"make {name}")
        return np.full((2, 3), 1.5, np.float32)

    tensors = {name: Tensor((2, 3), jnp.bfloat16, lambda name=name: make(name)) for name in "ab"}
    write_arrays(tmp_path / "file", tensors, report=lambda written: log.append(f"wrote {written}"))
    assert log == ["make a", "wrote 12", "make b", "wrote 12"]
    assert map_arrays(tmp_path / "file")["b"].dtype == jnp.bfloat16


def test_a_file_that_is_mapped_can_be_replaced_by_what_is_in_it(tmp_path):
    write_arrays(tmp_path / "file", {"a": Tensor.of(np.arange(8.0, dtype=np.float32))})
    mapped = map_arrays(tmp_path / "file")["a"]
    write_arrays(tmp_path / "file", {"a": Tensor.of(mapped[::-1])})
    np.testing.assert_array_equal(map_arrays(tmp_path / "file")["a"], np.arange(8.0)[::-1])
    np.testing.assert_array_equal(mapped, np.arange(8.0))


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path):
    write_arrays(tmp_path / "file", {"a": Tensor.of(np.ones(2, np.float32))})

    def fail():
        raise OSError("no space left")

    with pytest.raises(ValueError, match=r"params must find room in .*file, got no space left; choose another folder"):
        write_arrays(tmp_path / "file", {"a": Tensor((2,), np.float32, fail)})
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    np.testing.assert_array_equal(map_arrays(tmp_path / "file")["a"], [1, 1])


def test_the_library_may_be_missing(tmp_path, monkeypatch):
    """Only who reads needs it."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    write_arrays(tmp_path / "file", {"a": Tensor.of(np.ones(2, np.float32))})
    with pytest.raises(ValueError, match="which is not installed; pip install safetensors"):
        map_arrays(tmp_path / "file")
