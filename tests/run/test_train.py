"""A run as a user meets it: what it writes, and what it says when it cannot run."""

import errno
import gzip
import importlib.metadata
import json
import math
import os
import re
import shlex
import subprocess
import sys

import pytest

from jax_fp8 import cli
from jax_fp8.run import batches as batching
from jax_fp8.run import data, train

COMMAND = [sys.executable, "-m", "jax_fp8", "train"]
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 6".split()


def run_command(*arguments):
    flags = re.sub(r"(?<=device_count=)\d+", "2", os.environ["XLA_FLAGS"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_run_leaves_log_configuration_and_picture(book, tmp_path):
    arguments = [*SMALL, "--data", book, "--tokenizer", "bpe", "--vocab-size", 300, "--cache", tmp_path / "cache"]
    arguments += ["--compare", "--mesh", "data=2", "--microbatches", 2, "--eval-every", 3, "--profile", "2:3"]
    arguments += ["--diagnose-every", 4, "--tensorboard", "--output", tmp_path / "runs"]
    finished = run_command(*arguments, "--name", "mine")
    assert finished.returncode == 0, finished.stderr
    folder = tmp_path / "runs" / "mine"

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for run in ("delayed", "bf16"):
        mine = [row for row in rows if row["run"] == run]
        assert [row["step"] for row in mine] == [0, 3, 6]
        assert all(math.isfinite(row["val_loss"]) for row in mine)
        assert mine[-1]["val_loss"] < mine[0]["val_loss"]
        assert mine[-1]["tokens_per_second"] > 0 and mine[-1]["model_tflops"] > 0
        assert list((folder / "tensorboard" / run).iterdir())
    delayed, bf16 = map(json.loads, (folder / "diagnostics.jsonl").read_text().splitlines())
    assert (delayed["run"], delayed["step"], bf16["run"], bf16["step"]) == ("delayed", 4, "bf16", 4)
    assert {row["tensor"] for row in delayed["tensors"]} == {"input", "kernel", "output_gradient"}
    assert bf16["tensors"] == [] and all(row["norm"] > 0 for row in delayed["gradients"] + bf16["gradients"])
    assert not (folder / "events.jsonl").exists()
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["steps"] == 6 and config["settings"]["learning_rate"] > 0
    assert config["model"]["hidden_size"] == 32 and config["model"]["vocab_size"] == 384
    assert config["device"] == "2 x cpu" and config["jax"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tokenizer,) = (tmp_path / "cache").iterdir()
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads(tokenizer.read_text())
    for run in ("delayed", "bf16"):
        (trace,) = (folder / "profile" / run).rglob("*.trace.json.gz")
        assert b"jit_step" in gzip.decompress(trace.read_bytes())
        assert f"the profile of steps 2 to 3 is below {folder / 'profile' / run}" in finished.stdout

    last = finished.stdout.splitlines()[-1]
    assert re.search(r"delayed \d\.\d+, bf16 \d\.\d+, difference [+-]\d+\.\d+ %", last) and str(folder) in last
    assert "the model generates" in finished.stdout
    for shown in ("delayed 6/6 |", "bf16 6/6 |", "loss ", "val ", " tok/s", " left"):
        assert shown in finished.stderr  # the progress bar


def test_a_name_that_is_taken_gets_a_number(book, tmp_path, capsys):
    taken = tmp_path / "tiny-current" / "metrics.jsonl"
    taken.parent.mkdir()
    taken.write_text("an earlier run\n")
    arguments = [*SMALL, "--data", str(book), "--recipe", "current", "--fp8-head", "--output", str(tmp_path)]
    assert train.main(arguments) == 0
    assert taken.read_text() == "an earlier run\n"
    assert (tmp_path / "tiny-current-2" / "metrics.jsonl").exists()
    assert "exists already" in capsys.readouterr().out


def test_a_disk_that_fills_during_training_is_one_sentence(book, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train, "train", full)
    assert train.main([*SMALL, "--data", str(book), "--output", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last and str(tmp_path) in last


def interrupt_after(batches, monkeypatch):
    """Ctrl-C while the batch after so many is made."""
    count, make = iter(range(batches)), batching.training_batch

    def training_batch(*arguments):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setattr(batching, "training_batch", training_batch)


@pytest.mark.parametrize(("batches", "steps"), [(0, [0]), (4, [0, 3, 4])], ids=["first step", "later"])
def test_an_interrupted_run_leaves_its_log_and_the_curves_so_far(batches, steps, book, tmp_path, capsys, monkeypatch):
    interrupt_after(batches, monkeypatch)
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--eval-every", "3", "--output", str(tmp_path)]
    assert train.main([*arguments, "--name", "mine"]) == 130
    rows = [json.loads(line) for line in (tmp_path / "mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == steps
    assert all(math.isfinite(row["loss"]) for row in rows if row["step"])
    assert (tmp_path / "mine/loss.png").read_bytes().startswith(b"\x89PNG")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"interrupted after step {steps[-1]} of 6 of bf16" in last and str(tmp_path / "mine") in last


def test_an_interruption_before_the_first_step_leaves_the_configuration(book, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    assert train.main([*SMALL, "--data", str(book), "--output", str(tmp_path), "--name", "mine"]) == 130
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    assert "interrupted before the first step" in capsys.readouterr().err
    monkeypatch.setattr(data, "read_corpus", interrupted)
    assert train.main(["--output", str(tmp_path / "other")]) == 130
    assert not (tmp_path / "other").exists()


def test_losses_that_are_not_finite_end_the_run(book, tmp_path, capsys):
    """After three steps that changed nothing, each with what is wrong."""
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--learning-rate", "1e38", "--output", str(tmp_path)]
    assert train.main(arguments) == 1
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert "3 steps of bf16 in a row were skipped, the last of them is 4: its loss is nan; " in last
    assert "lower --learning-rate" in last
    assert printed.out.count("of bf16 was skipped: its loss is nan; ") == 3
    rows = [json.loads(line) for line in (tmp_path / "tiny-bf16/events.jsonl").read_text().splitlines()]
    assert [(row["step"], row["event"]) for row in rows] == [
        (2, "skipped"),
        (3, "skipped"),
        (4, "skipped"),
        (4, "stopped"),
    ]
    assert all(row["loss"] is None and "not finite" in row["fault"] for row in rows)
    assert (tmp_path / "tiny-bf16/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # the next test shows it, and what jax says
def test_the_command_itself_exits_with_2(tmp_path):
    finished = run_command("--restart", "--output", tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == "python -m jax_fp8 train: Unrecognized options: --restart (--help lists the options)\n"


def test_an_environment_that_names_no_processes(monkeypatch):
    """Of jax itself, which must not have been asked for devices before."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "KUBERNETES", "JAX_COORDINATOR"))]:
        monkeypatch.delenv(name)
    finished = run_command("--distributed")
    assert finished.returncode == 2
    assert finished.stderr.startswith("python -m jax_fp8 train: --distributed needs Slurm, Open MPI or Kubernetes")
    assert finished.stderr.endswith("give --coordinator, --num-processes and --process-id\n")
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize("shell", ["{} 2>&1 | head -1", "{} >&- 2>&-"], ids=["a reader that goes", "no streams"])
def test_a_run_that_nobody_reads_saves_its_checkpoint(shell, book, tmp_path):
    arguments = [*SMALL[:-4], "--sample-tokens", "0", "--steps", "2", "--checkpoint-every", "2", "--recipe", "bf16"]
    arguments += ["--data", str(book), "--output", str(tmp_path), "--name", "mine"]
    command = shlex.join([*COMMAND, *arguments])
    script = f"set -o pipefail; {shell.format(command)}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (finished.returncode, finished.stderr) == (0, "") and len(finished.stdout.splitlines()) <= 1
    assert json.loads((tmp_path / "mine/checkpoints/2/notes/metadata").read_text())["step"] == 2
    assert (tmp_path / "mine/loss.png").exists()


# --- without the extra ------------------------------------------------------------------------------------------------

EXTRA = (
    "tyro",
    "tqdm",
    "matplotlib",
    "tokenizers",
    "tensorboardX",
)  # and orbax and safetensors, which Flax needs itself
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRA}))  # as if they were not installed
from jax_fp8 import cli
statuses = [cli.main([command]) for command in ("train", "generate", "export")]
sys.exit(statuses != [2, 2, 2] or cli.main(["doctor"]))
"""


def test_only_a_run_needs_the_extra():
    listed = importlib.metadata.requires("jax_fp8") or []
    assert all(any(line.startswith(f"{name};") and '"train"' in line for line in listed) for name in EXTRA)
    finished = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert finished.returncode == 0 and "FP8 training works here" in finished.stdout, finished.stderr
    assert finished.stderr.splitlines() == [
        f"python -m jax_fp8 {command}: needs the extra `train`, got no tyro; "
        '`pip install "jax_fp8[train]"`, or in a checkout `pip install ".[train]"`'
        for command in ("train", "generate", "export")
    ]


def test_a_package_that_is_broken_is_not_called_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_fp8.run.batches", None)
    monkeypatch.delitem(sys.modules, "jax_fp8.run.train", raising=False)
    monkeypatch.delattr("jax_fp8.run.train", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"jax_fp8\.run\.batches"):
        cli.main(["train"])
