"""config.json in and out: presets come back, and what a GPT cannot compute is refused by its name."""

import dataclasses
import json

import huggingface as oracle
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.models.config import PRESETS
from jax_fp8.models.huggingface.config_json import family_of, read_config, write_config

FAMILIES = {
    "tiny-llama": "llama", "gpt2-124m": "gpt2", "llama3-8b": "llama", "llama3.1-8b": "llama", "llama3.2-1b": "llama",
    "tiny-moe": "mixtral", "mixtral-8x7b": "mixtral", "qwen2.5-7b": "qwen2", "qwen3-0.6b": "qwen3", "qwen3-8b": "qwen3",
}  # fmt: skip


WITHOUT_FAMILY = "deepseek-v2-lite"  # without its attention


@pytest.mark.parametrize("name", [name for name in PRESETS if name != WITHOUT_FAMILY])
def test_presets_come_back(name):
    config = PRESETS[name]
    assert FAMILIES.get(name, family_of(config)) == family_of(config)
    described = json.loads(json.dumps(write_config(config, family_of(config), "bfloat16")))
    assert read_config(described, "config.json") == config
    assert described["model_type"] == family_of(config) and described["torch_dtype"] == "bfloat16"


def test_config_json_as_published():
    """Of Llama 3.2 with 1B params and Qwen3 with 0.6B, with what is beside the shape."""
    llama = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131_072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500_000.0, "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128_256,
    }  # fmt: skip
    assert read_config(llama, "here") == PRESETS["llama3.2-1b"]
    qwen = llama | {
        "attention_bias": False, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40_960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1_000_000,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 151_936,
    }  # fmt: skip
    found = read_config(qwen, "here")
    assert found == PRESETS["qwen3-0.6b"] and isinstance(found.rotary_base, float)


def test_rotary_positions_as_transformers_5_writes_them():
    """Base and scaling together; older files have fields of their own, the oldest call the kind "type"."""
    together = oracle.LLAMA | {"rope_parameters": {"rope_theta": 5e5} | oracle.SCALING}
    del together["rope_theta"], together["rope_scaling"]
    apart = oracle.LLAMA | {"rope_theta": 5e5, "rope_scaling": oracle.SCALING}
    kind = {("type" if name == "rope_type" else name): value for name, value in oracle.SCALING.items()}
    oldest = apart | {"rope_scaling": kind}
    found = [read_config(described, "here") for described in (together, apart, oldest)]
    assert found[0] == found[1] == found[2]
    assert found[0].rotary_base == 5e5
    assert found[0].rotary_scaling == fp8.RotaryScaling(factor=8.0, original_length=32)
    plain = oracle.LLAMA | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    assert (read_config(plain, "here").rotary_base, read_config(plain, "here").rotary_scaling) == (1e6, None)


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        (
            "llama",
            {"model_type": "deepseek_v3"},
            "model_type in here must be one of llama, qwen2, .*, granite, gpt2, got 'deepseek_v3'",
        ),
        ("llama", {"model_type": None}, "model_type in here must be one of .*, got None"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act in here must be 'silu' or 'swish' or .*, got 'gelu'"),
        ("mixtral", {"hidden_act": "relu"}, "hidden_act in here must be 'silu' or 'swish', got 'relu'"),
        ("llama", {"original_max_position_embeddings": 64}, "original_max_position_embeddings in here must be None"),
        (
            "llama",
            {"quantization_config": {"bits": 4}},
            "quantization_config in here must be None, or of quant_method .*{'bits': 4}",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor in here must be 1.0 or None, got 0.5"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "must be of rope_type yarn with factor, with no other .*'yarn'"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "must be of rope_type default, or one of .* got {'factor': 2.0}"),
        ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "must be of rope_type default, or one of .*'su'"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "got {.*rotary_factor': 0.5}",
        ),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "got {'full_attention': "),
        ("llama", {"rope_scaling": oracle.SCALING | {"beta": 1.0}}, "must be of rope_type default, or one of .*'beta'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3"}},
            "must be of rope_type llama3 with factor and low_freq_factor and .*, with no other field, got",
        ),
        ("llama", {"num_key_value_heads": 3}, "here must describe a model: num_kv_heads must divide num_heads"),
        (
            "llama",
            {"num_attention_heads": 0},
            "here must describe a model: .*num_heads must be an integer of at least 1",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window in here must be an integer where layers have sliding_attention, got none; give it, and",
        ),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types in here must be full_attention, got sliding_attention",
        ),
        (
            "qwen2",
            {"layer_types": ["chunked_attention"] * 2},
            "must be full_attention or sliding_attention, got chunked",
        ),
        ("mixtral", {"attention_bias": True}, "attention_bias in here must be False, got True"),
        (
            "mixtral",
            {"sliding_window": 0},
            "here must describe a model: sliding_window must be an integer of at least 1",
        ),
        ("qwen3 with experts", {"decoder_sparse_step": 0}, "decoder_sparse_step in here must be an integer of at lea"),
        ("qwen3 with experts", {"mlp_only_layers": "0"}, "mlp_only_layers in here must be a list of integers, got '0'"),
        ("glm", {"first_k_dense_replace": -1}, "first_k_dense_replace in here must be an integer of at least 0, got"),
        ("glm", {"topk_group": 5}, "here must describe a model: groups_per_token must be an integer from 1 to 4, got"),
        ("glm", {"n_group": 8}, "here must describe a model: group_score_experts must be at most the 1 experts of a"),
        ("glm", {"n_routed_experts": 10**6}, "the number of experts in here must be at most 16,384, got 1000000"),
        ("qwen2 with experts", {"shared_expert_intermediate_size": 0}, "gate_shared_expert is for a shared expert"),
        ("qwen3 with experts", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size in here must"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function in here must be 'gelu_new' or .*, got 'tanh'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx in here must be False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention in here must be False, got True"),
    ],
)
def test_what_a_gpt_cannot_compute(case, changes, sentence):
    read_config(oracle.CASES[case], "here")
    with pytest.raises(ValueError, match=sentence) as raised:
        read_config(oracle.CASES[case] | changes, "here")
    assert "\n" not in str(raised.value)


