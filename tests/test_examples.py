"""The example as a user meets it: what it writes, and what it says when it cannot run."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 6".split()


def run_script(*arguments):
    flags = re.sub(r"(?<=device_count=)\d+", "2", os.environ["XLA_FLAGS"])
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


TOGETHER = "--coordinator localhost:1234 --num-processes 2 --process-id 0".split()
PIPE = "--mesh pipe=2 --microbatches 4".split()
CANNOT_RUN = {
    "missing path": (["--data", "nowhere.txt"], "nowhere.txt does not exist"),
    "hidden size": (["--hidden-size", "72"], "--hidden-size must be a multiple of 16"),
    "heads": (["--num-heads", "5"], "--num-heads must divide --hidden-size"),
    "no heads": (["--num-heads", "0"], "--num-heads must be at least 1"),
    "preset": (["--preset", "gpt5"], "gpt2-124m"),
    "recipe": (["--recipe", "fp4"], "delayed"),
    "tokenizer": (["--tokenizer", "words"], "bytes"),
    "no such flag": (["--restart"], "--restart"),
    "no number": (["--steps", "many"], "many"),
    "no value": (["--steps"], "--steps"),
    "no steps": (["--steps", "0"], "--steps must be at least 1"),
    "large mesh": (["--mesh", "data=4096", "--batch-size", "4096"], "must not exceed the 8 cpu device(s)"),
    "large mesh of two axes": (["--mesh", "fsdp=4,tensor=4"], "fsdp=4,tensor=4 must not exceed the 8"),
    "mesh axis": (["--mesh", "data=2,expert=2"], "'expert' in 'data=2,expert=2'"),
    "no mesh": (["--mesh", ""], "may have the axes pipe, data, fsdp, tensor, got ''"),
    "axis twice": (["--mesh", "data=2,tensor=2,data=2"], "got data twice"),
    "axis of size 0": (["--mesh", "data=2,tensor=0"], "tensor a size of at least 1"),
    "axis without a size": (["--mesh", "tensor"], "tensor a size of at least 1"),
    "axis of a negative size": (["--mesh", "fsdp=-2"], "fsdp a size of at least 1"),
    "mesh and batch": (["--mesh", "data=2", "--batch-size", "3", "--seq-len", "16"], "must divide the 3 sequences"),
    "mesh and microbatch": (["--mesh", "data=2,fsdp=4", "--microbatches", "2"], "data x fsdp = 8, which must divide"),
    "odd part of a microbatch": (["--mesh", "data=8", "--seq-len", "24"], "each device must have a multiple of 16"),
    "heads on a mesh": (["--mesh", "tensor=8"], "tensor=8 must divide the 4 attention heads"),
    "width on a mesh": (
        ["--mesh", "tensor=4", "--hidden-size", "96", "--num-heads", "4"],
        "--hidden-size must be a multiple of 16 on each of tensor=4 devices, got 96",
    ),
    "vocabulary on a mesh": (
        ["--mesh", "tensor=3", "--hidden-size", "96", "--num-heads", "6"],
        "the vocabulary must be a multiple of 3 with tensor=3, got 256",
    ),
    "sequence without tensor": (["--mesh", "data=2", "--sequence-parallel"], "add tensor=2"),
    "sequence that is not divided": (
        ["--mesh", "tensor=4", "--sequence-parallel", "--seq-len", "26"],
        "tensor=4 must divide a sequence, got --seq-len 26",
    ),
    "sums over one device": (["--mesh", "tensor=2", "--gradient-dtype", "bfloat16"], "sums over data, fsdp and pipe"),
    "a schedule that does not exist": (
        ["--mesh", "pipe=2", "--schedule", "2f2b"],
        "--schedule must be one of 1f1b, gpipe, interleaved, zero-bubble, got '2f2b'",
    ),
    "a schedule without pipe": (["--schedule", "1f1b"], "--schedule is about the axis pipe, got --mesh data=1"),
    "chunks without pipe": (["--chunks", "2"], "--chunks is about the axis pipe"),
    "chunks of another schedule": ([*PIPE, "--schedule", "gpipe", "--chunks", "2"], "interleaved, got gpipe; leave"),
    "chunks of the default schedule": ([*PIPE, "--chunks", "2"], "--chunks is about --schedule interleaved, got 1f1b"),
    "negative chunks": ([*PIPE, "--schedule", "interleaved", "--chunks", "-1"], "--chunks must be 2 or more, got -1"),
    "fewer microbatches than stages": (
        ["--mesh", "pipe=4", "--microbatches", "2"],
        "pipe=4 needs at least 4 microbatches, got --microbatches 2",
    ),
    "microbatches of interleaved": (
        [*PIPE[:3], "3", "--batch-size", "6", "--schedule", "interleaved"],
        "needs a multiple of pipe=2 microbatches, got --microbatches 3",
    ),
    "layers on stages": ([*PIPE, "--num-layers", "5"], "each device of pipe=2 must have as many layers, got --num-la"),
    "layers in chunks": (
        [*PIPE, "--schedule", "interleaved", "--chunks", "3"],
        "pipe=2 with 3 chunks each must have as many layers, got --num-layers 4; make it a multiple of 6",
    ),
    "environment and coordinator": (["--distributed", *TOGETHER], "got also --coordinator; give one"),
    "coordinator alone": (["--coordinator", "localhost:1234"], "got no --num-processes; give all three"),
    "process alone": (["--process-id", "0"], "got no --coordinator"),
    "coordinator without a port": (["--coordinator", "localhost", *TOGETHER[2:]], "must be HOST:PORT"),
    "coordinator with a bad port": (["--coordinator", "localhost:99999", *TOGETHER[2:]], "must be HOST:PORT"),
    "no processes": ([*TOGETHER[:3], "0", *TOGETHER[4:]], "--num-processes must be at least 1, got 0"),
    "process beyond the last": ([*TOGETHER[:5], "2"], "--process-id must be from 0 to 1, got 2"),
    "microbatches": (["--microbatches", "3"], "--microbatches must divide --batch-size"),
    "odd microbatch": (["--batch-size", "3", "--seq-len", "10"], "multiple of 16"),
    "comparing bf16": (["--recipe", "bf16", "--compare"], "--compare"),
    "fast bf16": (["--recipe", "bf16", "--fast"], "--fast and --fp8-head are about FP8"),
    "bf16 with an FP8 head": (["--recipe", "bf16", "--fp8-head"], "--recipe delayed"),
    "name": (["--name", "../mine"], "--name must be a plain folder name"),
    "parent folder": (["--name", ".."], "--name must be a plain folder name"),
    "learning rate": (["--learning-rate", "nan"], "--learning-rate"),
    "no learning": (["--learning-rate", "0"], "--learning-rate must be a positive number, got 0.0"),
    "falling learning rate": (["--learning-rate", "-1e-3"], "--learning-rate"),
    "infinite learning rate": (["--learning-rate", "inf"], "--learning-rate"),
    "negative steps": (["--steps", "-1"], "--steps must be at least 1"),
    "no batch": (["--batch-size", "0"], "--batch-size must be at least 1"),
    "no sequence": (["--seq-len", "-16"], "--seq-len must be at least 1"),
    "no microbatches": (["--microbatches", "0"], "--microbatches must be at least 1"),
    "no layers": (["--num-layers", "-2"], "--num-layers must be at least 1"),
    "no width": (["--hidden-size", "-16"], "--hidden-size must be a multiple of 16"),
    "no validation": (["--eval-every", "0"], "--eval-every must be at least 1"),
    "sample": (["--sample-tokens", "-5"], "--sample-tokens must not be negative, got -5"),
    "negative seed": (["--seed", "-1"], "--seed must be from 0"),
    "large seed": (["--seed", str(2**63)], "--seed must be from 0"),
    "vocabulary": (["--tokenizer", "bpe", "--vocab-size", "10"], "--vocab-size"),
    "vocabulary of bytes": (["--vocab-size", "-1"], "--vocab-size"),
}


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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 100, "UTF-8"),
        (b"\0\1" * 5000, "UTF-8"),
        ("ä".encode("latin1"), "iconv"),
    ],
    ids=["PNG", "zeros", "Latin-1"],
)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_what_is_not_text_is_one_sentence(content, expected, in_folder, example, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("first", "second") if in_folder else ("picture.png",):
        (folder / name).write_bytes(content)
    data = folder if in_folder else folder / "picture.png"
    code = example("train_gpt").main(["--data", str(data), "--output", str(tmp_path / "runs")])
    check_one_sentence(code, capsys.readouterr(), expected)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_found_before_training(example, book, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    code = example("train_gpt").main([*SMALL, "--data", str(book), "--output", str(tmp_path / "file")])
    check_one_sentence(code, capsys.readouterr(), "choose one by --output")


@pytest.fixture
def small_disk():
    """Files may grow to 256 KiB in this process, which is what a full disk looks like to it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_found_before_training(example, book, tmp_path, capsys, small_disk):
    code = example("train_gpt").main([*SMALL, "--data", str(book), "--output", str(tmp_path / "runs")])
    check_one_sentence(code, capsys.readouterr(), "free some space")
    assert not list((tmp_path / "runs").iterdir())


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


def check_one_sentence(code, printed, expected):
    assert code == 2
    assert len(printed.err.splitlines()) == 1 and "Traceback" not in printed.err
    assert expected in printed.err


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


def test_a_loss_that_is_not_finite_ends_the_run(example, book, tmp_path, capsys):
    arguments = [*SMALL, "--data", str(book), "--recipe", "bf16", "--learning-rate", "1e38", "--output", str(tmp_path)]
    assert example("train_gpt").main(arguments) == 1
    assert "lower --learning-rate" in capsys.readouterr().err.splitlines()[-1]
