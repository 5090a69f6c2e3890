"""Checkpoints loaded as FP8 weights: those that `freeze_kernels` makes of the same params, and nothing beside them."""

import gc

import huggingface as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

import jax_fp8 as fp8

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPT = np.random.default_rng(3).integers(0, oracle.VOCAB, (2, 9), np.int32)


def folder_of(case, tmp_path):
    described = oracle.CASES[case] | (SIZES if "hidden_size" in oracle.CASES[case] else {})
    return oracle.write_folder(tmp_path / "theirs", described, oracle.random_tensors(described, "bfloat16"))


@pytest.mark.versions
@pytest.mark.parametrize("case", ["llama 3.2", "qwen2", "gpt2", "mixtral"])
def test_the_weights_of_freeze_kernels(case, tmp_path):
    folder = folder_of(case, tmp_path)
    config, params = fp8.load_huggingface(folder)
    loaded, variables = fp8.load_huggingface(folder, dtype=fp8.E4M3)
    assert loaded == config and set(variables) == {"params", "fp8_frozen"}
    model = fp8.GPT(config, recipe=fp8.CurrentScaling())
    own = {"params": jax.tree.map(jnp.asarray, params)}
    wanted = fp8.freeze_kernels(own, model.recipe, forward=lambda v: model.apply(v, PROMPT))
    assert jax.tree.structure(variables) == jax.tree.structure(wanted)
    jax.tree.map(assert_same_bits, *({"a": jax.tree.map(np.asarray, tree)} for tree in (variables, wanted)))
    assert all(isinstance(leaf, np.memmap) or leaf.ndim == 3 for leaf in jax.tree.leaves(variables["params"]))
    tokens = [fp8.generate(model.clone(recipe=None), each, PROMPT, max_new_tokens=8) for each in (variables, wanted)]
    np.testing.assert_array_equal(*tokens)


def test_a_device_keeps_no_kernel_in_another_dtype(tmp_path):
    folder = folder_of("qwen2", tmp_path)
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    _, variables = fp8.load_huggingface(folder, dtype=fp8.E4M3)
    gc.collect()
    made = [array for array in jax.live_arrays() if id(array) not in before]
    of_weights = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(variables["fp8_frozen"])}
    assert of_weights and {a.unsafe_buffer_pointer() for a in made if a.size > 1} <= of_weights


def test_scales_of_squares_where_the_files_have_them(tmp_path):
    """The values and scales of the files themselves, up to the rounding of a scale to bfloat16."""
    described = oracle.CASES["llama"] | SIZES | {"num_key_value_heads": 2}  # keys and values share no square
    config = fp8.load_huggingface(oracle.write_folder(tmp_path / "a", described, oracle.random_tensors(described)))[0]
    plain = fp8.GPT(config, recipe=None)
    params = jax.jit(plain.init)(jax.random.key(0), PROMPT)["params"]
    fp8.save_huggingface(tmp_path / "b", config, params, in_fp8=True)
    loaded, variables = fp8.load_huggingface(tmp_path / "b", dtype=fp8.E4M3)
    found = variables["fp8_frozen"]["layer_1"]["attention"]["query+key+value"]["kernel"].columnwise
    kernels = [params["layer_1"]["attention"][name]["kernel"] for name in ("query", "key", "value")]
    exact = jnp.concatenate(kernels, axis=1).T
    assert found.granularity == (128, 128) and loaded == config
    deviation = jnp.abs(found.dequantize() - exact)
    assert (deviation <= jnp.maximum(jnp.abs(exact) / 15, 0.002 * jnp.abs(exact).max())).all()
    for recipe in (None, fp8.BlockScaling()):
        logits = plain.clone(recipe=recipe).apply(variables, PROMPT).astype(jnp.float32)
        wanted = plain.apply({"params": params}, PROMPT).astype(jnp.float32)
        assert 0 < jnp.abs(logits - wanted).max() < 0.3 * wanted.std()
