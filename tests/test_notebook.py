"""The notebook of the second tutorial: it is that of its page, and it runs as a user runs it."""

import importlib
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `docs` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `docs` is not installed")
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def notebook(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("notebook")


def test_it_is_that_of_its_page(notebook):
    expected = notebook.from_page(notebook.PAGE.read_text())
    assert nbformat.read(notebook.NOTEBOOK, as_version=4) == expected, "run `python docs/notebook.py`"
    assert [cell.cell_type for cell in expected.cells].count("code") == 5


def test_it_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    read = nbformat.read(notebook.NOTEBOOK, as_version=4)
    ran = nbclient.execute(read, timeout=300, cwd=str(tmp_path))
    assert all(cell.execution_count for cell in ran.cells if cell.cell_type == "code")
    assert any(tmp_path.glob("*.png"))  # the picture that the page shows


def test_a_cell_that_fails_is_found(notebook, tmp_path):
    broken = notebook.from_page("# A page\n\n```python\nassert 1 == 2\n```\n")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        nbclient.execute(broken, timeout=60, cwd=str(tmp_path))
