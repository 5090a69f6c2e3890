"""The example as a user meets it: what it writes, and what it says when it cannot run."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 6".split()


@pytest.fixture
def example(monkeypatch):
    """A module of examples/ by name, imported as the script imports it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield lambda name: __import__(name)
    for name in ("train_gpt", "settings", "text", "record"):
        sys.modules.pop(name, None)


@pytest.fixture
def book(tmp_path):
    """A user's own text: a few thousand words, not all of them ASCII."""
    words = np.random.default_rng(0).choice(["naïve", "model", "learns", "to", "predict", "bytes", "—", "\n"], 3000)
    path = tmp_path / "book.txt"
    path.write_text(" ".join(words))
    return path


def run_script(*arguments):
    flags = (
        "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_run_leaves_log_configuration_and_picture(book, tmp_path):
    arguments = [*SMALL, "--data", book, "--tokenizer", "bpe", "--vocab-size", 300, "--cache", tmp_path / "cache"]
    arguments += [
        "--compare",
        "--mesh",
        "data=2",
        "--microbatches",
        2,
        "--eval-every",
        3,
        "--output",
        tmp_path / "runs",
    ]
    finished = run_script(*arguments, "--name", "mine")
    assert finished.returncode == 0, finished.stderr
    folder = tmp_path / "runs" / "mine"

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for run in ("delayed", "bf16"):
        mine = [row for row in rows if row["run"] == run]
        assert [row["step"] for row in mine] == [0, 3, 6]
        assert all(math.isfinite(row["val_loss"]) for row in mine)
        assert mine[-1]["val_loss"] < mine[0]["val_loss"]
        assert mine[-1]["tokens_per_second"] > 0
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["steps"] == 6 and config["settings"]["learning_rate"] > 0
    assert config["model"]["hidden_size"] == 32 and config["model"]["vocab_size"] == 384
    assert config["device"] == "2 x cpu" and config["jax"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "cache").iterdir())) == 1

    last = finished.stdout.splitlines()[-1]
    assert re.search(r"delayed \d\.\d+, bf16 \d\.\d+, difference [+-]\d+\.\d+ %", last) and str(folder) in last
    assert "the model writes" in finished.stdout
    for shown in ("loss=", "tokens/s=", "step/s", "val="):
        assert shown in finished.stderr  # the progress bar


def test_a_name_that_is_taken_gets_a_number(example, book, tmp_path, capsys):
    taken = tmp_path / "tiny-current" / "metrics.jsonl"
    taken.parent.mkdir()
    taken.write_text("an earlier run\n")
    arguments = [*SMALL, "--data", str(book), "--recipe", "current", "--fp8-head", "--output", str(tmp_path)]
    assert example("train_gpt").main(arguments) == 0
    assert taken.read_text() == "an earlier run\n"
    assert (tmp_path / "tiny-current-2" / "metrics.jsonl").exists()
    assert "exists already" in capsys.readouterr().out


