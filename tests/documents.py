"""The pages of the repository, and the blocks of code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# All but benchmarks/results, which programs write.
PATTERNS = ("*.md", ".github/**/*.md", "docs/**/*.md", "benchmarks/*.md")


def pages(root: Path) -> dict[str, str]:
    """The text of every page, by its path."""
    paths = sorted({path for pattern in PATTERNS for path in root.glob(pattern)})
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """A page without its code: fenced, indented, or within a line."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def links(text: str) -> list[str]:
    """Targets of the links of a page, pictures among them."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))
