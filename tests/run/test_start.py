"""Runs that begin with a model: its params bit for bit, its loss, its tokenizer; exported, resumed, and refused."""

import json
import shutil

import chats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import cpus, free_port, run_processes

import jax_fp8 as fp8
from jax_fp8.run import checks, export, generate, train
from jax_fp8.run.job import prepare
from jax_fp8.run.settings import parse
from jax_fp8.run.start import begin_from

FLAGS = "--chat --steps 4 --eval-every 2 --seq-len 64 --batch-size 4 --sample-tokens 4".split()
STILL = ["--learning-rate", "1e-30", "--weight-decay", "0"]  # so small that no param changes


@pytest.fixture
def tune(tmp_path, capsys):
    """The exit status of a run that begins with the model in tmp_path/model, and what it printed."""
    chats.write_tokenizer(tmp_path / "model")
    chats.write_lines(tmp_path / "chat.jsonl", chats.conversations(90))

    def tune(*flags, start="model"):
        begin = [] if start is None else ["--init-from", str(tmp_path / start)]
        given = ["--data", str(tmp_path / "chat.jsonl"), *FLAGS, "--output", str(tmp_path / "runs")]
        status = train.main([*begin, *given, "--cache", str(tmp_path / "cache"), *map(str, flags)])
        return status, *capsys.readouterr()

    tune.arguments = ["--init-from", str(tmp_path / "model"), "--data", str(tmp_path / "chat.jsonl"), *FLAGS]
    tune.arguments += ["--cache", str(tmp_path / "cache")]
    return tune


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(params, expected):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize(
    ("recipe", "mesh", "dtype"), [("bf16", "data=1", "float32"), ("delayed", "data=2,fsdp=2", "bfloat16")]
)
def test_a_model_goes_through_a_run_bit_for_bit_and_has_its_own_loss(recipe, mesh, dtype, tune, tmp_path):
    config, params = chats.write_model(tmp_path / "model", dtype=jnp.dtype(dtype))
    flags = ["--recipe", recipe, "--mesh", mesh, "--param-dtype", dtype, "--name", "mine"]
    status, _, error = tune(*flags, *STILL, "--export", tmp_path / "out", "--checkpoint-every", 4)
    assert status == 0, error[-2000:]
    exported, after = fp8.load_huggingface(tmp_path / "out")
    assert exported == config
    assert_same(after, jax.tree.map(lambda param: np.asarray(param, jnp.dtype(dtype)), params))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (tmp_path / "out/tokenizer_config.json").read_bytes() == (
        tmp_path / "model/tokenizer_config.json"
    ).read_bytes()

    job = prepare(parse(tune.arguments))
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    loss = jax.jit(fp8.next_token_loss(model))
    held_out = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), job.held_out.validation())
    logged = rows(tmp_path / "runs/mine")
    tolerance = 1e-3
    assert logged[0]["val_loss"] == pytest.approx(float(loss({"params": params}, held_out)), rel=tolerance)
    other = chats.write_model(tmp_path / "other", seed=1)[1]
    assert logged[0]["val_loss"] != pytest.approx(float(loss({"params": other}, held_out)), rel=tolerance)


def test_a_run_continues_without_the_model_that_it_began_with(tune, tmp_path):
    chats.write_model(tmp_path / "model")
    flags = ["--recipe", "delayed", "--learning-rate", "1e-3", "--checkpoint-every", 2]
    assert tune(*flags, "--name", "whole")[0] == 0
    assert tune(*flags, "--name", "mine", "--steps", 4)[0] == 0
    shutil.rmtree(tmp_path / "runs/mine/checkpoints/4")
    shutil.move(tmp_path / "model", tmp_path / "gone")
    config = tmp_path / "runs/mine/config.json"
    status, said, error = tune("--config", config, "--resume", "mine", start=None)
    assert status == 0, error[-2000:]
    assert "mine continues after step 2" in said
    mine, whole = (
        [(row["step"], row["loss"], row["val_loss"]) for row in rows(tmp_path / "runs" / n)] for n in ("mine", "whole")
    )
    assert mine == whole and whole[-1][2] < whole[0][2] - 0.01
    status, _, error = tune("--resume", "mine", "--tokenizer", tmp_path / "gone", start=None)
    assert status == 2 and "--init-from must be" in error and "as in the checkpoint, got no model to begin" in error


