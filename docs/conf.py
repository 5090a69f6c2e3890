"""The site: Sphinx reads the pages of docs/ as they are, and makes the reference from docstrings and parsers.

`make docs` builds it into build/site. The pages are plain Markdown that also reads well in the repository. Two things
differ on the site, and both happen here when Sphinx reads a page:

    a page outside docs/, such as BUILD.md     is read through its stub in docs/project/
    a link to a file that is not on the site   leads to the repository, if JAX_FP8_REPOSITORY holds its address;
                                               otherwise only its text stays
"""

import posixpath
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import jax_fp8

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "csrc"))
import directives
import signatures
from package_metadata import LINK, repository

ROOT = Path(__file__).parent.parent

project = "jax_fp8"
author = "The jax_fp8 authors"
project_copyright = author
version = release = jax_fp8.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["README.md"]  # the index of docs/ in the repository; the site has index.rst
default_role = "code"  # docstrings write `x`, as in Markdown
highlight_language = "python"
suppress_warnings = ["misc.highlighting_failure"]  # of code in docstrings with words beside it
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # `recipe=DelayedScaling()`, not all of its fields
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"  # follows the reader's choice of light or dark, and the width of the screen
html_title = f"jax_fp8 {version}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

# Files of the repository that are pages of the site, and the documents that show them.
PROJECT_PAGES = {
    "BUILD.md": "project/build",
    "CONTRIBUTING.md": "project/contributing",
    "CHANGELOG.md": "project/changes",
    "benchmarks/README.md": "project/benchmarks",
    "benchmarks/log.md": "project/log",
}
HOME = ("README.md", "docs/README.md")


def read_page(app: Sphinx, document: str, source: list[str]) -> None:
    """Put the page's own text, with links for the site, into `source`. Called by Sphinx for every document."""
    path = next((path for path, stub in PROJECT_PAGES.items() if stub == document), None)
    if path is not None:
        source[0] = (ROOT / path).read_text()
    elif Path(app.env.doc2path(document)).suffix != ".md":
        return
    page = path or f"docs/{document}.md"
    source[0] = LINK.sub(lambda link: site_link(page, document, *link.groups()), source[0])


def site_link(page: str, document: str, mark: str, text: str, link: str) -> str:
    """A link of a page as the site has it.

    Args:
      page: its path in the repository.
      document: its name on the site.
      mark: "!" for a picture.
      text, link: what stands in brackets, and in parentheses.
    """
    target, _, anchor = link.partition("#")
    if re.match(r"\w+:", link) or not target:
        return f"{mark}[{text}]({link})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if mark:
        return f"![{text}]({_relative(posixpath.relpath(target, 'docs'), document)})"
    if target in HOME:
        return f"[{text}]({_relative('index.rst', document)})"
    if target in PROJECT_PAGES or (target.startswith("docs/") and target.endswith((".md", ".ipynb"))):
        name = PROJECT_PAGES[target] + ".md" if target in PROJECT_PAGES else target.removeprefix("docs/")
        return f"[{text}]({_relative(name, document)}{'#' + anchor if anchor else ''})"
    return f"[{text}]({repository()}/blob/main/{target})" if repository() else text


def _relative(target: str, document: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(document) or ".")


def setup(app: Sphinx) -> None:
    directives.setup(app)
    signatures.setup(app)
    app.connect("source-read", read_page)
