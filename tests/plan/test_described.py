"""GPUs that are not here: how many, on how many hosts, and what is said where they cannot be described."""

import ctypes
import re

import pytest

from jax_fp8.plan import described
from jax_fp8.plan.described import GPUS, described_gpus, load_cudnn, missing_reason

needs_compiler = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


@needs_compiler
@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (8, 1), (16, 2), (12, 3)])
def test_so_many_gpus(count, hosts):
    gpus = described_gpus(count)
    assert len(set(gpus)) == count and {gpu.platform for gpu in gpus} == {"gpu"}
    assert len({gpu.process_index for gpu in gpus}) == hosts


def test_the_memory_is_that_of_the_description():
    for gpu, memory in GPUS.items():
        text = described.FOLDER.joinpath(f"{gpu}.txtpb").read_text()
        assert int(re.findall(r"device_memory_size: (\d+)", text)[0]) == memory


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match=r"gpu must be one of h200, got 'b9000'; choose one of these"):
        described_gpus(1, "b9000")


def test_without_the_plugin(monkeypatch):
    monkeypatch.setattr(described.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs jax's CUDA plugin, which is not installed; pip install --no-deps jax-cu"
    ):
        described_gpus.__wrapped__(1)


def test_without_cudnn(monkeypatch):
    def load(path, mode):
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(
        ValueError, match=r"for cuDNN, which must be here, got .*libcudnn\.so.*; pip install nvidia-cudnn"
    ):
        load_cudnn()
