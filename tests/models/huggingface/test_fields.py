"""Fields of config.json: their types, and what each family takes for one that is not there."""

import huggingface as oracle
import pytest

from jax_fp8.models.huggingface.config_json import read_config
from jax_fp8.models.huggingface.families import ARCHITECTURES, DEFAULTS, FIXED
from jax_fp8.models.huggingface.fields import Fields

# As LlamaConfig() and so on say in transformers 5.24.0; the base of rotary positions is that of rope_parameters. The
# first ones are None there until as many as heads, or hidden_size / heads, is put in their place.
OF_TRANSFORMERS = {
    "llama": (None, None, 1e-6, 1e4, False, 2048),
    "qwen2": (32, None, 1e-6, 1e4, False, 32_768),
    "qwen3": (32, 128, 1e-6, 1e4, False, 32_768),
    "mistral": (8, None, 1e-6, 1e4, False, 131_072),
    "mixtral": (8, None, 1e-5, 1e6, False, 131_072),
    "qwen3_moe": (4, None, 1e-6, 1e4, False, 32_768),
    "qwen2_moe": (16, None, 1e-6, 1e4, False, 32_768),
    "glm4_moe": (8, None, 1e-5, 1e4, False, 131_072),
    "gemma2": (4, 256, 1e-6, 1e4, True, 8192),
    "gemma3_text": (4, 256, 1e-6, 1e6, True, 131_072),
    "olmo2": (None, None, 1e-5, 1e4, False, 2048),
    "olmo3": (None, None, 1e-5, 5e5, False, 2048),
    "phi3": (None, None, 1e-5, 1e4, False, 4096),
    "smollm3": (4, None, 1e-6, 2e6, True, 32_768),
    "granite": (None, None, 1e-6, 1e4, False, 2048),
}
NAMES = (
    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
SHAPE = {
    name: oracle.LLAMA[name]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
FAMILIES = {family: SHAPE | {"model_type": family} for family in OF_TRANSFORMERS} | {
    described["model_type"]: described for described in oracle.CASES.values()
}


def test_defaults_are_those_of_transformers():
    assert set(DEFAULTS) == set(ARCHITECTURES) == set(FIXED) == {*OF_TRANSFORMERS, "gpt2"}
    for family, values in OF_TRANSFORMERS.items():
        assert {name: DEFAULTS[family][name] for name in NAMES} == dict(zip(NAMES, values, strict=True)), family
    for family in ("mixtral", "qwen3_moe", "qwen2_moe"):
        assert (DEFAULTS[family]["router_aux_loss_coef"], DEFAULTS[family]["norm_topk_prob"]) == (0.001, False)
    glm = {"partial_rotary_factor": 0.5, "use_qk_norm": False, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    glm |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    assert glm.items() <= DEFAULTS["glm4_moe"].items() and DEFAULTS["qwen2_moe"]["qkv_bias"]
    gpt2 = {"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    assert DEFAULTS["gpt2"] == gpt2 | {"n_positions": 1024}


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_a_model_without_fields_is_that_of_its_family(family):
    """With 32 heads of 8, which all of the defaults divide."""
    left_out = {*NAMES, "rope_scaling", "rope_parameters", "router_aux_loss_coef", "norm_topk_prob", "sliding_window"}
    described = {name: value for name, value in FAMILIES[family].items() if name not in left_out}
    described |= {"num_attention_heads": 32, "hidden_size": 256}
    found, (kv_heads, head_dim, epsilon, base, tied, longest) = read_config(described, "here"), OF_TRANSFORMERS[family]
    assert (found.kv_heads, found.features_of_head) == (kv_heads or 32, head_dim or 8)
    assert (found.norm_epsilon, found.rotary_base, found.tie_embeddings) == (epsilon, base, tied)
    assert found.max_seq_len == longest
    if found.num_experts:
        layers = found.num_layers - len(found.dense_layers)
        coefficient = 0.0 if family == "glm4_moe" else 0.001
        assert found.router_aux_loss == pytest.approx(coefficient * found.experts_per_token / layers)
        assert found.normalize_router_weights == (family in ("mixtral", "glm4_moe"))
    # What is there counts, also where rotary positions stand together and say nothing of their base.
    plain = {"rope_type": "default"}
    by_layers = {"full_attention": plain} if family in ("gemma3_text", "olmo3") else plain
    together = described | {"rms_norm_eps": 0.5, "rope_parameters": by_layers}
    assert (read_config(together, "here").norm_epsilon, read_config(together, "here").rotary_base) == (0.5, base)
    assert read_config(described | {"num_key_value_heads": None}, "here").kv_heads == 32


def test_gpt2_without_fields():
    described = {name: value for name, value in FAMILIES["gpt2"].items() if name not in DEFAULTS["gpt2"]}
    found = read_config(described, "here")
    assert (found.activation, found.norm_epsilon, found.tie_embeddings) == ("gelu", 1e-5, True)
    assert found.mlp_hidden_size is None


LONG = "x" * 10**6


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        ("llama", {"model_type": ["llama"]}, r"model_type in here must be one of .*, got \['llama'\]"),
        ("llama", {"model_type": LONG}, r"model_type in here must be one of .*, got 'xxx.*\.\.\.$"),
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers in here must be at most 4,096, got 1000000000; no mod",
        ),
        ("gpt2", {"n_layer": 10**9}, "n_layer in here must be at most 4,096"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers in here must be an integer of at most .*, got True"),
        ("llama", {"num_hidden_layers": 2.0}, r"num_hidden_layers in here must be an integer of .*, got 2\.0"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers in here must be an integer of .*, got None"),
        ("llama", {"num_hidden_layers": -1}, "here must describe a model: num_layers must be an integer of at least 0"),
        ("llama", {"vocab_size": 2**63}, "vocab_size in here must be an integer of at most 2,147,483,647, got 92233"),
        ("llama", {"vocab_size": 2**30}, "vocab_size in here must be at most 16,777,216, got 1073741824"),
        ("llama", {"hidden_size": 10**400}, "hidden_size in here must be an integer of at most"),
        ("llama", {"hidden_size": LONG}, "hidden_size in here must be an integer"),
        ("llama", {"head_dim": "ab"}, "head_dim in here must be an integer of at most .*, got 'ab'"),
        ("llama", {"num_attention_heads": [4]}, r"num_attention_heads in here must be an integer .*, got \[4\]"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps in here must be a finite number, got 1000"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps in here must be a finite number, got 'small'"),
        ("llama", {"rope_theta": {}}, "rope_theta in here must be a finite number, got {}"),
        ("llama", {"rope_theta": 0.5}, "here must describe a model: rotary_base must be a finite number above 1"),
        ("llama", {"rope_scaling": 5}, "rope_scaling in here must be an object, got 5"),
        ("llama", {"rope_parameters": ["a"]}, r"rope_parameters in here must be an object, got \['a'\]"),
        ("llama", {"rope_parameters": {"rope_theta": "a"}}, "rope_theta in here must be a finite number, got 'a'"),
        (
            "llama",
            {"rope_scaling": oracle.SCALING | {"factor": "8"}},
            "factor in here must be a finite number, got '8'",
        ),
        ("llama", {"rope_scaling": oracle.SCALING | {"factor": 0.5}}, "here must describe a model: factor of a Rotary"),
        (
            "llama",
            {"rope_scaling": oracle.SCALING | {"original_max_position_embeddings": 2**63}},
            "original_max_position_embeddings in here must be an integer of at most 2,147,483,647, got 9223",
        ),
        ("llama", {"rope_scaling": {"rope_type": [1]}}, "must be of rope_type default, or one of"),
        (
            "llama",
            {"rope_scaling": oracle.SCALING, "rope_parameters": {"rope_theta": 1e4}},
            "here must have one field that scales rotary positions, got rope_parameters and rope_scaling; remove one",
        ),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings in here must be true or false, got 'yes'"),
        ("llama", {"attention_bias": 1}, "attention_bias in here must be true or false, got 1"),
        ("llama", {"layer_types": 5}, "layer_types in here must be a list of words, got 5"),
        ("llama", {"layer_types": [["full_attention"]]}, "layer_types in here must be a list of words"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types in here must be one for each of 2 layers, got 1"),
        ("llama", {"layer_types": [LONG, LONG]}, r"layer_types in here must be full_attention, got xxx.*\.\.\.$"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act in here must be 'silu' or .*, got \['silu'\]"),
        ("gpt2", {"activation_function": ["gelu"]}, r"activation_function in here must be .*, got \['gelu'\]"),
        ("gpt2", {"n_inner": "a"}, "n_inner in here must be an integer"),
        ("mixtral", {"num_local_experts": 10**9}, "the number of experts in here must be at most 16,384, got 10000"),
        ("mixtral", {"num_experts": 5}, "num_local_experts and num_experts in here must be equal, got 4 and 5"),
        ("mixtral", {"num_experts_per_tok": "2"}, "num_experts_per_tok in here must be an integer"),
        ("mixtral", {"router_aux_loss_coef": []}, r"router_aux_loss_coef in here must be a finite number, got \[\]"),
        ("qwen3 with experts", {"norm_topk_prob": 1}, "norm_topk_prob in here must be true or false, got 1"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_fields_of_another_type_or_size(case, changes, sentence):
    read_config(oracle.CASES[case], "here")
    with pytest.raises(ValueError, match=sentence) as raised:
        read_config(oracle.CASES[case] | changes, "here")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_whole_numbers_become_floats():
    """Or jax would take them for int32, in which 2**63 has no room."""
    changes = {"rope_theta": 2**63, "rope_scaling": oracle.SCALING | {"factor": 2**63}}
    found = read_config(oracle.LLAMA | changes, "here")
    assert (found.rotary_base, found.rotary_scaling.factor) == (2.0**63, 2.0**63)
    assert isinstance(found.rotary_base, float) and isinstance(found.rotary_scaling.factor, float)


def test_what_a_field_is():
    fields = Fields({"a": 1, "b": 2.5, "c": True, "d": ["x"], "e": {"f": 1}, "head_dim": None}, "here", "llama")
    assert (fields.integer("a"), fields.number("b"), fields.flag("c")) == (1, 2.5, True)
    assert (fields.names("d"), fields.names("z"), fields.part("e"), fields.part("z")) == (["x"], [], {"f": 1}, {})
    assert fields.optional_integer("head_dim") is None and fields.optional_integer("num_key_value_heads") is None
    assert fields.has("a", "z") and not fields.has("head_dim", "z")
