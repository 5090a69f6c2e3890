"""`python -m jax_fp8 convert`: a folder of Hugging Face into a file and back, without a bit changed."""

import json
import re

import huggingface as oracle
import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import cli

pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.versions


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """The exit status, and what is printed; in a folder with a model in `theirs`."""
    monkeypatch.chdir(tmp_path)
    oracle.write_folder(tmp_path / "theirs", oracle.CASES["qwen2"], oracle.random_tensors(oracle.CASES["qwen2"]))

    def run(words):
        try:
            status = cli.main(["convert", *words.split()])
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_there_and_back(run, tmp_path):
    status, said, error = run("--from huggingface theirs --to mine.safetensors")
    assert (status, error) == (0, "")
    assert said.startswith("qwen2, 2 layers, 0.00B params in float32\n") and "mine.safetensors: 0.00 GB" in said
    assert said.count(" of 0.0 GB\n") >= 5  # tenths
    config, params = fp8.load_huggingface(tmp_path / "theirs")
    assert fp8.load_config("mine.safetensors") == config
    jax.tree.map(np.testing.assert_array_equal, fp8.load_params("mine.safetensors"), params)

    assert run("--from mine.safetensors --to huggingface ours --part-gb 0.00005")[0] == 0
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    again, same = fp8.load_huggingface(tmp_path / "ours")
    assert again == config
    for ours, wanted in zip(jax.tree.leaves(same), jax.tree.leaves(params), strict=True):
        assert ours.tobytes() == wanted.tobytes()


def test_what_can_be_changed_on_the_way(run, tmp_path):
    status, said, _ = run("--from huggingface theirs --to mine --dtype bfloat16")
    assert status == 0 and "params in float32, written in bfloat16\n" in said
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fp8.load_params("mine"))} == {"bfloat16"}
    assert run("--from mine --to huggingface ours --vocab-size 80 --dtype float32")[0] == 0
    config, params = fp8.load_huggingface(tmp_path / "ours")
    assert config.vocab_size == 80 and params["head"].shape == (80, 48) and params["head"].dtype == np.float32
    assert json.loads((tmp_path / "ours/config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--from theirs --to mine",
            "convert needs --from huggingface FOLDER --to FILE, or .*; got --from theirs --to mine",
        ),
        ("--from huggingface theirs --to huggingface ours", "needs --from huggingface FOLDER"),
        ("--from huggingface theirs --to one two", "needs --from huggingface FOLDER --to FILE"),
        ("--from huggingface nowhere --to mine", "must be a folder, or a file in it, but there is none at nowhere"),
        ("--from nowhere --to huggingface ours", "params must be read from a file, but there is none at nowhere"),
        ("--from huggingface theirs --to nowhere/mine", "params must find room in nowhere/mine"),
        ("--from huggingface theirs --to mine --vocab-size 8", "--vocab-size needs --to huggingface, .* got 8"),
        ("--from mine --to huggingface ours --part-gb 0", "--part-gb must be above 0, got 0.0"),
        ("--from mine", "the following arguments are required: --to"),
    ],
)
def test_what_is_refused(words, sentence, run, tmp_path):
    status, said, error = run(words)
    assert status in (1, 2) and "has it" not in said and error.startswith("python -m jax_fp8 convert: ")
    assert len(error.splitlines()) == 1
    assert re.search(sentence, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
