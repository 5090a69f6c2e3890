"""What a reader of README and docs relies on: links that lead somewhere, pages that render, figures that were measured.

Each rule is a function from a source tree to the sentences that say where it is broken; each is also tried on a tree
that breaks it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, links, pages

from jax_fp8.cli import RUN_COMMANDS

MAX_COLUMNS = 120
README_LINES = 100
MEASURED = "benchmarks/results/gpt_step_1.3b.json"  # a result that is read here, and not linked


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(
            slug if slug not in found else next(f"{slug}-{i}" for i in range(1, 99) if f"{slug}-{i}" not in found)
        )
    return found


def broken_links(root: Path) -> list[str]:
    """Links to files that do not exist, and to headings that a page does not have."""
    broken = []
    for page, text in pages(root).items():
        for link in links(text):
            if re.match(r"https?://", link):
                continue
            path, _, anchor = link.partition("#")
            target = (root / page).parent / path if path else root / page
            if not target.exists():
                broken.append(f"{page}: links to {link}, which does not exist")
            elif anchor and anchor not in anchors(target.read_text()):
                broken.append(f"{page}: links to {link}, a heading that the page does not have")
    return broken


def pages_nobody_finds(root: Path) -> list[str]:
    """Pages in docs/ that its index does not list."""
    index = root / "docs/README.md"
    listed = links(index.read_text()) if index.exists() else []
    paths = [path.relative_to(root / "docs") for path in (root / "docs").rglob("*.md") if path != index]
    names = sorted(str(path) for path in paths if path.parts[0] != "project")  # these show pages from elsewhere
    return [f"docs/{name}: must be in the table of docs/README.md" for name in names if name not in listed]


def results_nobody_links(root: Path) -> list[str]:
    """Files of benchmarks/results that no page links: history keeps those."""
    linked = {(root / page).parent / link for page, text in pages(root).items() for link in links(text)}
    known = {(root / MEASURED).resolve(), *(path.resolve() for path in linked)}
    unknown = sorted(path for path in (root / "benchmarks/results").glob("*") if path.resolve() not in known)
    return [f"{path.relative_to(root)}: no page links it; link it or remove it" for path in unknown]


def crooked_tables(root: Path) -> list[str]:
    """Tables whose rows have different numbers of cells, or that lack the line under their headings."""
    broken = []
    for page, rows in _tables(root):
        cells = [len(re.findall(r"(?<!\\)\|", row)) - 1 for _, row in rows]
        wrong = [number for (number, _), count in zip(rows, cells, strict=True) if count != cells[0]]
        if wrong:
            broken.append(f"{page}:{wrong[0]}: a row must have the {cells[0]} cells of its headings")
        if len(rows) < 2 or not re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", rows[1][1]):
            broken.append(f"{page}:{rows[0][0]}: a table needs |---| under its headings")
    return broken


def _tables(root: Path) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """The tables of every page, as rows with their line numbers."""
    for page, text in pages(root).items():
        rows: list[tuple[int, str]] = []
        for number, line in enumerate([*text.splitlines(), ""], 1):
            if line.startswith("|"):
                rows.append((number, line))
            elif rows:
                yield page, rows
                rows = []


def open_fences(root: Path) -> list[str]:
    """Blocks of code that never end, or that do not say their language."""
    broken = []
    for page, text in pages(root).items():
        fences = re.findall(r"^```(\w*)$", text, re.MULTILINE)
        if len(fences) % 2 or any(fences[1::2]):
            broken.append(f"{page}: every block of code must be closed, got {fences}")
        elif not page.startswith(".github") and not all(language in ("python", "sh") for language in fences[::2]):
            broken.append(f"{page}: a block must say that it is python or sh, or be indented, got {fences[::2]}")
    return broken


def long_lines(root: Path) -> list[str]:
    """Lines that end beyond the last column; a row of a table cannot be cut."""
    return [
        f"{page}:{number}: must end at column {MAX_COLUMNS}, got {len(line)}"
        for page, text in pages(root).items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MAX_COLUMNS and not line.startswith("|")
    ]


def long_readme(root: Path) -> list[str]:
    """A README that is more than a first look."""
    readme = root / "README.md"
    count = len(readme.read_text().splitlines()) if readme.exists() else 0
    return [f"README.md: must have at most {README_LINES} lines, got {count}"] if count > README_LINES else []


def unknown_programs(root: Path) -> list[str]:
    """Scripts and commands of `python -m jax_fp8` that a page names and that do not exist."""
    cli = root / "jax_fp8/cli.py"
    commands = [*re.findall(r'add_parser\(\s*"(\w+)"', cli.read_text()), *RUN_COMMANDS] if cli.exists() else []
    broken = []
    for page, text in pages(root).items():
        scripts = set(re.findall(r"python ((?:examples|tests|benchmarks)/\S+?\.py)", text))
        broken += [f"{page}: {script} does not exist" for script in sorted(scripts) if not (root / script).exists()]
        named = set(re.findall(r"python -m jax_fp8 (\w+)", text))
        broken += [f"{page}: python -m jax_fp8 has no command {name}" for name in sorted(named - {*commands})]
        given = re.findall(r"python -m jax_fp8 (\w+) ([^`\n]+)", text)
        flags = set(re.findall(r"--[\w-]+", " ".join(line for name, line in given if name not in RUN_COMMANDS)))
        unknown = sorted(flag for flag in flags if not cli.exists() or f'"{flag}"' not in cli.read_text())
        broken += [f"{page}: python -m jax_fp8 knows no {flag}" for flag in unknown]
    return broken


def unknown_sources(root: Path) -> list[str]:
    """Sources in backticks that are neither in the repository nor in the package; `x` stands for any name."""
    broken = []
    for page, text in pages(root).items():
        named = set(re.findall(r"`((?:\w+/)+(?!(?:test_)?x\.)\w+\.(?:py|cu|cuh|cc|h))`", text))
        missing = [
            name for name in sorted(named) if not (root / name).exists() and not (root / "jax_fp8" / name).exists()
        ]
        broken += [f"{page}: {name} does not exist" for name in missing]
    return broken


def wrong_figures(root: Path) -> list[str]:
    """Rows of README's table that are not what the benchmark measured."""
    readme, results = root / "README.md", root / MEASURED
    if not readme.exists():
        return []
    measured = {row["variant"]: row for row in json.loads(results.read_text())}
    rows = re.findall(r"\| ([\d.]+) ms \| \**([\d.]+)(?: x)?\** \| ([\d.]+) GiB \|", readme.read_text())
    variants = ("bf16", "flax_direct", "delayed", "delayed_fast_head_tuned_bf16")
    if len(rows) != len(variants):
        return [f"README.md: its table must have the rows of {variants}, got {len(rows)}"]
    broken = []
    for variant, row in zip(variants, rows, strict=True):
        ms, peak = measured[variant]["step_ms"], measured[variant]["peak_gib"]
        expected = f"{ms:.1f}", f"{measured['bf16']['step_ms'] / ms:.2f}", f"{peak:.1f}"
        if tuple(map(float, row)) != tuple(map(float, expected)):
            broken.append(f"README.md: the row of {variant} must say {expected}, got {row}")
    return broken


