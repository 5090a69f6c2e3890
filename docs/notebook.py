"""The second tutorial as a notebook: `python docs/notebook.py` writes it from the page, after the page has changed.

The page stays the one place of its text and code. A block of Python becomes a code cell, what stands between two blocks
a Markdown cell.
"""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PAGE = Path(__file__).parent / "tutorials/fp8_on_one_page.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def from_page(text: str) -> nbformat.NotebookNode:
    """The notebook of a page. Cells are numbered, so that the same page gives the same file."""
    cells = []
    for number, part in enumerate(BLOCK.split(text)):
        make = new_code_cell if number % 2 else new_markdown_cell
        if part.strip():
            cells.append(make(part.strip(), id=f"cell-{number}"))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


if __name__ == "__main__":
    nbformat.write(from_page(PAGE.read_text()), NOTEBOOK)
