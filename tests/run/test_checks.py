"""What cannot be trained is one sentence, with exit status 2, before anything is computed."""

import dataclasses

import pytest

from jax_fp8.models.config import GPTConfig
from jax_fp8.run import checks, settings, train
from jax_fp8.run.devices import make_mesh

SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 6".split()
TOGETHER = "--coordinator localhost:1234 --num-processes 2 --process-id 0".split()
PIPE = "--mesh pipe=2 --microbatches 4".split()
CANNOT_RUN = {
    "missing path": (["--data", "nowhere.txt"], "nowhere.txt does not exist"),
    "hidden size": (["--hidden-size", "72"], "--hidden-size must be a multiple of 16"),
    "heads": (["--num-heads", "5"], "num_heads must divide hidden_size, got num_heads=5 and hidden_size=128"),
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
    "mesh axis": (
        ["--mesh", "data=2,context=2"],
        "each once and with a size of at least 1, got 'data=2,context=2'; say data=2,tensor=4",
    ),
    "experts on a mesh": (
        ["--mesh", "expert=8", "--preset", "tiny-moe", "--batch-size", "8", "--seq-len", "64"],
        "--mesh with expert=8 must divide the model's 4 experts, got --mesh expert=8; choose another size",
    ),
    "no mesh": (
        ["--mesh", ""],
        "must be axes among pipe, data, fsdp, expert, tensor, each once and with a size of at least 1, got ''",
    ),
    "axis twice": (
        ["--mesh", "data=2,tensor=2,data=2"],
        "each once and with a size of at least 1, got 'data=2,tensor=2,data=2'",
    ),
    "axis of size 0": (["--mesh", "data=2,tensor=0"], "a size of at least 1, got 'data=2,tensor=0'"),
    "axis without a size": (["--mesh", "tensor"], "a size of at least 1, got 'tensor'"),
    "axis of a negative size": (["--mesh", "fsdp=-2"], "a size of at least 1, got 'fsdp=-2'"),
    "mesh and batch": (
        ["--mesh", "data=2", "--batch-size", "3", "--seq-len", "16"],
        "--batch-size must be a multiple of 2, data x fsdp x expert = 2 parts of each of 1 microbatches, got 3",
    ),
    "mesh and microbatch": (
        ["--mesh", "data=2,fsdp=4", "--microbatches", "2"],
        "must be a multiple of 16, data x fsdp x expert = 8",
    ),
    "odd part of a microbatch": (["--mesh", "data=8", "--seq-len", "24"], "each device must have a multiple of 16"),
    "heads on a mesh": (
        ["--mesh", "tensor=8"],
        "tensor=8 must divide the query heads of layer_0/attention/query/bias, got 4",
    ),
    "width on a mesh": (
        ["--mesh", "tensor=4", "--hidden-size", "96", "--num-heads", "4"],
        "--hidden-size must be a multiple of 64 with --recipe delayed and --mesh tensor=4, 16 on each device, got 96",
    ),
    "vocabulary on a mesh": (
        ["--mesh", "tensor=3", "--hidden-size", "96", "--num-heads", "6"],
        "tensor=3 must divide the tokens of the vocabulary of embedding, got 256",
    ),
    "sequence without tensor": (
        ["--mesh", "data=2", "--sequence-parallel"],
        "splits rows over the axis `tensor`, which this mesh does not have, got pipe=1,data=2",
    ),
    "sequence by tile": (
        ["--mesh", "tensor=2", "--sequence-parallel", "--recipe", "block"],
        "needs recipes with one scale a tensor, got BlockScaling(",
    ),
    "tiles that fsdp cuts": (
        ["--mesh", "fsdp=2", "--recipe", "block"],
        "--hidden-size must be a multiple of 256 with --recipe block and --mesh fsdp=2, 128 on each device, got 128",
    ),
    "tiles that two axes cut": (
        ["--mesh", "fsdp=2,tensor=2", "--recipe", "block", "--hidden-size", "256"],
        "--hidden-size must be a multiple of 512 with --recipe block and --mesh fsdp=2,tensor=2, 128 on each",
    ),
    "sequence that is not divided": (
        ["--mesh", "tensor=4", "--sequence-parallel", "--seq-len", "26"],
        "tensor=4 must divide a sequence, got --seq-len 26",
    ),
    "sums over one device": (
        ["--mesh", "tensor=2", "--gradient-dtype", "bfloat16"],
        "needs a mesh with data, fsdp, expert or pipe",
    ),
    "a schedule that does not exist": (
        ["--mesh", "pipe=2", "--schedule", "2f2b"],
        "a schedule must be one of gpipe, 1f1b, interleaved, zero-bubble, got '2f2b'",
    ),
    "a schedule without pipe": (
        ["--schedule", "1f1b"],
        "schedule and chunks are about the axis `pipe`, which this mesh does not have, got pipe=1",
    ),
    "chunks without pipe": (["--chunks", "2"], "schedule and chunks are about the axis `pipe`"),
    "chunks of another schedule": (
        [*PIPE, "--schedule", "gpipe", "--chunks", "2"],
        "gpipe has one chunk of layers on each stage, got chunks=2; leave it out, or take interleaved",
    ),
    "chunks of the default schedule": (
        [*PIPE, "--chunks", "2"],
        "1f1b has one chunk of layers on each stage, got chunks=2",
    ),
    "negative chunks": ([*PIPE, "--schedule", "interleaved", "--chunks", "-1"], "--chunks must be at least 0, got -1"),
    "fewer microbatches than stages": (
        ["--mesh", "pipe=4", "--microbatches", "2"],
        "a pipeline needs as many microbatches as stages, or more, got 2 microbatches for 4 stages",
    ),
    "microbatches of interleaved": (
        [*PIPE[:3], "3", "--batch-size", "6", "--schedule", "interleaved"],
        "interleaved needs as many microbatches as stages, or a multiple, got 3 microbatches for 2 stages",
    ),
    "layers on stages": (
        [*PIPE, "--num-layers", "5"],
        "all chunks of all stages must have the same number of layers, got 5 layers for 2 stages",
    ),
    "layers in chunks": (
        [*PIPE, "--schedule", "interleaved", "--chunks", "3"],
        "got 4 layers for 2 stages with 3 chunks each; pass a multiple of 6 layers",
    ),
    "environment and coordinator": (["--distributed", *TOGETHER], "got also --coordinator; give one"),
    "coordinator alone": (["--coordinator", "localhost:1234"], "got no --num-processes; give all three"),
    "process alone": (["--process-id", "0"], "got no --coordinator"),
    "coordinator without a port": (["--coordinator", "localhost", *TOGETHER[2:]], "must be HOST:PORT"),
    "coordinator with a bad port": (["--coordinator", "localhost:99999", *TOGETHER[2:]], "must be HOST:PORT"),
    "no processes": ([*TOGETHER[:3], "0", *TOGETHER[4:]], "--num-processes must be at least 1, got 0"),
    "process beyond the last": ([*TOGETHER[:5], "2"], "--process-id must be from 0 to 1, got 2"),
    "microbatches": (["--microbatches", "3"], "--batch-size must be a multiple of 3"),
    "odd microbatch": (["--batch-size", "3", "--seq-len", "10"], "multiple of 16"),
    "comparing bf16": (["--recipe", "bf16", "--compare"], "--compare"),
    "fast block": (["--recipe", "block", "--fast"], "got --recipe block, which scales the sum of every 128"),
    "fast bf16": (["--recipe", "bf16", "--fast"], "--fast and --fp8-head need an FP8 recipe"),
    "FP8 attention of another recipe": (
        ["--recipe", "current", "--fp8-attention"],
        "--fp8-attention casts with scales from earlier steps, got --recipe current",
    ),
    "FP8 attention in a pipeline": ([*PIPE, "--fp8-attention"], "a pipeline computes attention in bfloat16"),
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
    "sample": (["--sample-tokens", "-5"], "--sample-tokens must be at least 0, got -5"),
    "dropout": (["--dropout", "1"], "dropout_rate must be a finite number of at least 0 and below 1, got 1.0"),
    "dropout in a pipeline": (
        [*PIPE, "--dropout", "0.1"],
        "a pipeline runs layers one by one and passes them no keys, got rngs with a mesh that has the axis pipe",
    ),
    "dropout beside the host": (
        ["--dropout", "0.1", "--remat", "offload:1"],
        "runs layers one by one and passes them no keys, got it with rngs; take another remat",
    ),
    "negative seed": (["--seed", "-1"], "--seed must be from 0"),
    "large seed": (["--seed", str(2**63)], "--seed must be from 0"),
    "vocabulary": (["--tokenizer", "bpe", "--vocab-size", "10"], "--vocab-size"),
    "diagnoses beyond the last step": (
        ["--steps", "9", "--diagnose-every", "10"],
        "--diagnose-every must be at most the 9 steps, got 10; 0 is never",
    ),
    "negative diagnoses": (["--diagnose-every", "-1"], "--diagnose-every must be at most the 450 steps, got -1"),
    "an end after no skips": (["--stop-after-skips", "0"], "--stop-after-skips must be at least 1, got 0"),
    "profile of no steps": (
        ["--profile", "5"],
        "--profile must be FIRST:LAST, two of the steps 1 to 450, got '5'; say",
    ),
    "profile of step 0": (["--profile", "0:3"], "got '0:3'; say --profile 2:5"),
    "profile beyond the last step": (["--profile", "2:4", "--steps", "3"], "1 to 3, got '2:4'; say --profile 2:3"),
    "profile backwards": (["--profile", "5:4"], "got '5:4'"),
    "a decay that is none": (["--decay", "sudden"], "constant"),
    "a decay that rises": (
        ["--final-learning-rate", "1"],
        "--final-learning-rate must be from 0 to --learning-rate 0.001, got 1.0",
    ),
    "an end without a decay": (
        ["--decay", "constant", "--final-learning-rate", "1e-4"],
        "--final-learning-rate needs a decay, got 0.0001 with --decay constant",
    ),
    "a warmup that is all": (["--warmup-steps", "450"], "--warmup-steps must be from 0 to below --steps 450, got 450"),
    "a short decay of another shape": (
        ["--decay-steps", "9"],
        "is for --decay warmup-stable-decay, got --decay linear",
    ),
    "a short decay that is long": (
        ["--decay", "warmup-stable-decay", "--warmup-steps", "50", "--decay-steps", "401"],
        "--decay-steps must be from 1 to the 400 steps after warmup, got 401",
    ),
    "a beta of 1": (["--b2", "1"], "b2 must be a finite number from 0 to below 1, got 1.0"),
    "no epsilon": (["--eps", "0"], "eps must be a finite number above 0, got 0.0"),
    "negative decay of weights": (
        ["--weight-decay", "-1"],
        "weight_decay must be a finite number that is not negative",
    ),
    "a negative norm": (["--max-grad-norm", "-1"], "max_grad_norm must be a finite number above 0, got -1.0"),
    "moments in float16": (["--mu-dtype", "float16"], "bfloat16"),
    "remat": (["--remat", "offload:9"], "remat must be"),
    "validation that is not there": (["--validation-data", "no.txt"], "--validation-data must name a file or a folder"),
    "a device as data": (["--data", "/dev/null"], "/dev/null is something else; name a text file"),
    "more steps than the disk has room for": (["--steps", str(10**15)], "MiB, got No space left on device in"),
    "a model beyond the memory": (
        ["--hidden-size", "1600000", "--num-heads", "2"],
        "params and optimizer state must fit into",
    ),
    "a cache that is a file": (
        ["--tokenizer", "bpe", "--vocab-size", "300", "--cache", __file__],
        "--cache must be a folder that can be written to, got File exists",
    ),
    "vocabulary of bytes": (["--vocab-size", "-1"], "--vocab-size"),
}


