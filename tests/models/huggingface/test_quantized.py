"""Checkpoints in FP8 with a scale for each square: read and written as square by square in NumPy."""

import json

import huggingface as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface import quantized
from jax_fp8.models.tensor_file import map_arrays

pytest.importorskip("safetensors.numpy")

LLAMA = oracle.LLAMA | {
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
QUERY = "model.layers.1.self_attn.q_proj.weight"
KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def by_squares(weight):
    """Values and scales, one square after the other; the largest number of each becomes 448."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    values, scales = np.zeros(weight.shape, jnp.float8_e4m3fn), np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            square = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scales[i, j] = np.float32(np.abs(weight[square]).max() / np.float32(448)) or 1
            values[square] = (weight[square] / scales[i, j]).astype(jnp.float8_e4m3fn)
    return values, scales


def is_kernel(name):
    return name.removesuffix(".weight").endswith(KERNELS)


@pytest.fixture
def folder(tmp_path):
    """A model in FP8, and the tensors that its values and scales stand for."""
    tensors, exact = {}, {}
    for name, tensor in oracle.random_tensors(LLAMA).items():
        exact[name], tensors[name] = tensor, tensor.astype(jnp.bfloat16)
        if is_kernel(name):
            tensors[name], tensors[f"{name}_scale_inv"] = by_squares(tensor)
            whole = np.kron(tensors[f"{name}_scale_inv"], np.ones((128, 128), np.float32))
            exact[name] = tensors[name].astype(np.float32) * whole[: tensor.shape[0], : tensor.shape[1]]
    return oracle.write_folder(tmp_path / "fp8", LLAMA | {"quantization_config": FP8}, tensors), exact


def test_weights_are_multiplied_by_the_scales_of_their_squares(folder):
    path, exact = folder
    config, params = fp8.load_huggingface(path, dtype=jnp.float32)
    np.testing.assert_array_equal(params["layer_1"]["attention"]["query"]["kernel"], exact[QUERY].T)
    _, rounded = fp8.load_huggingface(path)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded)} == {"bfloat16"}
    query = rounded["layer_1"]["attention"]["query"]["kernel"]
    np.testing.assert_array_equal(query, exact[QUERY].T.astype(jnp.bfloat16))
    wrong = np.float32(exact[QUERY]).copy()
    wrong[128:] = wrong[128:] * 1.5  # a negative control: a square with another scale
    assert np.abs(params["layer_1"]["attention"]["query"]["kernel"] - wrong.T).max() > 0.01
    tokens = np.arange(40)
    found = fp8.GPT(config, recipe=None, dtype=jnp.float32).apply({"params": params}, tokens[None])[0]
    embedded = {name: tensor if is_kernel(name) else tensor.astype(jnp.bfloat16) for name, tensor in exact.items()}
    wanted = oracle.logits_of(LLAMA, embedded, tokens)
    assert np.abs(found - wanted).max() < 2e-5 * wanted.std()


def test_a_model_in_fp8_comes_back(folder, tmp_path):
    path, _ = folder
    config, params = fp8.load_huggingface(path, dtype=jnp.float32)
    fp8.save_huggingface(tmp_path / "again", config, params, dtype=jnp.bfloat16, in_fp8=True)
    theirs = map_arrays(path / "model.safetensors")
    ours = map_arrays(tmp_path / "again/model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        if name.endswith("_scale_inv"):
            np.testing.assert_allclose(ours[name], tensor, rtol=3e-7)
        else:
            np.testing.assert_array_equal(ours[name].astype(np.float32), tensor.astype(np.float32))
    described = json.loads((tmp_path / "again/config.json").read_text())
    assert described["quantization_config"] == FP8 and described["torch_dtype"] == "bfloat16"
    assert fp8.load_huggingface(tmp_path / "again")[0] == config


def test_what_is_written_is_quantized_square_by_square(tmp_path):
    config = fp8.GPTConfig.preset("tiny-moe", num_layers=1, hidden_size=160, num_heads=5, num_kv_heads=5)
    params = jax.jit(fp8.GPT(config, recipe=None).init)(jax.random.key(0), jnp.ones((1, 8), jnp.int32))["params"]
    params["layer_0"]["attention"]["query"]["kernel"] *= 0
    fp8.save_huggingface(tmp_path / "ours", config, params, in_fp8=True)
    found = map_arrays(tmp_path / "ours/model.safetensors")
    kernels = {name for name in found if f"{name}_scale_inv" in found}
    assert len(kernels) == 4 + 3 * config.num_experts and not any("block_sparse_moe.gate" in name for name in kernels)
    gate = np.asarray(params["layer_0"]["mlp"]["gate"]["kernel"][2]).T
    values, scales = by_squares(gate)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    np.testing.assert_array_equal(found[name].astype(np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(found[f"{name}_scale_inv"], scales)
    zeros = "model.layers.0.self_attn.q_proj.weight"
    assert not found[zeros].astype(np.float32).any() and (found[f"{zeros}_scale_inv"] == 1).all()
    with pytest.raises(ValueError, match="in_fp8 must be True or False, got 1"):
        fp8.save_huggingface(tmp_path / "other", config, params, in_fp8=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {f"{QUERY}_scale_inv": np.ones((2, 1), np.float32)},
            r"got \[2, 1\] for float8_e4m3fn\[160, 160\]; copy it again",
        ),
        (
            {"model.norm.weight_scale_inv": np.ones((2,), np.float32)},
            r"matrix in float8_e4m3fn, got \[2\] for bfloat16\[160",
        ),
        ({"model.other_scale_inv": np.ones((2, 2), np.float32)}, r"got \[2, 2\] for no such tensor; copy it again"),
        ({f"{QUERY}_scale_inv": np.ones((2, 2), np.int32)}, "must be of float32 or bfloat16, got int32"),
        ({QUERY: np.ones((160, 160), jnp.float8_e5m2)}, r"for float8_e5m2\[160, 160\]"),
        ({f"{QUERY}_scale_inv": None}, f"{QUERY} in .* must be of float32, bfloat16, float16, got float8_e4m3fn"),
    ],
    ids=str,
)
def test_tensors_that_are_refused(change, sentence, folder, tmp_path):
    path, _ = folder
    tensors = map_arrays(path / "model.safetensors") | change
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    oracle.write_folder(tmp_path / "wrong", LLAMA | {"quantization_config": FP8}, tensors)
    with pytest.raises(ValueError, match=sentence) as raised:
        fp8.load_huggingface(tmp_path / "wrong")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "quantization",
    [
        5,
        {},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        FP8 | {"weight_block_size": [128]},
        FP8 | {"weight_block_size": [0, 128]},
        FP8 | {"weight_block_size": [True, 128]},
        FP8 | {"fmt": "e5m2"},
        FP8 | {"scale_fmt": "ue8m0"},
    ],
    ids=str,
)
def test_quantizations_that_are_refused(quantization):
    assert quantized.block_of({"quantization_config": FP8 | {"modules_to_not_convert": ["lm_head"]}}, "here") == (
        128,
        128,
    )
    with pytest.raises(ValueError, match='quantization_config in here must be None, or of quant_method "fp8" with fmt'):
        quantized.block_of({"quantization_config": quantization}, "here")
