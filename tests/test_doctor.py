"""`python -m jax_fp8 doctor`: its findings, what breaks training where, and exit codes."""

import pathlib

import jax
import pytest

import jax_fp8 as fp8
from jax_fp8 import CurrentScaling, cli, doctor
from jax_fp8.kernels import extension


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "list_nvidia_gpus", list)


@pytest.mark.versions
def test_doctor_finds_everything_needed(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for what in (*doctor.PACKAGES, "python", "devices", "kernels", "training", jax.__version__):
        assert what in printed
    assert f"jax_fp8    {fp8.__version__}, from {pathlib.Path(fp8.__file__).parent}\n" in printed
    assert "FP8 training works here" in printed


@pytest.mark.versions
def test_doctor_says_that_jax_does_not_see_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "list_nvidia_gpus", lambda: ["GPU 0: NVIDIA H200"])
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices(backend="cpu"))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "NVIDIA H200, which jax does not see" in printed
    assert "jax[cuda13]" in printed


@pytest.mark.versions
def test_doctor_says_that_jax_has_no_platform(monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(jax, "devices", devices)
    assert cli.main(["doctor"]) == 1
    assert "Unknown backend cuda" in capsys.readouterr().out


def describe(built, backend, cublaslt_version, monkeypatch):
    info = {
        "built": built,
        "reason": None if built else "no kernels; reinstall",
        "path": "/site/_kernels.so" if built else None,
        "targets": ("a", "b"),
        "cuda_version": "13.0",
        "architectures": ("90a",),
        "cublaslt_version": cublaslt_version,
        "cublaslt_reason": None if cublaslt_version else "libcublasLt.so.13 was not found; install jax[cuda13]",
    }
    monkeypatch.setattr(extension, "build_info", lambda: info)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    return doctor.find_kernels()


def test_missing_kernels_break_training_on_a_gpu_only(monkeypatch):
    (on_gpu,), (on_cpu,) = (describe(False, backend, None, monkeypatch) for backend in ("gpu", "cpu"))
    assert on_gpu.broken and not on_cpu.broken
    assert on_gpu.remedy == on_cpu.remedy == "no kernels; reinstall"


def test_kernels_that_cannot_be_loaded_are_broken_on_a_gpu(monkeypatch, capsys):
    """The rest is still said, although nothing can be computed in FP8."""
    describe(False, "gpu", None, monkeypatch)
    monkeypatch.setattr(extension, "is_broken", lambda: True)
    assert doctor.doctor() == 1
    printed = capsys.readouterr().out
    assert "BROKEN  kernels" in printed and "no kernels; reinstall" in printed
    assert "  training " not in printed
    monkeypatch.setattr(extension, "is_broken", lambda: False)  # negative control: without an extension it is tried
    assert doctor.doctor() == 1 and "  training " in capsys.readouterr().out


def test_missing_cublaslt_breaks_training_on_a_gpu_only(monkeypatch):
    on_gpu = describe(True, "gpu", None, monkeypatch)[-1]
    assert on_gpu.broken and "jax[cuda13]" in on_gpu.remedy
    assert not describe(True, "cpu", None, monkeypatch)[-1].broken
    assert describe(True, "gpu", "13.1.0", monkeypatch)[-1] == doctor.Finding("cuBLASLt", "13.1.0")


@pytest.mark.versions
def test_doctor_says_where_the_extension_is(monkeypatch):
    assert describe(True, "cpu", "13.1.0", monkeypatch)[0] == doctor.Finding("extension", "/site/_kernels.so")


def test_a_wrong_gradient_is_broken(monkeypatch):
    assert not doctor.find_training().broken
    rounds_to_zero = CurrentScaling(amax_epsilon=1e30)
    monkeypatch.setattr(doctor, "CurrentScaling", lambda: rounds_to_zero)
    assert doctor.find_training().broken