CANNOT_RUN = {
    "missing path": (["--data", "nowhere.txt"], "nowhere.txt does not exist"),
    "hidden size": (["--hidden-size", "72"], "--hidden-size must be a multiple of 16"),
    "heads": (["--num-heads", "5"], "--num-heads must divide --hidden-size"),
    "no heads": (["--num-heads", "0"], "--num-heads must be at least 1"),
    "preset": (["--preset", "gpt5"], "gpt2-124m"),
    "recipe": (["--recipe", "fp4"], "delayed"),
    "tokenizer": (["--tokenizer", "words"], "bytes"),
    "no such flag": (["--resume"], "--resume"),
    "no number": (["--steps", "many"], "many"),
    "no value": (["--steps"], "--steps"),
    "no steps": (["--steps", "0"], "--steps must be at least 1"),
    "large mesh": (["--mesh", "data=4096"], "data=4096"),
    "mesh axis": (["--mesh", "tensor=2"], "data=N"),
    "mesh and batch": (["--mesh", "data=2", "--batch-size", "3", "--seq-len", "16"], "must divide the 3 sequences"),
    "microbatches": (["--microbatches", "3"], "--microbatches must divide --batch-size"),
    "odd microbatch": (["--batch-size", "3", "--seq-len", "10"], "multiple of 16"),
    "comparing bf16": (["--recipe", "bf16", "--compare"], "--compare"),
    "fast bf16": (["--recipe", "bf16", "--fast"], "--fast and --fp8-head are about FP8"),
    "bf16 with an FP8 head": (["--recipe", "bf16", "--fp8-head"], "--recipe delayed"),
    "name": (["--name", "../mine"], "--name must be a plain folder name"),
    "learning rate": (["--learning-rate", "nan"], "--learning-rate"),
    "vocabulary": (["--tokenizer", "bpe", "--vocab-size", "10"], "--vocab-size"),
}


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_flags_choose_what_is_in_fp8_and_how_it_adds(name, example, book, tmp_path):
    script = example("train_gpt")
    plain, quick = (script.prepare([*SMALL, "--data", str(book), *flags]) for flags in ([], ["--fast", "--fp8-head"]))
    assert script.make_model(plain, name).head_recipe is None
    assert script.make_model(plain, name).recipe == script.RECIPES[name]()
    assert script.make_model(quick, name).head_recipe == script.fp8.CurrentScaling()
    assert script.make_model(quick, name).recipe.split_accumulator == ()
    baseline = script.make_model(quick, "bf16")
    assert (baseline.recipe, baseline.head_recipe) == (None, None)


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_what_cannot_run_is_one_sentence(case, example, book, tmp_path, capsys, monkeypatch):
    arguments, expected = CANNOT_RUN[case]
    monkeypatch.chdir(tmp_path)
    if "--data" not in arguments:
        arguments = ["--data", str(book), *arguments]
    check_one_sentence(example("train_gpt").main(arguments), capsys.readouterr(), expected)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty"), ("a short story", "at least one batch"), ("short" * 500, "validation")]
)
def test_too_little_text_is_one_sentence(text, expected, example, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text(text)
    code = example("train_gpt").main(["--data", str(path), "--output", str(tmp_path / "runs")])
    check_one_sentence(code, capsys.readouterr(), expected)


def check_one_sentence(code, printed, expected):
    assert code == 2
    assert len(printed.err.splitlines()) == 1 and "Traceback" not in printed.err
    assert expected in printed.err


def test_the_script_itself_exits_with_2(tmp_path):
    finished = run_script("--resume", "--output", tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == "train_gpt.py: Unrecognized options: --resume (--help lists the options)\n"


def test_a_loss_that_is_not_finite_ends_the_run(example, book, tmp_path, capsys):
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--learning-rate", "1e38", "--output", str(tmp_path)]
    assert example("train_gpt").main(arguments) == 1
    assert "lower --learning-rate" in capsys.readouterr().err.splitlines()[-1]


def test_documents_are_held_out_and_files_that_are_not_text_left_out(example, tmp_path, capsys):
    text = example("text")
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".hidden").write_text("secret")
    corpus = text.read_corpus(text.user_files(tmp_path))
    assert corpus.held_out == b"document 19\n\ndocument 39\n"
    assert corpus.train.count(b"document") == 38 and b"secret" not in corpus.train
    assert "picture.png" in capsys.readouterr().out
    first = b"".join(text.read_corpus(text.user_files(tmp_path), max_bytes=100))
    assert len(first.replace(b"\n\n", b"\n")) == 100


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_decode_to_the_text_they_came_from(tokenizer, example, book, tmp_path):
    text, content = example("text"), book.read_bytes()
    encoder = text.ByteEncoder() if tokenizer == "bytes" else text.PairEncoder.trained_on(content, 300, tmp_path)
    ids = encoder.encode(content)
    assert encoder.decode(ids) == content.decode()
    assert ids.max() < encoder.vocab_size
    assert len(encoder.encode(b"")) == 0


def test_batches_are_a_function_of_seed_and_step(example):
    text, tokens = example("text"), np.arange(1000)
    batch = text.training_batch(tokens, 3, 0, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.int32
    assert (np.diff(batch) == 1).all()
    assert (batch == text.training_batch(tokens, 3, 0, 4, 16)).all()
    assert (batch != text.training_batch(tokens, 4, 0, 4, 16)).any()
    assert (batch != text.training_batch(tokens, 3, 1, 4, 16)).any()
    everything = np.concatenate(text.validation_batches(tokens, 2, 4, 16))
    assert everything.shape == (8, 17) and everything.min() == 0 and everything.max() == 999
    assert (text.training_batch(np.arange(17), 1, 0, 2, 16) == np.arange(17)).all()  # the last token is within reach
