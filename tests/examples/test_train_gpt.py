"""The example as a user meets it: what it writes, and what it says when it cannot run."""

import errno
import gzip
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 6".split()


def run_script(*arguments):
    flags = re.sub(r"(?<=device_count=)\d+", "2", os.environ["XLA_FLAGS"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_run_leaves_log_configuration_and_picture(book, tmp_path):
    arguments = [*SMALL, "--data", book, "--tokenizer", "bpe", "--vocab-size", 300, "--cache", tmp_path / "cache"]
    arguments += ["--compare", "--mesh", "data=2", "--microbatches", 2, "--eval-every", 3, "--profile", "2:3"]
    arguments += ["--diagnose-every", 4, "--tensorboard", "--output", tmp_path / "runs"]
    finished = run_script(*arguments, "--name", "mine")
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
    assert "the model writes" in finished.stdout
    for shown in ("delayed 6/6 |", "bf16 6/6 |", "loss ", "val ", " tok/s", " left"):
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


def test_the_head_of_a_model_by_tile_is_by_tile(example, book):
    script = example("train_gpt")
    job = script.prepare(script.parse([*SMALL, "--data", str(book), "--recipe", "block", "--fp8-head"]))
    model = script.make_model(job.settings, job.model, "block")
    assert model.recipe == model.head_recipe == script.fp8.BlockScaling()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_flags_choose_what_is_in_fp8_and_how_it_adds(name, example, book, tmp_path):
    script = example("train_gpt")
    plain, quick = (
        script.prepare(script.parse([*SMALL, "--data", str(book), *flags])) for flags in ([], ["--fast", "--fp8-head"])
    )

    def model(job, recipe):
        return script.make_model(job.settings, job.model, recipe)

    assert model(plain, name).head_recipe is None
    assert model(plain, name).recipe == example("job").RECIPES[name]()
    assert model(quick, name).head_recipe == script.fp8.CurrentScaling()
    assert model(quick, name).recipe.split_accumulator == ()
    baseline = model(quick, "bf16")
    assert (baseline.recipe, baseline.head_recipe) == (None, None)


def test_attention_in_fp8(example, book):
    script = example("train_gpt")
    wide = [*SMALL, "--data", str(book), "--fp8-attention", "--hidden-size", "256", "--num-heads", "2"]
    job = script.prepare(script.parse([*wide, "--seq-len", "128"]))
    assert script.make_model(job.settings, job.model, "delayed").fp8_attention
    assert not script.make_model(job.settings, job.model, "bf16").fp8_attention
    for flags, sentence in (
        (["--seq-len", "64"], "--fp8-attention needs a multiple of 128 tokens, got --seq-len 64"),
        (["--seq-len", "128", "--num-heads", "4"], "--fp8-attention needs heads of 128 features, got 64"),
    ):
        with pytest.raises(ValueError, match=sentence):
            script.prepare(script.parse([*wide, *flags]))


def test_a_disk_that_fills_during_training_is_one_sentence(example, book, tmp_path, capsys, monkeypatch):
    def train(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    script = example("train_gpt")
    monkeypatch.setattr(script, "train", train)
    assert script.main([*SMALL, "--data", str(book), "--output", str(tmp_path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last and str(tmp_path) in last


def interrupt_after(script, batches, monkeypatch):
    """Ctrl-C while the batch after so many is made."""
    count, make = iter(range(batches)), script.training_batch

    def training_batch(*arguments):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setattr(script, "training_batch", training_batch)


@pytest.mark.parametrize(("batches", "steps"), [(0, [0]), (4, [0, 3, 4])], ids=["first step", "later"])
def test_an_interrupted_run_leaves_its_log_and_the_curves_so_far(
    batches, steps, example, book, tmp_path, capsys, monkeypatch
):
    script = example("train_gpt")
    interrupt_after(script, batches, monkeypatch)
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--eval-every", "3", "--output", str(tmp_path)]
    assert script.main([*arguments, "--name", "mine"]) == 130
    rows = [json.loads(line) for line in (tmp_path / "mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == steps
    assert all(math.isfinite(row["loss"]) for row in rows if row["step"])
    assert (tmp_path / "mine/loss.png").read_bytes().startswith(b"\x89PNG")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"interrupted after step {steps[-1]} of 6 of bf16" in last and str(tmp_path / "mine") in last


def test_an_interruption_before_the_first_step_leaves_the_configuration(example, book, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    script = example("train_gpt")
    monkeypatch.setattr(script, "train", interrupted)
    assert script.main([*SMALL, "--data", str(book), "--output", str(tmp_path), "--name", "mine"]) == 130
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.json"]
    assert "interrupted before the first step" in capsys.readouterr().err
    monkeypatch.setattr(example("job"), "read_corpus", interrupted)
    assert script.main(["--output", str(tmp_path / "other")]) == 130
    assert not (tmp_path / "other").exists()


def test_losses_that_are_not_finite_end_the_run(example, book, tmp_path, capsys):
    """After three steps that changed nothing, each with what is wrong."""
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--learning-rate", "1e38", "--output", str(tmp_path)]
    assert example("train_gpt").main(arguments) == 1
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
def test_the_script_itself_exits_with_2(tmp_path):
    finished = run_script("--restart", "--output", tmp_path)
    assert finished.returncode == 2
    assert finished.stderr == "train_gpt.py: Unrecognized options: --restart (--help lists the options)\n"


def test_an_environment_that_names_no_processes(monkeypatch):
    """Of jax itself, which must not have been asked for devices before."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "KUBERNETES", "JAX_COORDINATOR"))]:
        monkeypatch.delenv(name)
    finished = run_script("--distributed")
    assert finished.returncode == 2
    assert finished.stderr.startswith("train_gpt.py: --distributed needs Slurm, Open MPI or Kubernetes")
    assert finished.stderr.endswith("give --coordinator, --num-processes and --process-id\n")
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize("shell", ["{} 2>&1 | head -1", "{} >&- 2>&-"], ids=["a reader that goes", "no streams"])
def test_a_run_that_nobody_reads_saves_its_checkpoint(shell, book, tmp_path):
    arguments = [*SMALL[:-4], "--sample-tokens", "0", "--steps", "2", "--checkpoint-every", "2", "--recipe", "bf16"]
    arguments += ["--data", str(book), "--output", str(tmp_path), "--name", "mine"]
    command = shlex.join([sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments])
    script = f"set -o pipefail; {shell.format(command)}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (finished.returncode, finished.stderr) == (0, "") and len(finished.stdout.splitlines()) <= 1
    assert json.loads((tmp_path / "mine/checkpoints/2/notes/metadata").read_text())["step"] == 2
    assert (tmp_path / "mine/loss.png").exists()


def test_a_run_is_alone_in_its_folder(example, tmp_path):
    """Of two processes that go on with one, as a cluster may start them, the second is refused."""
    record, path = example("record"), tmp_path / "mine"
    path.mkdir()
    first, second = (record.Folder(tmp_path, "mine", 4, existing=record.Existing(path, {})) for _ in range(2))
    with first.alone():
        with pytest.raises(example("notes").CannotResume) as raised, second.alone():
            pass
    assert str(raised.value) == (
        f"a run must be alone in its folder, but another process is writing to {path}; wait until it has ended, or "
        "choose another --name"
    )
    with second.alone():  # the first has ended
        pass


def test_the_trial_of_a_folder_follows_no_link(example, tmp_path):
    record, path, precious = example("record"), tmp_path / "mine", tmp_path / "precious"
    path.mkdir()
    precious.write_text("precious")
    (path / "trial").symlink_to(precious)
    record.Folder(tmp_path, "mine", 4, existing=record.Existing(path, {}))
    assert precious.read_text() == "precious" and [each.name for each in path.iterdir()] == ["trial"]