def check_one_sentence(code, printed, expected):
    assert code == 2
    assert len(printed.err.splitlines()) == 1 and "Traceback" not in printed.err
    assert expected in printed.err


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_what_cannot_run_is_one_sentence(case, book, tmp_path, capsys, monkeypatch):
    arguments, expected = CANNOT_RUN[case]
    monkeypatch.chdir(tmp_path)
    if "--data" not in arguments:
        arguments = ["--data", str(book), *arguments]
    check_one_sentence(train.main(arguments), capsys.readouterr(), expected)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty"), ("a short story", "at least one batch"), ("short" * 500, "validation")]
)
def test_too_little_text_is_one_sentence(text, expected, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text(text)
    code = train.main(["--data", str(path), "--output", str(tmp_path / "runs")])
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
def test_what_is_not_text_is_one_sentence(content, expected, in_folder, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("first", "second") if in_folder else ("picture.png",):
        (folder / name).write_bytes(content)
    data = folder if in_folder else folder / "picture.png"
    code = train.main(["--data", str(data), "--output", str(tmp_path / "runs")])
    check_one_sentence(code, capsys.readouterr(), expected)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_found_before_training(book, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    code = train.main([*SMALL, "--data", str(book), "--output", str(tmp_path / "file")])
    check_one_sentence(code, capsys.readouterr(), "choose one with --output")


@pytest.fixture
def small_disk():
    """Files may grow to 256 KiB in this process, which is what a full disk looks like to it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_found_before_training(book, tmp_path, capsys, small_disk):
    code = train.main([*SMALL, "--data", str(book), "--output", str(tmp_path / "runs")])
    check_one_sentence(code, capsys.readouterr(), "free some space")
    assert not list((tmp_path / "runs").iterdir())


MODEL = GPTConfig(vocab_size=256, num_layers=1, num_heads=8, hidden_size=256)


@pytest.mark.parametrize(
    ("changes", "flags", "sentence"),
    [
        ({"num_kv_heads": 4, "num_heads": 32}, [], "the width of keys and values must be a multiple of 64"),
        ({"hidden_size": 96}, [], "--hidden-size must be a multiple of 64 with --recipe delayed and --mesh tensor=4"),
        ({"mlp_hidden_size": 96}, [], "the width of the MLP must be a multiple of 64"),
        ({"vocab_size": 288}, ["--fp8-head"], "the vocabulary must be a multiple of 64 with --fp8-head and tensor=4"),
    ],
)
def test_models_that_tensor_does_not_split(changes, flags, sentence):
    model, others = dataclasses.replace(MODEL, **changes), ["--batch-size", "4", "--seq-len", "16", *flags]
    chosen = settings.parse(["--mesh", "tensor=4", *others])
    checks.check_on_mesh(settings.parse(others), make_mesh("data=1"), model)
    checks.check_on_mesh(chosen, make_mesh("tensor=4"), MODEL)
    checks.check_on_mesh(chosen, make_mesh("tensor=4"), dataclasses.replace(MODEL, num_kv_heads=2))
    with pytest.raises(ValueError, match=sentence):
        checks.check_on_mesh(chosen, make_mesh("tensor=4"), model)


def test_curves_need_a_library(monkeypatch):
    chosen = settings.parse(["--tensorboard"])
    checks.check(chosen)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--tensorboard needs tensorboardX, which is not installed; pip install tens"):
        checks.check(chosen)


def test_adapters_in_a_pipeline():
    chosen = settings.parse([*PIPE, "--lora", "4", "--init-from", "there"])
    with pytest.raises(ValueError, match="--lora runs over data, fsdp and tensor, because a pipeline cannot carry"):
        checks.check_on_mesh(chosen, make_mesh("pipe=2"), MODEL)
    checks.check_on_mesh(chosen, make_mesh("tensor=2"), MODEL)