RULES = (
    broken_links,
    pages_nobody_finds,
    results_nobody_links,
    crooked_tables,
    open_fences,
    long_lines,
    long_readme,
    unknown_programs,
    unknown_sources,
    wrong_figures,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_pages(rule):
    broken = rule(ROOT)
    assert not broken, "\n".join(["", *broken])


RESULTS = json.dumps(
    [{"variant": name, "step_ms": 100.0, "peak_gib": 1.0} for name in ("bf16", "flax_direct", "delayed")]
    + [{"variant": "delayed_fast_head_tuned_bf16", "step_ms": 50.0, "peak_gib": 1.0}]
)
ROW = "| a | 100.0 ms | 1 | 1.0 GiB |\n"
TABLE = ROW * 3 + "| a | 50.0 ms | **2.1 x** | 1.0 GiB |"

# A rule, the files that break it, and the sentence that must be found.
PLANTED = [
    (broken_links, {"README.md": "[a](docs/a.md)"}, "docs/a.md, which does not exist"),
    (broken_links, {"docs/a.md": "[b](b.md#two)", "docs/b.md": "# One\n```\n# Two\n```"}, "b.md#two, a heading"),
    (broken_links, {"docs/a.md": "# A, b\n[b](#a-c)"}, "#a-c, a heading"),
    (pages_nobody_finds, {"docs/README.md": "[a](a.md)", "docs/a.md": "", "docs/b.md": ""}, "docs/b.md: must be in"),
    (results_nobody_links, {"benchmarks/results/a.md": "", "docs/a.md": "[b](b.md)"}, "results/a.md: no page links it"),
    (crooked_tables, {"docs/a.md": "| a | b |\n|---|---|\n| 1 |\n"}, "docs/a.md:3: a row must have the 2 cells"),
    (crooked_tables, {"docs/a.md": "| a | b |\n| 1 | 2 |\n"}, "docs/a.md:1: a table needs"),
    (open_fences, {"docs/a.md": "```python\n"}, "must be closed"),
    (open_fences, {"docs/a.md": "```\nx = 1\n```\n"}, "must say that it is python or sh"),
    (long_lines, {"docs/a.md": "\n" + "a" * (MAX_COLUMNS + 1)}, "docs/a.md:2: must end"),
    (long_readme, {"README.md": "a\n" * (README_LINES + 1)}, f"got {README_LINES + 1}"),
    (unknown_programs, {"docs/a.md": "`python examples/a.py`"}, "examples/a.py does not exist"),
    (unknown_programs, {"docs/a.md": "`python -m jax_fp8 docter`"}, "no command docter"),
    (unknown_programs, {"docs/a.md": "    python -m jax_fp8 tune --quick"}, "knows no --quick"),
    (unknown_sources, {"docs/a.md": "`core/a.py`", "core/b.py": ""}, "docs/a.md: core/a.py does not exist"),
    (
        wrong_figures,
        {"README.md": TABLE, MEASURED: RESULTS},
        "delayed_fast_head_tuned_bf16 must say ('50.0', '2.00', '1.0')",
    ),
]


@pytest.mark.parametrize(("rule", "files", "sentence"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_violation_is_found(tmp_path, rule, files, sentence):
    assert rule(tmp_path) == []
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert any(sentence in found for found in rule(tmp_path)), rule(tmp_path)
