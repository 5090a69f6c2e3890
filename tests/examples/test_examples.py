"""Each example runs, and what it trains learns."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    """What a script defines, without running it as a program."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_train_gpt(recipe, book, capsys):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 32, "batch": 4, "length": 16}
    loss = example("train_gpt")["train"](str(book), recipe=recipe, steps=20, learning_rate=1e-2, **sizes)
    printed = capsys.readouterr().out
    before = float(printed.partition("step 0: validation loss ")[2].splitlines()[0])
    assert loss < 0.8 * before and "step 20: loss" in printed and "--- the model\n" in printed


def test_train_gpt_reads_sources_unless_told_otherwise():
    text, held_out = example("train_gpt")["read"](None)
    assert len(held_out) == (len(text) + len(held_out)) // 20 > 10_000


def test_train_gpt_is_a_short_program():
    assert len((EXAMPLES / "train_gpt.py").read_text().splitlines()) <= 150
    command = [sys.executable, EXAMPLES / "train_gpt.py", "--help"]
    assert "--recipe {delayed,current,block,bf16}" in subprocess.run(command, capture_output=True, text=True).stdout


def test_linen(capsys):
    assert example("linen")["main"](steps=20) > 0.5  # of ten classes
    assert "Classifier/LayerNormMLP_{0..1}/up/fprop" in capsys.readouterr().out


def test_nnx(capsys):
    losses = example("nnx")["main"](steps=40)
    assert np.mean(losses[-10:]) < 0.7 * losses[0]
    assert "2 layers in FP8" in capsys.readouterr().out


def test_mesh(capsys):
    """On the eight devices of the tests."""
    losses = example("mesh")["main"](steps=6, length=16, num_layers=1, num_heads=2, hidden_size=64)
    assert losses[-1] < losses[0]
    assert "{'data': 2, 'fsdp': 2, 'tensor': 2}: mlp/up/kernel (64, 256) is sharded as" in capsys.readouterr().out


def test_huggingface(tmp_path, capsys):
    module = example("huggingface")
    losses = module["main"](module["make_folder"](tmp_path / "made"), tmp_path / "trained", steps=3)
    assert losses[2] < losses[1] < losses[0]
    assert (tmp_path / "trained/config.json").exists() and "continuations: [[" in capsys.readouterr().out


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"train_gpt", "linen", "nnx", "mesh", "huggingface"}
