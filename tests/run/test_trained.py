"""Models that are trained already: which of them a path is, and what is missing."""

import chats
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.run import trained
from jax_fp8.run.settings import Settings


def test_a_path_is_a_folder_a_file_or_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert str(trained.find("mine", tmp_path / "runs")) == str(tmp_path / "runs/mine")
    assert str(trained.find("a.safetensors", tmp_path / "runs")) == "a.safetensors"
    with pytest.raises(ValueError, match=r"--init-from must be a folder, or the name of one in .*, got 'b'"):
        trained.find("b", tmp_path / "runs", "--init-from")
    assert trained.is_run(tmp_path / "runs/mine") and not trained.is_run(tmp_path / "a.safetensors")


def test_a_model_of_hugging_face_has_its_tokenizer(tmp_path):
    config, _ = chats.write_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"tokenizer.json must have the tokenizer of the model, got no such file"):
        trained.load(tmp_path / "model")
    chats.write_tokenizer(tmp_path / "model")
    model, variables, encoder, origin = trained.load(tmp_path / "model")
    assert (model.config, model.recipe, origin) == (config, None, f"{tmp_path / 'model'}, bf16")
    assert encoder.beside.template == chats.PLAIN and variables["params"]["embedding"].shape == (384, 64)


def test_params_have_the_dtype_of_the_settings():
    config = fp8.GPTConfig.preset("tiny", num_layers=1)
    for recipe in ("bf16", "block"):
        model = trained.make_model(Settings(param_dtype="bfloat16"), config, recipe)
        assert model.param_dtype == jnp.bfloat16
        assert trained.make_model(Settings(), config, recipe).param_dtype == jnp.float32