def test_a_run_and_a_file_are_models_to_begin_with(tune, tmp_path, capsys, monkeypatch):
    config, _ = chats.write_model(tmp_path / "model")
    assert tune("--learning-rate", "1e-3", "--checkpoint-every", 4, "--name", "first")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert export.main(["first", "--to", "alone/first.safetensors"]) == 2  # no such folder
    (tmp_path / "alone").mkdir()
    assert export.main(["first", "--to", "alone/first.safetensors"]) == 0
    assert (tmp_path / "alone/tokenizer_config.json").exists()
    first = fp8.load_params(tmp_path / "alone/first.safetensors")
    for start in ("runs/first", "alone/first.safetensors"):
        out = tmp_path / f"out-{len(start)}"
        status, _, error = tune(*STILL, "--export", out, "--recipe", "current", start=start)
        assert status == 0, error[-2000:]
        exported, params = fp8.load_huggingface(out)
        assert exported == config
        assert_same(params, jax.tree.map(np.asarray, first))
    capsys.readouterr()
    assert generate.main([str(out), "--prompt", "what is", "--tokens", "4"]) == 0
    assert generate.main(["first", "--prompt", "what is", "--tokens", "4"]) == 0


LORA = ["--lora", 4, "--lora-alpha", 8, "--learning-rate", "1e-2", "--checkpoint-every", 2]


@pytest.mark.parametrize(
    ("recipe", "mesh"),
    [
        ("delayed", "data=1"),
        ("delayed", "fsdp=2"),
        ("current", "tensor=2"),
        pytest.param("current", "data=2", marks=pytest.mark.slow),  # other tests freeze by each recipe, and on meshes
        pytest.param("bf16", "data=1", marks=pytest.mark.slow),
    ],
)
def test_adapters_are_tuned_on_a_frozen_model(recipe, mesh, tune, tmp_path, capsys, monkeypatch):
    """They learn, only they change, a resumed run has the losses of a whole one, and the export has them merged."""
    monkeypatch.chdir(tmp_path)
    config, before = chats.write_model(tmp_path / "model")
    flags = [*LORA, "--recipe", recipe, "--mesh", mesh, "--diagnose-every", 3]
    status, _, error = tune(*flags, "--name", "whole", "--export", tmp_path / "out")
    assert status == 0, error[-2000:]
    assert tune(*flags, "--name", "mine")[0] == 0
    shutil.rmtree(tmp_path / "runs/mine/checkpoints/4")
    assert tune(*flags, "--resume", "mine")[0] == 0
    mine, whole = (
        [(row["step"], row["loss"], row["val_loss"]) for row in rows(tmp_path / "runs" / n)] for n in ("mine", "whole")
    )
    assert mine == whole and whole[-1][2] < whole[0][2] - 0.05
    assert export.main(["whole", "--to", "whole.safetensors"]) == 0
    exported, after = fp8.load_huggingface(tmp_path / "out")
    assert exported == config
    assert_same(after, jax.tree.map(np.asarray, fp8.load_params(tmp_path / "whole.safetensors")))
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        new = after
        for key in path:
            new = new[key.key]
        change = np.linalg.norm(np.asarray(new) - old) / np.linalg.norm(old)
        if path[-1].key != "kernel":
            assert change == 0, path
        else:  # the adapter, and in FP8 the rounding of the frozen kernel
            assert 0.001 < change < 0.3, (path, change)
    capsys.readouterr()
    assert generate.main(["whole", "--prompt", "what is", "--tokens", "4", "--temperature", "0"]) == 0
    status, _, error = tune("--steps", 1, "--eval-every", 1, *STILL, "--recipe", "bf16", start="runs/whole")
    assert status == 0, error[-2000:]  # a run that begins with it has its loss
    begun = rows(tmp_path / "runs/whole-bf16")[0]["val_loss"]
    assert begun == pytest.approx(whole[-1][2], rel=0.01) and begun < whole[0][2] - 0.05


def test_without_adapters_the_same_file_is_left_as_it_was(tune, tmp_path):
    """The control of the test above: adapters that do not learn change nothing but the rounding to FP8."""
    _, before = chats.write_model(tmp_path / "model")
    status, _, error = tune("--lora", 4, "--recipe", "bf16", *STILL, "--export", tmp_path / "out")
    assert status == 0, error[-2000:]
    _, after = fp8.load_huggingface(tmp_path / "out")
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(new, np.asarray(old, new.dtype), rtol=1e-6, atol=1e-9)


def test_params_that_are_frozen_by_a_rule_keep_every_bit(tune, tmp_path):
    _, before = chats.write_model(tmp_path / "model")
    flags = ["--freeze", "embedding|layer_0/", "--learning-rate", "1e-3", "--export", tmp_path / "out"]
    status, _, error = tune(*flags, "--recipe", "delayed")
    assert status == 0, error[-2000:]
    _, after = fp8.load_huggingface(tmp_path / "out")
    for path, old in jax.tree_util.tree_leaves_with_path(before):
        name = "/".join(key.key for key in path)
        new = after
        for key in path:
            new = new[key.key]
        assert np.array_equal(new, old) == name.startswith(("embedding", "layer_0/")), name


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora", 4, "--freeze", "head"], "--lora freezes all params but the adapters, got --freeze too; leave"),
        (["--lora", -1], "--lora must be at least 0, got -1"),
        (["--lora-alpha", 8], "--lora-alpha is for --lora, got 8.0 without it; add --lora"),
        (["--lora", 4, "--lora-alpha", 0], "--lora-alpha must be a positive number, got 0.0"),
        (["--freeze", "(head"], "--freeze must be a regular expression, as for re.search, got '(head'"),
        (["--freeze", "heads"], "a rule of freeze must match at least one param, got 'heads'"),
    ],
)
def test_frozen_params_that_cannot_be_are_one_sentence(flags, words, tune, tmp_path):
    chats.write_model(tmp_path / "model")
    status, _, error = tune(*flags)
    assert status == 2 and words in error and len(error.splitlines()) == 1, error[-1000:]
    assert not (tmp_path / "runs").exists()


