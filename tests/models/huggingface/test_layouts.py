"""The tables of tensors: the names that files have, each of our params once, and cut and joined without a change."""

import huggingface as oracle
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface.config_json import read_config
from jax_fp8.models.huggingface.layouts import Entry, entries_of


@pytest.mark.parametrize("case", oracle.CASES)
def test_names_and_shapes_are_those_of_the_files(case):
    entries = entries_of(read_config(oracle.CASES[case], "here"), oracle.CASES[case]["model_type"])
    assert {entry.name: entry.shape for entry in entries} == oracle.shapes_of(oracle.CASES[case])


def test_a_tensor_of_several_params():
    entry = Entry("c_attn.weight", (("query",), ("key",)), ((4, 6), (4, 2)))
    tensor = np.arange(32).reshape(4, 8)
    query, key = entry.params_of(tensor)
    np.testing.assert_array_equal(query, tensor[:, :6])
    np.testing.assert_array_equal(key, tensor[:, 6:])
    assert entry.shape == tensor.shape and np.shares_memory(query, tensor)
    np.testing.assert_array_equal(entry.tensor_of([query, key]), tensor)


def test_a_tensor_that_is_transposed():
    entry = Entry("q_proj.weight", (("query", "kernel"),), ((4, 6),), is_transposed=True)
    tensor = np.arange(24).reshape(6, 4)
    assert entry.shape == tensor.shape
    (kernel,) = entry.params_of(tensor)
    np.testing.assert_array_equal(kernel, tensor.T)
    np.testing.assert_array_equal(entry.tensor_of([kernel]), tensor)


def test_a_tensor_of_several_params_that_is_transposed():
    paths = ("gate", "kernel"), ("up", "kernel")
    entry = Entry("gate_up_proj.weight", paths, ((4, 6), (4, 2)), is_transposed=True)
    tensor = np.arange(32).reshape(8, 4)
    gate, up = entry.params_of(tensor)
    np.testing.assert_array_equal(gate, tensor[:6].T)
    np.testing.assert_array_equal(up, tensor[6:].T)
    assert entry.shape == tensor.shape and np.shares_memory(up, tensor)
    np.testing.assert_array_equal(entry.tensor_of([gate, up]), tensor)


def test_a_tensor_of_one_expert():
    entry = Entry("experts.1.w1.weight", (("gate", "kernel"),), ((3, 4, 6),), is_transposed=True, expert=1)
    kernels = np.arange(72).reshape(3, 4, 6)
    tensor = entry.tensor_of([kernels])
    assert entry.shape == tensor.shape == (6, 4)
    np.testing.assert_array_equal(tensor, kernels[1].T)
    (kernel,) = entry.params_of(tensor)
    np.testing.assert_array_equal(kernel, kernels[1])


def test_a_model_without_layers():
    names = [entry.name for entry in entries_of(fp8.GPTConfig.preset("llama3.1-8b", num_layers=0), "llama")]
    assert names == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
