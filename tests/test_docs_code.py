"""The code of README and docs runs as it stands there, and its commands are understood."""

import functools
import json
import re
import shlex
import subprocess
import sys

import flax.linen as nn
import jax
import pytest
from documents import ROOT, code_blocks, pages

import jax_fp8 as fp8
from jax_fp8.run import export, generate, settings

TUTORIALS = "docs/tutorials/"
# Page: why its code may warn.
WARNS: dict[str, str] = {}
# The block whose steps begin with a warm start, as a user's do. On meshes and stages meshes/test_step.py and
# meshes/test_pipeline.py have one.
WARM = ("README.md-1",)
# What other tests run as well: names of params, rows of processes, loops of one's own, a model by its layers.
SLOW = (
    "docs/how_to/tensor_parallel.md-2",
    "docs/how_to/own_jit.md-1",
    "docs/how_to/processes.md-1",
    "docs/how_to/pipelines.md-2",
)

CODE = {
    f"{page}-{number}": (page, code)
    for page, text in pages(ROOT).items()
    if not page.startswith((".github", TUTORIALS))
    for number, code in enumerate(code_blocks(text, "python"), 1)
}
# The blocks of a tutorial continue each other: they are one program.
CODE |= {
    f"{page}-1": (page, "\n\n".join(blocks))
    for page, text in pages(ROOT).items()
    if page.startswith(TUTORIALS) and (blocks := code_blocks(text, "python"))
}


def blocks():
    """Under a second jax README and the tutorials: the other pages call the library as tests do that run there."""
    for block, (page, _) in CODE.items():
        marks = [pytest.mark.versions] if page.startswith(("README", TUTORIALS)) else []
        yield pytest.param(block, marks=[*marks, pytest.mark.slow] if block in SLOW else marks)


def init_in_one_program(module, init, *args, **options):
    return jax.jit(lambda *args: init(module, *args, **options))(*args)


@pytest.mark.parametrize("block", list(blocks()))
def test_code_runs(block, recwarn, monkeypatch, tmp_path):
    """Every block by itself, on eight CPU devices, as conftest.py has them. Most begin without a warm start, which is a
    program of its own, unless they ask for one; and every `init` is one program, for each of its operations would be
    one."""
    page, code = CODE[block]
    monkeypatch.chdir(tmp_path)  # for the pictures that it draws
    monkeypatch.setattr(nn.Module, "init", functools.partialmethod(init_in_one_program, nn.Module.init))
    if block not in WARM:
        monkeypatch.setattr(fp8, "make_train_step", functools.partial(fp8.make_train_step, warm_start=False))
    exec(compile(code, block, "exec"), {"__name__": "__main__"})
    assert page in WARNS or not recwarn.list


def test_a_run_understands_its_commands(monkeypatch):
    monkeypatch.setattr(settings, "repeated", lambda path: settings.defaults("tiny"))  # of a config that is not there
    readers = {"train": settings.parse, "generate": generate.read_request, "export": export.read_export}
    for name, read in readers.items():
        commands = [
            command
            for text in pages(ROOT).values()
            for command in re.findall(rf"python -m jax_fp8 {name} ([^`\n]+)", text.replace("\\\n", ""))
        ]
        assert commands
        for command in commands:
            read(shlex.split(command, comments=True))


@pytest.mark.slow
def test_code_passes_a_type_checker(tmp_path):
    """As in a user's own editor, which sees the package and its types."""
    for block, (_, code) in CODE.items():
        (tmp_path / re.sub(r"\W", "_", block)).with_suffix(".py").write_text(code)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and "0 errors" in checked.stdout, checked.stdout + checked.stderr


def test_readme_trains_a_gpt_in_twelve_lines():
    (code,) = (code for page, code in CODE.values() if page == "README.md")
    assert all(name in code for name in ("fp8.GPT(", "fp8.fused_adamw", "fp8.make_train_step"))
    lines = [line for line in code.splitlines() if line and "import" not in line and "print" not in line]
    assert len(lines) <= 12
