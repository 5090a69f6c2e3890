"""A safetensors file as we write it: the bytes of the library, made one array at a time, and all or nothing."""

import json
import os
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
    write_arrays(tmp_path / "ours", {name: Tensor.from_array(array) for name, array in arrays.items()}, metadata)
    safetensors_numpy.save_file(arrays, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert read_metadata(tmp_path / "ours") == metadata


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_is_mapped_is_what_was_written(dtype, tmp_path):
    array = np.arange(12).reshape(3, 4).astype(jnp.dtype(dtype))
    write_arrays(tmp_path / "file", {"a": Tensor.from_array(array.T), "b": Tensor.from_array(jnp.asarray(array))})
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
    write_arrays(tmp_path / "file", {"a": Tensor.from_array(np.arange(8.0, dtype=np.float32))})
    mapped = map_arrays(tmp_path / "file")["a"]
    write_arrays(tmp_path / "file", {"a": Tensor.from_array(mapped[::-1])})
    np.testing.assert_array_equal(map_arrays(tmp_path / "file")["a"], np.arange(8.0)[::-1])
    np.testing.assert_array_equal(mapped, np.arange(8.0))


def test_a_file_that_cannot_be_finished_leaves_the_one_before(tmp_path):
    write_arrays(tmp_path / "file", {"a": Tensor.from_array(np.ones(2, np.float32))})

    def fail():
        raise OSError("no space left")

    with pytest.raises(ValueError, match=r"params must find room in .*file, got no space left; choose another folder"):
        write_arrays(tmp_path / "file", {"a": Tensor((2,), np.float32, fail)})
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    np.testing.assert_array_equal(map_arrays(tmp_path / "file")["a"], [1, 1])


def test_the_library_may_be_missing(tmp_path, monkeypatch):
    """Only who reads needs it."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    write_arrays(tmp_path / "file", {"a": Tensor.from_array(np.ones(2, np.float32))})
    with pytest.raises(ValueError, match="which is not installed; pip install safetensors"):
        map_arrays(tmp_path / "file")


# ---- what is refused -------------------------------------------------------------------------------------------------


def file_of(header, content=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + content


def entry(begin=0, end=4, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = file_of({"a": entry(), "b": entry(4, 8)}, bytes(8))
DAMAGED = {
    "empty": b"",
    "seven bytes": bytes(7),
    "cut in the header": GOOD[:40],
    "cut in an array": GOOD[:-1],
    "one byte more": GOOD + b"\0",
    "a header that is longer than the file": file_of({"a": entry()}, bytes(4), size=10**6),
    "a header of 2**63 bytes": file_of({"a": entry()}, bytes(4), size=2**63),
    "no JSON": file_of(b"\xff\xfe not JSON"),
    "a list": file_of([]),
    "a name twice": file_of(b'{"a": 1, "a": 2}'),
    "nested": file_of(b'{"a": ' + b"[" * 100_000),
    "an entry that is a list": file_of({"a": []}),
    "an entry without a dtype": file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "an unknown dtype": file_of({"a": entry(dtype="Q9")}, bytes(4)),
    "a dtype that is a list": file_of({"a": entry(dtype=["F32"])}, bytes(4)),
    "a shape that is negative": file_of({"a": entry(shape=[-1, -1])}, bytes(4)),
    "a shape of halves": file_of({"a": entry(shape=[1.0])}, bytes(4)),
    "a shape of 2**62": file_of({"a": entry(shape=[2**62, 4])}, bytes(4)),
    "a shape of a hundred dims": file_of({"a": entry(shape=[1] * 100)}, bytes(4)),
    "negative offsets": file_of({"a": entry(-4, 0)}, bytes(4)),
    "offsets beyond the file": file_of({"a": entry(0, 2**40, shape=[2**38])}, bytes(4)),
    "offsets in the wrong order": file_of({"a": entry(4, 0)}, bytes(4)),
    "one offset": file_of({"a": entry() | {"data_offsets": [0]}}, bytes(4)),
    "arrays that overlap": file_of({"a": entry(), "b": entry(0, 4)}, bytes(4)),
    "a gap between arrays": file_of({"a": entry(), "b": entry(8, 12)}, bytes(12)),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "a": entry()}, bytes(4)),
    "metadata that is a list": file_of({"__metadata__": [], "a": entry()}, bytes(4)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_sentence(case, tmp_path):
    (tmp_path / "good").write_bytes(GOOD)
    assert sorted(map_arrays(tmp_path / "good")) == ["a", "b"]
    (tmp_path / "file").write_bytes(DAMAGED[case])
    for read in (map_arrays, read_metadata):
        with pytest.raises(ValueError, match=r"must be a whole safetensors file, got .*; copy it again") as raised:
            read(tmp_path / "file")
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, arrived in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"must be a whole safetensors file, got {arrived}; copy it again"):
            map_arrays(path)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": np.ones(3)}, "arrays in a safetensors file must be of float32, .*, got float64 for a; pass dtype"),
        ({"a": np.ones(3, np.int64)}, "got int64 for a; pass dtype, or cast it first"),
        ({"__metadata__": np.ones(3, np.float32)}, "must be plain text other than __metadata__, got '__metadata__'"),
        ({"a\ud800": np.ones(3, np.float32)}, "the name of an array in a file must be plain text"),
    ],
    ids=["float64", "int64", "metadata", "half a character"],
)
def test_arrays_that_would_not_come_back(tensors, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        write_arrays(tmp_path / "file", {name: Tensor.from_array(array) for name, array in tensors.items()})
    assert not list(tmp_path.iterdir())


def test_two_writers_and_a_link_in_the_way(tmp_path):
    """Each writes its own file: one of them stands in the end, whole, and nothing else is touched."""
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "file.part").symlink_to(precious)

    def while_another_writes():
        write_arrays(path, {name: Tensor.from_array(np.full(4, 9, np.float32)) for name in "ab"})
        return np.full(4, 7, np.float32)

    first = Tensor.from_array(np.full(4, 7, np.float32))
    write_arrays(path, {"a": first, "b": Tensor((4,), np.float32, while_another_writes)})
    found = map_arrays(path)
    assert {float(value) for name in "ab" for value in found[name]} == {7.0}
    assert precious.read_text() == "precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "file.part", "precious"]
