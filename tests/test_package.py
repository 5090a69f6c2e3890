"""What a user gets who installs the package: a wheel with its types and its licence, and one version everywhere."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import documents
import pytest

import jax_fp8 as fp8

ROOT = Path(__file__).parent.parent


def test_the_version_that_is_cited_is_this_one():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == fp8.__version__


def test_the_source_distribution_has_all_that_readme_links(tmp_path):
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / f"jax_fp8-{fp8.__version__}.tar.gz") as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    names |= {parent for name in names for parent in name.parents}
    links = {
        Path(link.partition("#")[0]) for link in documents.links((ROOT / "README.md").read_text()) if "://" not in link
    }
    assert len(links) > 15 and links <= names, links - names
    assert not {Path("runs"), Path(".venv"), Path("build"), Path(".ci")} & names


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="builds with the tools of this machine: needs cmake")
def test_a_wheel_has_its_types_its_licence_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    for name in ("jax_fp8", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), "--config-settings=cmake.define.JAX_FP8_KERNELS=OFF"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr

    wheel = zipfile.ZipFile(next(tmp_path.glob("jax_fp8-*.whl")))
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "jax_fp8").rglob("*.py")}
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "jax_fp8/plan/gpus").iterdir()}
    modules |= {f"jax_fp8/report/page.{kind}" for kind in ("css", "js")}
    information = f"jax_fp8-{fp8.__version__}.dist-info"
    expected = modules | {"jax_fp8/py.typed", f"{information}/licenses/LICENSE"}
    assert expected <= names
    others = {name for name in names - expected if not name.startswith(information)}
    assert len(others) == 1 and re.fullmatch(r"jax_fp8/_kernels\..*so", others.pop())

    metadata = email.message_from_bytes(wheel.read(f"{information}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The jax_fp8 authors"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "trains 1." in metadata.get_payload() and "](docs/" not in metadata.get_payload()
