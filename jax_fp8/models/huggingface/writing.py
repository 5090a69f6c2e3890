"""The fields of a config.json from those of a GPTConfig, for each family.

A family's file is written also for a config that the family cannot compute. `family_of` reads it again and compares.
"""

from collections.abc import Callable, Mapping

from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.families import ARCHITECTURES, EXPERTS, GATED_ACTIVATIONS, GPT2_ACTIVATIONS
from jax_fp8.models.huggingface.rotary_fields import write_rotary

Described = dict[str, object]  # fields of a config.json


def write_fields(config: GPTConfig, family: str) -> Described:
    """The fields that describe this model in the words of a family."""
    described: Described = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if family == "gpt2":
        return described | {
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_seq_len,
            "n_inner": config.mlp_hidden_size,
            "activation_function": _name_of(config.activation, GPT2_ACTIVATIONS),
            "layer_norm_epsilon": config.norm_epsilon,
        }
    activation = "hidden_activation" if family.startswith("gemma") else "hidden_act"
    described |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_hidden_size or 4 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.features_of_head,
        activation: _name_of(config.activation, GATED_ACTIVATIONS),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_epsilon,
        **write_rotary(config, family),
    }
    return described | _OWN[family](config) | (_write_router(config) if family in EXPERTS else {})


def _name_of(activation: str, names: Mapping[str, str]) -> str | None:
    """The first name of an activation in transformers, or None."""
    return next((theirs for theirs, ours in names.items() if ours == activation), None)


def _write_biases(config: GPTConfig) -> Described:
    return {"attention_bias": config.use_bias}


def _write_both_biases(config: GPTConfig) -> Described:
    mlp_bias = config.use_bias if config.use_mlp_bias is None else config.use_mlp_bias
    return _write_biases(config) | {"mlp_bias": mlp_bias}


def _write_layer_types(config: GPTConfig) -> Described:
    windowed = [config.layer_fields(index)["sliding_window"] is not None for index in range(config.num_layers)]
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windowed]
    return {"layer_types": kinds, "sliding_window": config.sliding_window}


def _write_qwen_windows(config: GPTConfig) -> Described:
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, **_write_layer_types(config)}


def _write_qwen3_moe(config: GPTConfig) -> Described:
    return _write_biases(config) | {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.mlp_hidden_size or 4 * config.hidden_size,
        "norm_topk_prob": config.normalize_router_weights,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **_write_dense_layers(config),
    }


def _write_qwen2_moe(config: GPTConfig) -> Described:
    windows = {"use_sliding_window": config.sliding_window is not None, **_write_layer_types(config)}
    return windows | {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.mlp_hidden_size or 4 * config.hidden_size,
        "shared_expert_intermediate_size": config.shared_expert_features,
        "norm_topk_prob": config.normalize_router_weights,
        "qkv_bias": bool(config.use_qkv_bias),
        **_write_dense_layers(config),
    }


def _write_dense_layers(config: GPTConfig) -> Described:
    """The layers without experts, and their width, which is that of all MLPs where there are none."""
    dense = {"intermediate_size": config.dense_hidden_size} if config.dense_hidden_size else {}
    return {"decoder_sparse_step": 1, "mlp_only_layers": sorted(set(config.dense_layers)), **dense}


def _write_glm4_moe(config: GPTConfig) -> Described:
    hidden = config.mlp_hidden_size or 4 * config.hidden_size
    return {
        "attention_bias": bool(config.use_qkv_bias),
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": hidden,
        "intermediate_size": config.dense_hidden_size or hidden,
        "n_shared_experts": config.shared_expert_features // hidden,
        "norm_topk_prob": config.normalize_router_weights,
        "routed_scaling_factor": config.router_scale,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "first_k_dense_replace": len(set(config.dense_layers)),
        "num_nextn_predict_layers": 0,
    }


def _write_gemma(config: GPTConfig) -> Described:
    scale = config.attention_scale
    return {
        "query_pre_attn_scalar": config.features_of_head if scale is None else round(scale**-2),
        "final_logit_softcapping": config.logit_cap,
        **_write_biases(config),
        **_write_layer_types(config),
    }


def _write_gemma2(config: GPTConfig) -> Described:
    return _write_gemma(config) | {"attn_logit_softcapping": config.attention_logit_cap}


def _write_olmo3(config: GPTConfig) -> Described:
    return _write_biases(config) | _write_layer_types(config)


def _write_smollm3(config: GPTConfig) -> Described:
    rotates = [int(index not in config.unrotated_layers) for index in range(config.num_layers)]
    return _write_both_biases(config) | _write_qwen_windows(config) | {"no_rope_layers": rotates}


def _write_granite(config: GPTConfig) -> Described:
    scale = config.attention_scale
    return _write_both_biases(config) | {
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.features_of_head**-0.5 if scale is None else scale,
        "logits_scaling": config.logit_divisor,
    }


def _write_router(config: GPTConfig) -> Described:
    layers = config.num_layers - len(set(config.dense_layers))
    coefficient = config.router_aux_loss * max(layers, 1) / config.experts_per_token
    return {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": float(f"{coefficient:.12g}"),  # rounded to the number that was divided
    }


def _write_window(config: GPTConfig) -> Described:
    return {"sliding_window": config.sliding_window}


_OWN: dict[str, Callable[[GPTConfig], Described]] = {
    "llama": _write_both_biases,
    "qwen2": _write_qwen_windows,
    "qwen3": lambda config: _write_qwen_windows(config) | _write_biases(config),
    "mistral": _write_window,
    "mixtral": lambda config: {"num_local_experts": config.num_experts, **_write_window(config)},
    "qwen3_moe": _write_qwen3_moe,
    "qwen2_moe": _write_qwen2_moe,
    "glm4_moe": _write_glm4_moe,
    "gemma2": _write_gemma2,
    "gemma3_text": _write_gemma,
    "olmo2": _write_biases,
    "olmo3": _write_olmo3,
    "phi3": _write_window,
    "smollm3": _write_smollm3,
    "granite": _write_granite,
}