def test_adapters_of_a_random_model_are_refused(tune, tmp_path):
    status, _, error = tune("--lora", 4, "--tokenizer", tmp_path / "model", start=None)
    assert status == 2 and "of a model that has learned already, got --lora 4 without --init-from" in error


def test_what_cannot_be_begun_with_is_one_sentence(tune, tmp_path, monkeypatch):
    chats.write_model(tmp_path / "model", max_seq_len=64)
    chats.write_model(tmp_path / "small", vocab=256)
    chats.write_tokenizer(tmp_path / "small")
    chats.write_model(tmp_path / "silent")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    cases = [
        ("model", ["--preset", "tiny"], "--init-from has the shape of the model, got also --preset tiny; leave"),
        ("model", ["--hidden-size", 64], "--init-from has the shape of the model, got also --hidden-size 64"),
        ("model", ["--tokenizer", "bpe"], "--tokenizer bpe learns other tokens than those that the model"),
        ("model", ["--seq-len", 128], "--seq-len must be at most the 64 tokens that the model of --init-from"),
        ("small", [], "--tokenizer must have at most the 256 tokens of the model of --init-from, got 30"),
        ("silent", [], "must have a tokenizer.json, got none; name the tokenizer with --tokenizer"),
        ("nowhere", [], "--init-from must be a folder, or the name of one in"),
        ("full", [], "full must have a checkpoint, got none; train with --checkpoint-every"),
        ("model", ["--export", tmp_path / "full"], "--export must name a new or an empty folder, got"),
    ]  # fmt: skip
    for start, flags, words in cases:
        status, _, error = tune(*flags, start=start)
        assert status == 2 and words in error and len(error.splitlines()) == 1, (start, flags, error[-1000:])
    assert not (tmp_path / "runs").exists() and not (tmp_path / "a").exists()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"--init-from a run needs one process, .* got 2; write the run to a file"):
        begin_from(parse([*tune.arguments, "--init-from", str(tmp_path / "full")]), None)
    with pytest.raises(ValueError, match="--export writes params that one process has, got several processes"):
        export.check_can_export(parse([*tune.arguments, "--export", str(tmp_path / "a"), "--num-processes", "2"]), None)
    assert checks.check(parse(tune.arguments)) is None


def test_a_shape_that_hugging_face_does_not_have_is_refused_before_training(tune, tmp_path):
    flags = ["--preset", "tiny-moe", "--tokenizer", tmp_path / "model", "--export", tmp_path / "out"]
    assert prepare(parse([*tune.arguments[2:], *map(str, flags)])).model.num_experts == 4
    settings = parse([*tune.arguments, "--export", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="Hugging Face"):
        export.check_can_export(settings, fp8.GPTConfig.preset("tiny", positions="rotary"))


@pytest.mark.slow  # each half is tested: which rows a process reads, and what a run begins with
def test_a_model_is_tuned_in_two_processes(tune, tmp_path):
    """On conversations, with a resume for which the model is gone; the losses are those of one process."""
    chats.write_model(tmp_path / "model")
    options = [*tune.arguments, "--recipe", "bf16", "--mesh", "fsdp=2", "--learning-rate", "1e-3"]
    options += ["--output", str(tmp_path / "runs"), "--checkpoint-every", "2"]
    assert train.main([*options, "--name", "one"]) == 0

    def both(*flags):
        together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2, "--process-id"]
        commands = [["-m", "jax_fp8", "train", *options, *flags, *together, process] for process in range(2)]
        finished = run_processes(*commands, environments=cpus(1, 2))
        assert [process.returncode for process in finished] == [0, 0], finished[0].stderr + finished[1].stderr

    both("--name", "two", "--steps", "2")
    shutil.move(tmp_path / "model", tmp_path / "gone")
    both("--resume", "two")
    one, two = (rows(tmp_path / "runs" / name) for name in ("one", "two"))
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 2, 4]
    # The first two steps had the schedule of two steps: their learning rate was another one.
    np.testing.assert_allclose(two[0]["val_loss"], one[0]["val_loss"], rtol=1e-5)
    np.testing.assert_allclose(two[1]["loss"], one[1]["loss"], rtol=1e-2)
    assert two[2]["val_loss"] < two[0]["val_loss"]
