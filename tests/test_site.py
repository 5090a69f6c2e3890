"""The site of docs/: its reference has every public name and command, links lead to pages that exist there, and
signatures read as one would write them. `make docs` builds it, and a warning is an error.
"""

import importlib
import pathlib
import re

import pytest

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8 import cli

pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
DOCS = pathlib.Path(__file__).parents[1] / "docs"
NAMED = r"^\.\. auto(?:class|function|data):: (\S+)$"


@pytest.fixture
def site(monkeypatch):
    """A module of docs/ by name, as Sphinx imports it."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def reference_names(folder: pathlib.Path) -> list[str]:
    return [name for page in sorted(folder.glob("*.rst")) for name in re.findall(NAMED, page.read_text(), re.MULTILINE)]


def test_the_reference_has_every_public_name_once():
    names = reference_names(DOCS / "reference")
    assert sorted(name for name in names if "." not in name) == sorted(fp8.__all__)
    assert len(set(names)) == len(names)


def test_a_name_that_the_reference_lacks_is_found(tmp_path):
    for page in (DOCS / "reference").glob("*.rst"):
        (tmp_path / page.name).write_text(page.read_text().replace(".. autoclass:: Dense\n", ""))
    assert set(fp8.__all__) - {*reference_names(tmp_path)} == {"Dense"}


def test_every_command_is_in_the_reference(site):
    commands = re.findall(
        r"^\.\. command-help:: (\w+)$", (DOCS / "reference/command_line.rst").read_text(), re.MULTILINE
    )
    listed = re.findall(r"^    (\w+) ", cli.make_parser().format_help(), re.MULTILINE)
    assert sorted(commands) == sorted(listed) and len(listed) == 8
    printed = site("directives").command_help("tune")
    assert printed.startswith("usage: python -m jax_fp8 tune") and "--preset" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_command_that_does_not_exist_is_no_page(site):
    with pytest.raises(ValueError, match="must begin with its usage, got ''; is there such a command"):
        site("directives").command_help("trian")


LINKS = {
    ("docs/status.md", "status", "", "how_to/meshes.md#the-axes"): "[text](how_to/meshes.md#the-axes)",
    ("docs/status.md", "status", "", "#evaluation"): "[text](#evaluation)",
    ("docs/status.md", "status", "", "https://jax.dev/a.md"): "[text](https://jax.dev/a.md)",
    ("docs/status.md", "status", "", "../BUILD.md#what-is-built"): "[text](project/build.md#what-is-built)",
    ("docs/status.md", "status", "", "../README.md"): "[text](index.rst)",
    ("docs/tutorials/own_model.md", "tutorials/own_model", "", "../status.md"): "[text](../status.md)",
    ("docs/tutorials/own_model.md", "tutorials/own_model", "!", "own.png"): "![text](own.png)",
    ("benchmarks/log.md", "project/log", "", "README.md"): "[text](benchmarks.md)",
    ("benchmarks/log.md", "project/log", "", "../docs/performance.md"): "[text](../performance.md)",
    (
        "benchmarks/log.md",
        "project/log",
        "!",
        "results/convergence.png",
    ): "![text](../../benchmarks/results/convergence.png)",
    ("docs/status.md", "status", "", "../benchmarks/results/meshes.json"): "text",
}


@pytest.mark.parametrize("arguments", LINKS, ids=lambda arguments: f"{arguments[0]} {arguments[3]}")
def test_links_of_the_site(arguments, site):
    page, document, mark, link = arguments
    assert site("conf").site_link(page, document, mark, "text", link) == LINKS[arguments]


def test_links_into_the_repository(site, monkeypatch):
    monkeypatch.setenv("JAX_FP8_REPOSITORY", "https://example.org/a/b/")
    link = site("conf").site_link("docs/status.md", "status", "", "text", "../examples/linen.py")
    assert link == "[text](https://example.org/a/b/blob/main/examples/linen.py)"


def test_a_signature_is_short(site):
    process = site("signatures").process
    signature, returned = process(None, "class", "", fp8.Dense, None, "", "")
    assert returned is None and "recipe=DelayedScaling()" in signature and "dtype=bfloat16" in signature
    assert "parent" not in signature and "<" not in signature
    signature, _ = process(None, "class", "", fp8.DelayedScaling, None, "", "")
    assert "fp8_format=HYBRID" in signature
    signature, _ = process(None, "class", "", jax_fp8.nnx.Linear, None, "", "")
    assert signature.startswith("(in_features, out_features, *, use_bias=True, dtype=bfloat16,")
    assert "recipe=DelayedScaling()" in signature and "kernel_metadata={}" in signature
    assert process(None, "function", "", fp8.matmul, None, "(x)", "") is None


def test_a_constant_has_its_comment(site):
    lines = ["What the docstring of its type says."]
    site("signatures").document_constant(None, "class", "jax_fp8.E4M3", fp8.E4M3, None, lines)
    assert lines == ["What the docstring of its type says."]
    site("signatures").document_constant(None, "data", "jax_fp8.E4M3", fp8.E4M3, None, lines)
    assert lines[0].startswith("The FP8 dtype with 4 exponent and 3 mantissa bits") and "Example:" in lines


def test_code_in_a_docstring_is_marked(site):
    lines = ["Two ways:", "", "    step(state)", "", "Args:", "  x: some `int`s:", "", "  y: none"]
    site("signatures").mark_code(None, "function", "", None, None, lines)
    assert lines == ["Two ways::", "", "    step(state)", "", "Args:", "  x: some `int`\\ s:", "", "  y: none"]
