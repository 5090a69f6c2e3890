"""Folders of Hugging Face: every tensor comes back bit for bit, and what does not fit is refused by its name.
tests/adoption/test_huggingface.py is about what models compute.
"""

import functools
import json
import shutil

import huggingface as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface import weights

pytestmark = pytest.mark.versions
safetensors_numpy = pytest.importorskip("safetensors.numpy")


@functools.cache
def tensors_of(case, dtype="float32"):
    return oracle.random_tensors(oracle.CASES[case], dtype)


@pytest.fixture
def folder_of(tmp_path):
    def write(case, parts=1, dtype="float32", **changes):
        return oracle.write_folder(tmp_path / "theirs", oracle.CASES[case] | changes, tensors_of(case, dtype), parts)

    return write


def assert_same_files(folder, tensors):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors_numpy.load_file(file)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", oracle.CASES)
def test_every_tensor_comes_back_bit_for_bit(case, parts, dtype, folder_of, tmp_path):
    config, params = fp8.load_huggingface(folder_of(case, parts, dtype))
    tensors = tensors_of(case, dtype)
    total = sum(array.nbytes for array in tensors.values())
    largest = total if parts == 1 else total // parts
    written = []
    fp8.save_huggingface(
        tmp_path / "ours", config, jax.device_put(params), max_part_bytes=largest, report=written.append
    )
    assert_same_files(tmp_path / "ours", tensors)
    assert sum(written) == total and len(written) == len(tensors)
    files = sorted(file.name for file in (tmp_path / "ours").iterdir())
    if parts == 1:
        assert files == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total and set(index["weight_map"]) == set(tensors)
        assert files[1] == f"model-00001-of-{len(files) - 2:05}.safetensors" and len(files) >= parts + 2
        assert all((tmp_path / "ours" / name).stat().st_size < largest + 4096 for name in files[1:-1])
    again = fp8.load_huggingface(tmp_path / "ours")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    described, wanted = json.loads((tmp_path / "ours/config.json").read_text()), oracle.CASES[case]
    shared = (set(described) & set(wanted)) - {"rope_theta", "rope_scaling"}  # transformers 5 has these together
    assert len(shared) > 6 and {name: described[name] for name in shared} == {name: wanted[name] for name in shared}
    assert described["torch_dtype"] == dtype


def test_nothing_is_read_before_it_is_used(folder_of):
    _, params = fp8.load_huggingface(folder_of("llama"))
    assert all(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(params))
    _, params = fp8.load_huggingface(folder_of("gpt2"))
    assert all(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(params))


def test_another_dtype_on_wish(folder_of, tmp_path):
    folder = folder_of("qwen3", dtype="bfloat16")
    config, params = fp8.load_huggingface(folder, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, params, fp8.load_huggingface(folder)[1])
    fp8.save_huggingface(tmp_path / "ours", config, params, dtype=jnp.bfloat16)
    assert_same_files(tmp_path / "ours", tensors_of("qwen3", "bfloat16"))


def test_correction_biases_stay_float32(folder_of, tmp_path):
    """In bfloat16 a bias of 1 could not move by 0.001."""
    config, params = fp8.load_huggingface(folder_of("glm"), dtype=jnp.bfloat16)
    router = params["layer_1"]["mlp"]["router"]
    assert (router["correction_bias"].dtype, router["kernel"].dtype) == (np.float32, jnp.bfloat16)
    fp8.save_huggingface(tmp_path / "ours", config, params, dtype=jnp.bfloat16)
    assert_same_files(tmp_path / "ours", tensors_of("glm", "bfloat16"))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    tensors, described = tensors_of("glm"), oracle.CASES["glm"]
    beyond = {name.replace("layers.1.", "layers.2."): array for name, array in tensors.items() if "layers.1." in name}
    with pytest.raises(ValueError, match=r"got also model\.layers\.9999.*, of another model"):
        strange = {f"model.layers.{'9' * 5000}.weight": np.ones(1, np.float32)}
        fp8.load_huggingface(oracle.write_folder(tmp_path / "strange", described, tensors | strange))
    beyond["model.layers.2.eh_proj.weight"] = np.ones((48, 96), np.float32)
    for predicted, number in (({"num_nextn_predict_layers": 1}, 1), ({}, 1), ({"num_nextn_predict_layers": 0}, 0)):
        kept = {name: value for name, value in described.items() if name != "num_nextn_predict_layers"}
        folder = oracle.write_folder(tmp_path / f"theirs{len(predicted)}{number}", kept | predicted, tensors | beyond)
        if not number:
            with pytest.raises(ValueError, match=r"got also model\.layers\.2\.eh_proj\.weight, of another model"):
                fp8.load_huggingface(folder)
            continue
        config, params = fp8.load_huggingface(folder)
        fp8.save_huggingface(tmp_path / f"ours{len(predicted)}", config, params)
        assert_same_files(tmp_path / f"ours{len(predicted)}", tensors)


