"""The families of models, by the `model_type` of their config.json: the class that loads them in `transformers`, what a
missing field means, and the fields that must have one value.

Defaults are those of `transformers` 5.24: a model whose file lacks a field was trained with its default. A field
without a default must be there, because sizes of a model are never guessed.
"""

from collections.abc import Mapping

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe")  # families whose layers have experts
# Names of activations in transformers, and ours; the first name of each is the one that is written.
GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "relu": "reglu",
}

_LLAMA = {
    "num_key_value_heads": None,  # num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_WINDOWED = {"sliding_window": 4096, "use_sliding_window": False}
_QWEN2 = _LLAMA | _WINDOWED | {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28}
_WITH_EXPERTS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1}
_GEMMA2 = _LLAMA | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_OLMO2 = _LLAMA | {"rms_norm_eps": 1e-5}
DEFAULTS: dict[str, Mapping[str, object]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "mistral": _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "mixtral": _LLAMA
    | _WITH_EXPERTS
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "qwen3_moe": _LLAMA | _WINDOWED | _WITH_EXPERTS | {"num_key_value_heads": 4, "max_position_embeddings": 32_768},
    "qwen2_moe": _LLAMA
    | _WINDOWED
    | _WITH_EXPERTS
    | {"num_key_value_heads": 16, "max_position_embeddings": 32_768, "max_window_layers": 28, "qkv_bias": True},
    "glm4_moe": _LLAMA
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
    },
    "olmo2": _OLMO2,
    "olmo3": _OLMO2 | {"sliding_window": 4096, "rope_theta": 500_000.0},
    "phi3": _LLAMA
    | {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
    },
    "smollm3": _LLAMA
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
    },
    "granite": _LLAMA
    | dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0),
    "gpt2": {
        "n_inner": None,  # 4 n_embd
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}

# Fields for which a GPT has one value only: the value where the field is missing, and the values that are accepted.
_ROTATES_ALL = {"partial_rotary_factor": (1.0, [1.0, None]), "original_max_position_embeddings": (None, [None])}
_GATED = _ROTATES_ALL | {"hidden_act": ("silu", [*GATED_ACTIVATIONS])}
_NO_BIAS = {"attention_bias": (False, [False])}
_GEMMA = _ROTATES_ALL | {
    "hidden_activation": ("gelu_pytorch_tanh", [*GATED_ACTIVATIONS]),
    "use_bidirectional_attention": (None, [None, False]),
}
FIXED: dict[str, Mapping[str, tuple[object, list]]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "smollm3", "granite"), _GATED),
    "mixtral": _GATED | _NO_BIAS | {"hidden_act": ("silu", ["silu", "swish"])},
    "qwen3_moe": _GATED | {"shared_expert_intermediate_size": (0, [0, None])},
    "qwen2_moe": _GATED,
    "glm4_moe": {
        "hidden_act": ("silu", [*GATED_ACTIVATIONS]),
        "original_max_position_embeddings": (None, [None]),
    },
    "gemma2": _GEMMA,
    # transformers reads this field of Gemma 3 and does not use it.
    "gemma3_text": _GEMMA | {"attn_logit_softcapping": (None, [None])},
    "phi3": _NO_BIAS | {"hidden_act": ("silu", [*GATED_ACTIVATIONS])},
    "gpt2": {
        "activation_function": ("gelu_new", [*GPT2_ACTIVATIONS]),
        "scale_attn_weights": (True, [True]),
        "scale_attn_by_inverse_layer_idx": (False, [False]),
        "add_cross_attention": (False, [False]),
    },
}