def test_experts_as_published():
    """Of Mixtral 8x7B, and of Qwen3 with 30B params, of which a token uses 3B; one of them by its newer name."""
    mixtral = oracle.LLAMA | {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14_336,
        "max_position_embeddings": 32_768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "vocab_size": 32_000,
    }  # fmt: skip
    assert read_config(mixtral, "here") == PRESETS["mixtral-8x7b"]
    qwen = oracle.LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40_960, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0, "router_aux_loss_coef": 0.001, "use_sliding_window": False, "vocab_size": 151_936,
    }  # fmt: skip
    found = read_config(qwen, "here")
    assert (found.num_experts, found.experts_per_token, found.mlp_hidden_size) == (128, 8, 768)
    assert found.qk_norm and found.normalize_router_weights and found.router_aux_loss == pytest.approx(0.001 * 8 / 48)
    assert write_config(found, family_of(found), "bfloat16")["router_aux_loss_coef"] == 0.001
    renamed = {("num_local_experts" if name == "num_experts" else name): value for name, value in qwen.items()}
    assert read_config(renamed, "here") == found
    assert not read_config(qwen | {"norm_topk_prob": False}, "here").normalize_router_weights
    for name in ("num_local_experts", "num_experts_per_tok"):
        lacking = {field: value for field, value in mixtral.items() if field != name}
        with pytest.raises(ValueError, match=f"here must have the field '{name}', which a mixtral needs"):
            read_config(lacking, "here")


def test_layers_without_experts():
    """Of Qwen by two fields, of GLM by one; the coefficient of the balance loss is spread over the others."""
    described = oracle.CASES["qwen3 with experts"] | {"num_hidden_layers": 6, "intermediate_size": 80}
    for fields, dense in (
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"mlp_only_layers": [5, 1]}, (1, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2, 9]}, (0, 1, 2, 3, 4)),
        ({}, ()),
    ):
        found = read_config(described | fields, "here")
        assert found.dense_layers == dense
        assert (found.mlp_hidden_size, found.dense_hidden_size) == (32, 80 if dense else None)
        assert found.router_aux_loss == pytest.approx(0.001 * 3 / (6 - len(dense)))
        assert read_config(write_config(found, family_of(found), "float32"), "here") == found
    glm = oracle.CASES["glm"] | {"num_hidden_layers": 6, "first_k_dense_replace": 2}
    assert read_config(glm, "here").dense_layers == (0, 1)
    assert read_config(glm | {"first_k_dense_replace": 9}, "here").dense_layers == tuple(range(6))
    found = read_config(glm, "here")
    assert family_of(found) == "glm4_moe" and read_config(write_config(found, "glm4_moe", "float32"), "here") == found
    with pytest.raises(ValueError, match="glm4_moe, the nearest, needs dense_layers="):
        family_of(dataclasses.replace(found, dense_layers=(1, 3)))


def test_glm_as_published():
    """GLM-4.5-Air: 106 billion params, of which a token uses 12."""
    described = {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10_944, "max_position_embeddings": 131_072,
        "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1_000_000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151_552,
    }  # fmt: skip
    config = read_config(described, "here")
    assert config.router_correction_bias and config.router_scores == "sigmoid" and config.rotary_fraction == 0.5
    model = fp8.GPT(config, recipe=None)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))["params"]
    assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9) == 107  # 106.85


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
def test_a_field_that_is_missing(field):
    described = {name: value for name, value in oracle.LLAMA.items() if name != field}
    with pytest.raises(ValueError, match=f"here must have the field '{field}', which a llama needs, but lacks it"):
        read_config(described, "here")


@pytest.mark.parametrize(
    "fields",
    [
        {"norm": "rmsnorm"},
        {"activation": "relu", "use_bias": False},
        {"activation": "squared_relu"},
        {"num_kv_heads": 2},
        {"positions": "rotary"},
        {"head_dim": 16},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_shapes_that_no_family_has(fields):
    config = fp8.GPTConfig.preset("tiny", **fields)
    with pytest.raises(ValueError, match=r"a model for Hugging Face must be like one of llama, .* got GPTConfig\("):
        family_of(config)


def test_a_preset_that_no_family_has():
    with pytest.raises(ValueError, match=r"must be like one of .* the nearest, needs gate_shared_expert=True"):
        family_of(PRESETS[WITHOUT_FAMILY])


def test_llamas_that_no_family_has():
    for fields in (
        {"use_qkv_bias": True, "qk_norm": True},
        {"use_bias": True, "use_qkv_bias": False},
        {"norm_placement": "after"},
        {"attention_logit_cap": 50.0},
        {"rotary_scaling": fp8.DynamicScaling(factor=2.0, original_length=64)},  # of a model for 128 tokens
    ):
        with pytest.raises(ValueError, match="a model for Hugging Face must be like one of llama, qwen2, "):
            family_of(fp8.GPTConfig.preset("tiny-llama", **fields))


def test_a_window_is_not_lost():
    """Llama has none, so a model that has one is written as one of another family."""
    config = fp8.GPTConfig.preset("tiny-llama", sliding_window=64)
    assert family_of(config) == "mistral"
    assert read_config(write_config(config, "mistral", "float32"), "here").sliding_window == 64
    with pytest.raises(
        ValueError, match=r"must be like one of llama, .*: llama, the nearest, needs sliding_window=None"
    ):
        family_of(config, "llama")
