"""The metadata of the package that pyproject.toml does not hold: version, long description and addresses.

version   of jax_fp8/__init__.py, the one place
readme    README.md; a package index shows it far from the repository, so a relative link becomes absolute, or
          plain text where no address is known
urls      of the repository, if `JAX_FP8_REPOSITORY` holds its address, such as https://host/owner/jax_fp8
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")  # of Markdown: mark of a picture, text, target


def repository() -> str:
    """The address of the repository, or "" where nobody gave one."""
    return os.environ.get("JAX_FP8_REPOSITORY", "").rstrip("/")


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "jax_fp8/__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise ValueError('jax_fp8/__init__.py must hold a line `__version__ = "..."`, and has none')
    return found[1]


def with_absolute_links(text: str, address: str) -> str:
    """A page of the repository's root, as it reads elsewhere.

    Args:
      text: Markdown whose relative links start at the root.
      address: of the repository; "" keeps the text of a link alone, and drops pictures.
    """

    def replaced(link: re.Match) -> str:
        mark, name, target = link.groups()
        if re.match(r"\w+:", target):
            return link[0]
        if not address:
            return "" if mark else name
        return f"{mark}[{name}]({address}/{'raw' if mark else 'blob'}/v{version()}/{target})"

    return LINK.sub(replaced, text)


def urls(address: str) -> dict[str, str]:
    if not address:
        return {}
    return {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Documentation": f"{address}/blob/v{version()}/docs/README.md",
        "Changelog": f"{address}/blob/v{version()}/CHANGELOG.md",
    }


def dynamic_metadata(settings: Mapping, project: Mapping) -> dict:
    """The hook that scikit-build-core calls."""
    text = with_absolute_links((ROOT / "README.md").read_text(), repository())
    readme = {"text": text, "content-type": "text/markdown"}
    return {"version": version(), "readme": readme, "urls": urls(repository())}


def dynamic_wheel(settings: Mapping) -> dict[str, bool]:
    """Whether a wheel may say something else than the source distribution that it was built from: with an address."""
    return {"version": False, "readme": True, "urls": True}
