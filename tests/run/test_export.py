"""`python -m jax_fp8 export`: the params of a run as a file for other programs; what cannot be is one sentence."""

import json

import chats
import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import cli
from jax_fp8.run import checkpoints, export, job, resuming, settings

CONFIG = fp8.GPTConfig(vocab_size=256, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=16)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The exit status, and what is printed; there is a run `mine` that has not been trained."""
    monkeypatch.chdir(tmp_path)
    chosen = settings.defaults("tiny")
    model = job.make_model(chosen, CONFIG, chosen.recipe)
    variables = jax.jit(model.init)(jax.random.key(1), np.zeros((1, 16), np.int32))
    state = fp8.TrainState.create(variables=variables, tx=fp8.fused_adamw(1e-3))
    (tmp_path / "runs/mine").mkdir(parents=True)
    with checkpoints.Checkpoints(tmp_path / "runs/mine/checkpoints", 1, 2, False) as kept:
        kept.save(3, state, resuming.describe_run(chosen, CONFIG, "bytes", "text"))

    def run(*arguments):
        return export.main([str(argument) for argument in arguments]), *capsys.readouterr()

    run.params = variables["params"]
    return run


def test_a_run_becomes_a_file_and_a_model_of_hugging_face(run, tmp_path, capsys):
    status, said, error = run("mine", "--to", "mine.safetensors")
    assert (status, error) == (0, "")
    assert said == "mine.safetensors has runs/mine after step 3, delayed; its tokens are bytes\n"
    assert fp8.load_config("mine.safetensors") == CONFIG
    jax.tree.map(np.testing.assert_array_equal, fp8.load_params("mine.safetensors"), run.params)
    assert cli.main(["convert", "--from", "mine.safetensors", "--to", "huggingface", "theirs"]) == 0
    config, params = fp8.load_huggingface("theirs")
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, run.params)
    assert json.loads((tmp_path / "theirs/config.json").read_text())["model_type"] == "gpt2"


def test_a_folder_with_the_tokenizer_of_another_model(run, tmp_path):
    """Which its model would then be read with, or which would be lost."""
    (tmp_path / "tokenizer.json").write_text("another")
    status, said, error = run("mine", "--to", "mine.safetensors")
    assert (status, said) == (2, "") and len(error.splitlines()) == 1
    assert "--to must be in a folder without another model's tokenizer.json, got tokenizer.json; choose" in error
    assert not (tmp_path / "mine.safetensors").exists() and (tmp_path / "tokenizer.json").read_text() == "another"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "--to", "a.safetensors"], "a run must be a folder, or the name of one in runs, got 'nowhere'"),
        (["mine", "--to", "a.bin"], "--to must be a file with the ending .safetensors, got a.bin"),
        (["mine", "--to", "nowhere/a.safetensors"], "params must find room in nowhere/a.safetensors, got"),
        (["mine"], "(--help lists the options)"),
    ],
)
def test_what_cannot_be_written(arguments, sentence, run, tmp_path):
    status, said, error = run(*arguments)
    assert (status, said) == (2, "")
    assert sentence in error and len(error.splitlines()) == 1 and error.startswith("python -m jax_fp8 export: ")
    assert not list(tmp_path.glob("*.safetensors"))


def test_tokenizer_files_go_with_a_converted_model(tmp_path, capsys):
    """In both directions, and never over those of another model."""
    config, _ = chats.write_model(tmp_path / "theirs")
    chats.write_tokenizer(tmp_path / "theirs", in_file_of_its_own=True)
    (tmp_path / "mine").mkdir()
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    into = ["convert", "--from", "huggingface", str(tmp_path / "theirs"), "--to", str(tmp_path / "mine/a.safetensors")]
    assert cli.main(into) == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["a.safetensors", *names]
    back = ["convert", "--from", into[-1], "--to", "huggingface", str(tmp_path / "again")]
    assert cli.main(back) == 0
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert fp8.load_huggingface(tmp_path / "again")[0] == config
    capsys.readouterr()
    (tmp_path / "mine/tokenizer.json").write_text("{}")
    (tmp_path / "mine/a.safetensors").unlink()
    assert cli.main(into) == 1
    assert "without another model's tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "mine/a.safetensors").exists()
