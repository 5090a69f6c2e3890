"""What a build decides before CMake runs, and what the package says of itself on an index."""

import importlib
import re
from pathlib import Path

import pytest

import jax_fp8 as fp8

pytest.importorskip("scikit_build_core", reason="the extra `test` is not installed")
ROOT = Path(__file__).parents[1]
KERNELS = "cmake.define.JAX_FP8_KERNELS"


@pytest.fixture
def csrc(monkeypatch):
    """A module of csrc/ by name, as a build imports it, on a machine without GPU, nvcc and address."""
    monkeypatch.syspath_prepend(str(ROOT / "csrc"))
    monkeypatch.delenv("JAX_FP8_REPOSITORY", raising=False)
    return importlib.import_module


@pytest.fixture
def backend(csrc, monkeypatch):
    backend = csrc("build_backend")
    monkeypatch.setattr(backend, "_has_gpu", lambda: False)
    monkeypatch.setattr(backend, "_has_nvcc", lambda: False)
    return backend


@pytest.mark.parametrize(
    ("asked", "has_gpu", "decided"),
    [
        (None, False, "OFF"),
        (None, True, "ON"),
        ("auto", True, "ON"),
        ("ON", False, "ON"),
        ("OFF", True, "OFF"),
    ],
)
def test_kernels_are_compiled_for_a_gpu_or_on_demand(backend, monkeypatch, asked, has_gpu, decided):
    monkeypatch.setattr(backend, "_has_gpu", lambda: has_gpu)
    settings = {KERNELS: asked, "build-dir": "b"} if asked else None
    found = backend.with_decision(settings)
    assert found[KERNELS] == decided and ("cmake.define.JAX_FP8_WHY_NO_KERNELS" in found) is (decided == "OFF")
    assert found.get("build-dir") == (settings or {}).get("build-dir")  # other settings stay


def test_another_word_is_refused(backend):
    with pytest.raises(ValueError, match="JAX_FP8_KERNELS must be AUTO, ON or OFF, got MAYBE"):
        backend.with_decision({KERNELS: "maybe"})


def test_a_build_asks_for_compilers_that_the_machine_lacks(backend, monkeypatch):
    assert backend._compilers(None) == []
    assert backend._compilers({KERNELS: "ON"}) == backend.NVCC_WHEELS
    assert backend._compilers({"cmake.define.JAX_FP8_GLIBC": "2.28"}) == backend.ZIG_WHEELS
    monkeypatch.setattr(backend, "_has_nvcc", lambda: True)
    assert backend._compilers({KERNELS: "ON"}) == []


def test_a_build_says_what_it_does_and_how_long(backend, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(backend._scikit, "build_wheel", lambda folder, settings, metadata: settings[KERNELS])
    monkeypatch.setattr(backend.os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(backend, "TERMINAL", str(tmp_path / "terminal"))
    assert backend.build_wheel("w") == "OFF"
    assert (tmp_path / "terminal").read_text().startswith("jax_fp8: building without CUDA kernels (on a machine")
    monkeypatch.setattr(backend, "TERMINAL", str(tmp_path / "none/terminal"))  # a build without a terminal
    assert backend.build_wheel("w", {KERNELS: "ON"}) == "ON"
    assert backend.build_wheel("w", {KERNELS: "ON", "cmake.define.JAX_FP8_LIBRARY": "l.a"}) == "ON"
    assert capsys.readouterr().err.splitlines() == [
        "jax_fp8: building without CUDA kernels (on a machine without an NVIDIA GPU): seconds",
        f"jax_fp8: compiling CUDA kernels on 4 cores: about {round(backend.MINUTES / 4)} minutes",
        "jax_fp8: linking the CUDA kernels of l.a: seconds",
    ]


def test_the_version_is_in_one_place(csrc):
    assert csrc("package_metadata").version() == fp8.__version__


def test_links_of_the_long_description(csrc, monkeypatch):
    metadata, version = csrc("package_metadata"), fp8.__version__
    text = "[a](docs/a.md#b) ![p](docs/p.png) [d](https://d.dev)"
    assert metadata.with_absolute_links(text, "") == "a  [d](https://d.dev)"
    monkeypatch.setenv("JAX_FP8_REPOSITORY", "https://host/o/jax_fp8/")
    found = metadata.dynamic_metadata({}, {})
    targets = re.findall(r"\]\(([^)\s]+)\)", found["readme"]["text"])
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    assert f"https://host/o/jax_fp8/blob/v{version}/docs/performance.md" in targets
    assert f"https://host/o/jax_fp8/raw/v{version}/docs/loss.png" in targets
    assert found["urls"]["Repository"] == "https://host/o/jax_fp8"


def test_nothing_is_invented_without_an_address(csrc):
    found = csrc("package_metadata").dynamic_metadata({}, {})
    assert found["urls"] == {} and "](docs/" not in found["readme"]["text"]
    assert "trains 1." in found["readme"]["text"]