def test_params_are_those_that_a_model_makes(folder_of):
    config, params = fp8.load_huggingface(folder_of("qwen3"))
    made = jax.eval_shape(fp8.GPT(config).init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), made
    )


def test_rows_that_pad_a_vocabulary_are_left_out(folder_of, tmp_path):
    config, params = fp8.load_huggingface(folder_of("llama"))
    fp8.save_huggingface(tmp_path / "ours", config, params, vocab_size=90)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    cut = {name: tensor[:90] if name in names else tensor for name, tensor in tensors_of("llama").items()}
    assert_same_files(tmp_path / "ours", cut)
    assert fp8.load_huggingface(tmp_path / "ours")[0].vocab_size == 90
    with pytest.raises(ValueError, match="vocab_size must be an integer from 1 to 96, got 97"):
        fp8.save_huggingface(tmp_path / "other", config, params, vocab_size=97)


def test_one_file_beside_its_config(folder_of):
    folder = folder_of("qwen2")
    config, params = fp8.load_huggingface(folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, params, fp8.load_huggingface(folder)[1])
    assert config == fp8.load_huggingface(folder)[0]


def test_what_some_files_have_besides(tmp_path):
    """GPT-2 without its head, with masks; a tied head that is written all the same; frequencies of older Llamas."""
    for case, change in (
        ("gpt2", lambda tensors: {name.removeprefix("transformer."): array for name, array in tensors.items()}),
        ("gpt2", lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}),
        ("llama 3.2", lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}),
    ):
        tensors = change(tensors_of(case))
        prefix = "" if "wte.weight" in tensors else "transformer."
        buffers = {f"{prefix}h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8)} if case == "gpt2" else {}
        buffers["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(6, np.float32)
        folder = oracle.write_folder(tmp_path / "theirs", oracle.CASES[case], tensors | buffers)
        config, params = fp8.load_huggingface(folder)
        fp8.save_huggingface(tmp_path / "ours", config, params)
        assert_same_files(tmp_path / "ours", tensors_of(case))
        shutil.rmtree(tmp_path / "ours")


def test_a_head_in_the_file_of_a_tied_model(folder_of, tmp_path):
    """As transformers: alone it is the embedding too; beside another embedding the two are not tied."""
    config, params = fp8.load_huggingface(folder_of("llama", tie_word_embeddings=True))
    assert not config.tie_embeddings
    np.testing.assert_array_equal(params["head"], tensors_of("llama")["lm_head.weight"])
    tensors = dict(tensors_of("llama 3.2"))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    config, params = fp8.load_huggingface(oracle.write_folder(tmp_path / "head", oracle.CASES["llama 3.2"], tensors))
    assert config.tie_embeddings and "head" not in params
    np.testing.assert_array_equal(params["embedding"], tensors["lm_head.weight"])


# ---- what is refused -------------------------------------------------------------------------------------------------


def without(name):
    return {other: tensor for other, tensor in tensors_of("llama").items() if other != name}


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
REFUSED = {
    "a missing tensor": (without(NORM), {}, f"all tensors of its config.json, but {NORM} is missing; copy it again"),
    "another tensor": (
        tensors_of("llama") | {"model.layers.0.extra": np.ones(2, np.float32)},
        {},
        "the tensors of its config.json alone, got also model.layers.0.extra, of another model",
    ),
    "another shape": (
        tensors_of("llama") | {QUERY: np.ones((48, 40), np.float32)},
        {},
        rf"{QUERY} in .* must have the shape \[48, 48\] that follows from config.json, got \[48, 40\]",
    ),
    "quantized tensors": (
        tensors_of("llama") | {QUERY: np.ones((48, 48), np.int8)},
        {},
        f"{QUERY} in .* must be of float32, bfloat16, float16, got int8; take weights that are not quantized",
    ),
    "another config": (
        tensors_of("llama"),
        {"model_type": "mamba"},
        r"model_type in .*config.json must be one of llama",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case, tmp_path):
    tensors, changes, sentence = REFUSED[case]
    folder = oracle.write_folder(tmp_path / "theirs", oracle.LLAMA | changes, tensors)
    with pytest.raises(ValueError, match=sentence) as raised:
        fp8.load_huggingface(folder)
    assert "\n" not in str(raised.value)


def test_files_that_are_not_there(tmp_path, folder_of):
    folder = folder_of("llama", parts=3)
    refusals = []

    def refused(sentence, path=folder):
        with pytest.raises(ValueError, match=sentence) as raised:
            fp8.load_huggingface(path)
        refusals.append(str(raised.value))

    refused("must be a folder, or a file in it, but there is none at .*nowhere", tmp_path / "nowhere")
    (folder / "model-00002-of-00003.safetensors").rename(folder / "elsewhere")
    refused(r"must name files that are there, but lacks \['model-00002-of-00003.safetensors'\]; copy it again")
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors")
    refused("each tensor must be in one file, but .* is also in .*model-00002-of-00003.safetensors; copy the model")
    (folder / "model.safetensors.index.json").write_text("[]")
    refused("index.json must be a file with one JSON object, got a list in place of a JSON object; copy it again")
    (folder / "model.safetensors.index.json").unlink()
    refused("must have model.safetensors, or its parts with .*, got no such file; save it as safetensors first")
    (folder / "pytorch_model.bin").touch()
    refused("got pytorch_model.bin; save it as safetensors first")
    (folder / "elsewhere").rename(folder / "model.safetensors")
    (folder / "config.json").write_text("{")
    refused(r"config.json must be a file with one JSON object, got no JSON \(Expecting .*\); copy it again")
    (folder / "config.json").unlink()
    refused("config.json must be there: it has the shape of the model; copy it too")
    assert not any("\n" in sentence for sentence in refusals)


def test_params_that_are_refused(folder_of, tmp_path):
    config, params = fp8.load_huggingface(folder_of("gpt2"))
    attention = params["layer_0"]["attention"]

    def refused(sentence, config=config, params=params, folder=tmp_path / "ours", **options):
        with pytest.raises(ValueError, match=sentence):
            fp8.save_huggingface(folder, config, params, **options)

    def changed(**linear):
        return params | {"layer_0": params["layer_0"] | {"attention": attention | {"key": attention["key"] | linear}}}

    refused("config must be a GPTConfig, got a str; pass that of the model", config="gpt2")
    refused(
        r"params must be those of the config, but final_norm\.bias is in the config and not in the params",
        params=params | {"final_norm": {"scale": params["final_norm"]["scale"]}},
    )
    refused(r"but more is in the params and not in the config", params=params | {"more": np.ones(2)})
    wrong = changed(kernel=np.ones((48, 47), np.float32))
    refused(
        r"layer_0\.attention\.key\.kernel must be of shape \[48, 48\] and of float32, .*, got float32\[48, 47\]",
        params=wrong,
    )
    wrong = changed(kernel=attention["key"]["kernel"].astype(jnp.bfloat16))
    refused(
        "params of transformer.h.0.attn.c_attn.weight must have one dtype, got bfloat16, float32; give dtype",
        params=wrong,
    )
    refused("dtype must be jnp.bfloat16, jnp.float16 or jnp.float32, got 'int8'", dtype="int8")
    refused("max_part_bytes must be an integer of at least 1, got 0", max_part_bytes=0)
    assert not (tmp_path / "ours").exists()
    refused("must not have a model yet, got model.safetensors; choose another folder", folder=tmp_path / "theirs")
    (tmp_path / "file").touch()
    refused("a model must find room in a folder, got .*; choose another one", folder=tmp_path / "file")


def test_a_part_is_never_empty():
    tensors = {
        name: weights.Tensor((size,), np.dtype(np.uint8), lambda: None)
        for name, size in zip("abcd", (9, 2, 2, 9), strict=True)
    }
    assert [sorted(part) for part in weights._parts(tensors, 4).values()] == [["a"], ["b", "c"], ["d"]]
    assert list(weights._parts(tensors, 22)) == ["model.safetensors"]
