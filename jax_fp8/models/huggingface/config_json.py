"""config.json of Hugging Face's Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and GPT-2, as a GPTConfig and back.

If a field changes what a model computes and a GPT has no such field, the file is refused, and the message names the
field. Fields that do not change the shape (dropout, the tokens that begin and end a text) are ignored when reading, and
written as null or not at all.

transformers has one load-balancing loss for all layers, and its shares add up to the number of experts of a token. Here
each layer has a loss, and shares add up to 1. So the coefficient is multiplied by `experts_per_token / num_layers`.
"""

from collections.abc import Mapping

from jax_fp8.core.files import shortened, shown
from jax_fp8.kernels.activation import is_gated
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.fields import Fields, is_number
from jax_fp8.models.limits import check_limits
from jax_fp8.ops.rotary import RotaryScaling

LLAMA_LIKE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WITH_EXPERTS = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
ARCHITECTURES = {**LLAMA_LIKE, **WITH_EXPERTS, "gpt2": "GPT2LMHeadModel"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"}
# Fields for which a GPT has one value only: the value where the field is missing, and the values that are accepted.
FIXED = {
    "llama": {"hidden_act": ("silu", ["silu"])},
    "qwen2": {"hidden_act": ("silu", ["silu"]), "use_sliding_window": (False, [False])},
    "qwen3": {
        "hidden_act": ("silu", ["silu"]),
        "use_sliding_window": (False, [False]),
        "attention_bias": (False, [False]),
    },
    "mixtral": {"hidden_act": ("silu", ["silu"]), "sliding_window": (None, [None]), "attention_bias": (False, [False])},
    "qwen3_moe": {
        "hidden_act": ("silu", ["silu"]),
        "use_sliding_window": (False, [False]),
        "attention_bias": (False, [False]),
        "decoder_sparse_step": (1, [1]),  # every layer has experts
        "mlp_only_layers": ([], [[], None]),
        "shared_expert_intermediate_size": (0, [0, None]),
    },
    "gpt2": {
        "activation_function": ("gelu_new", [*GPT2_ACTIVATIONS]),
        "scale_attn_weights": (True, [True]),
        "scale_attn_by_inverse_layer_idx": (False, [False]),
        "add_cross_attention": (False, [False]),
    },
}
ALL_FAMILIES = {"quantization_config": (None, [None]), "partial_rotary_factor": (1.0, [1.0, None])}
SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
# The sizes of a GPTConfig by the names of config.json, for messages.
SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_size": "hidden_size",
    "mlp_hidden_size": "intermediate_size",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "num_experts": "the number of experts",
    "experts_per_token": "num_experts_per_tok",
}
GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "hidden_size": "n_embd",
    "mlp_hidden_size": "n_inner",
    "max_seq_len": "n_positions",
}


def read_config(described: Mapping[str, object], where: str) -> GPTConfig:
    """The GPTConfig of a config.json; messages name its file `where`."""
    family = described.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise ValueError(f"model_type in {where} must be one of {', '.join(ARCHITECTURES)}, got {shown(family)}")
    for name, (default, allowed) in (FIXED[family] | ALL_FAMILIES).items():
        if described.get(name, default) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            arrived = shown(described[name])
            raise ValueError(f"{name} in {where} must be {wanted}, got {arrived}; no other can be converted")
    fields = Fields(described, where, family)
    shape = _read_gpt2(fields) if family == "gpt2" else _read_llama(fields)
    check_limits(shape, where, GPT2_SIZES if family == "gpt2" else SIZES)
    _check_layer_types(fields, fields.integer("n_layer" if family == "gpt2" else "num_hidden_layers"))
    try:
        return GPTConfig.from_dict(shape)
    except ValueError as error:
        raise ValueError(f"{where} must describe a model: {shortened(str(error), 300)}") from error


def _check_layer_types(fields: Fields, layers: int) -> None:
    kinds = fields.names("layer_types")
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        arrived = shortened(", ".join(others))
        raise ValueError(f"layer_types in {fields.where} must be full_attention, got {arrived}")
    if kinds and len(kinds) != layers:
        raise ValueError(f"layer_types in {fields.where} must be one for each of {layers} layers, got {len(kinds)}")


def _read_llama(fields: Fields) -> dict[str, object]:
    """The fields of a GPTConfig, from a config.json of any family but GPT-2."""
    family, heads, width = fields.family, fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads, head_dim = fields.optional_integer("num_key_value_heads"), fields.optional_integer("head_dim")
    attention_bias, mlp_bias = (family == "llama" and fields.flag(f"{part}_bias") for part in ("attention", "mlp"))
    if attention_bias != mlp_bias:
        raise ValueError(
            f"attention_bias and mlp_bias must be equal, got {attention_bias} and {mlp_bias}; a GPT has both biases, "
            "or those of queries, keys and values alone"
        )
    base, scaling = _read_rotary(fields)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "hidden_size": width,
        "max_seq_len": fields.integer("max_position_embeddings"),
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "mlp_hidden_size": fields.integer("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "rotary",
        "use_bias": mlp_bias,
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "norm_epsilon": fields.number("rms_norm_eps"),
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        "use_qkv_bias": True if family == "qwen2" else None,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
        **(_read_experts(fields) if family in WITH_EXPERTS else {}),
    }


def _read_experts(fields: Fields) -> dict[str, object]:
    # transformers accepts either name of the number of experts; each family writes its own.
    own, other = ("num_experts", "num_local_experts")[:: -1 if fields.family == "mixtral" else 1]
    experts = fields.integer(own if own in fields.described or other not in fields.described else other)
    if fields.has(own) and fields.has(other) and fields.integer(other) != experts:
        raise ValueError(
            f"{own} and {other} in {fields.where} must be equal, got {experts} and {fields.integer(other)}; remove one"
        )
    choices, layers = fields.integer("num_experts_per_tok"), fields.integer("num_hidden_layers")
    return {
        "num_experts": experts,
        "experts_per_token": choices,
        "normalize_router_weights": fields.family == "mixtral" or fields.flag("norm_topk_prob"),
        "router_aux_loss": fields.number("router_aux_loss_coef") * choices / max(layers, 1),
    }


def _read_rotary(fields: Fields) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of rotary positions. transformers 5 writes them as one object, older versions as two fields."""
    if fields.part("rope_parameters") and fields.part("rope_scaling"):
        raise ValueError(
            f"{fields.where} must have one field that scales rotary positions, got rope_parameters and rope_scaling; "
            "remove one"
        )
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    base = (Fields(rope, fields.where, fields.family) if "rope_theta" in rope else fields).number("rope_theta")
    kind = rope.get("rope_type", rope.get("type"))
    plain = {"rope_theta": rope.get("rope_theta"), "rope_type": kind, "type": kind, "partial_rotary_factor": 1.0}
    others = {name: value for name, value in rope.items() if name not in plain or plain[name] != value}
    if kind in (None, "default") and not others:
        return base, None
    if kind != "llama3" or set(others) != set(SCALING.values()) or not all(map(is_number, others.values())):
        wanted = f"default, or llama3 with {', '.join(SCALING.values())}"
        raise ValueError(f"the scaling of rotary positions must be of rope_type {wanted}, got {shown(rope, 300)}")
    rope_fields = Fields(rope, fields.where, fields.family)
    length = rope_fields.integer(SCALING["original_length"])
    numbers = {name: rope_fields.number(theirs) for name, theirs in SCALING.items() if name != "original_length"}
    try:
        return base, RotaryScaling(**numbers, original_length=length)
    except ValueError as error:
        raise ValueError(f"{fields.where} must describe a model: {shortened(str(error), 300)}") from error


def _read_gpt2(fields: Fields) -> dict[str, object]:
    """The fields of a GPTConfig, from a config.json of GPT-2."""
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("n_layer"),
        "num_heads": fields.integer("n_head"),
        "hidden_size": fields.integer("n_embd"),
        "max_seq_len": fields.integer("n_positions"),
        "mlp_hidden_size": fields.optional_integer("n_inner"),
        "activation": GPT2_ACTIVATIONS[str(fields.get("activation_function"))],
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "norm_epsilon": fields.number("layer_norm_epsilon"),
    }


def family_of(config: GPTConfig) -> str:
    """The family in whose layout a model can be written, one of ARCHITECTURES."""
    has_bias, has_qkv_bias = config.use_bias, config.use_bias if config.use_qkv_bias is None else config.use_qkv_bias
    kind = config.positions, config.norm, config.activation
    if config.sliding_window is not None:
        raise ValueError(
            "a model for Hugging Face must attend to all earlier tokens, as the supported families do, got "
            f"sliding_window={config.sliding_window}; only a model without one can be written"
        )
    if kind == ("rotary", "rmsnorm", "swiglu") and config.num_experts:
        if config.qk_norm and not has_bias and not has_qkv_bias:
            return "qwen3_moe"
        if config.normalize_router_weights and not config.qk_norm and not has_bias and not has_qkv_bias:
            return "mixtral"
    elif kind == ("rotary", "rmsnorm", "swiglu"):
        if config.qk_norm and not has_bias and not has_qkv_bias:
            return "qwen3"
        if not config.qk_norm and has_qkv_bias and not has_bias:
            return "qwen2"
        if not config.qk_norm and has_bias == has_qkv_bias:
            return "llama"
    is_gpt2 = kind[:2] == ("learned", "layernorm") and config.activation in GPT2_ACTIVATIONS.values()
    has_all_heads = config.kv_heads * config.features_of_head == config.hidden_size and config.head_dim is None
    if is_gpt2 and has_all_heads and has_bias and has_qkv_bias and not config.qk_norm and not config.num_experts:
        return "gpt2"
    raise ValueError(
        "a model for Hugging Face must be like Llama, Qwen2 or Qwen3 (rotary positions, rmsnorm, swiglu; biases of "
        "queries, keys and values alone only with qk_norm=False), like Mixtral or Qwen3-MoE (the same with experts, no "
        "biases; without qk_norm normalize_router_weights=True) or like GPT-2 (learned positions, layernorm, gelu, "
        f"biases, as many heads of keys as of queries), got {config}"
    )


def write_config(config: GPTConfig, dtype: str) -> dict[str, object]:
    """The config.json of a model whose tensors have this dtype."""
    family = family_of(config)
    assert is_gated(config.activation) == (family != "gpt2")
    described: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "gpt2":
        names = {ours: theirs for theirs, ours in reversed(GPT2_ACTIVATIONS.items())}
        return described | {
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_seq_len,
            "n_inner": config.mlp_hidden_size,
            "activation_function": names[config.activation],
            "layer_norm_epsilon": config.norm_epsilon,
        }
    scaling = config.rotary_scaling
    described |= {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_hidden_size or 4 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.features_of_head,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling
        and {"rope_type": "llama3"} | {theirs: getattr(scaling, name) for name, theirs in SCALING.items()},
    }
    by_family: dict[str, dict[str, object]] = {
        "llama": {"attention_bias": config.use_bias, "mlp_bias": config.use_bias},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
        "mixtral": {"num_local_experts": config.num_experts, "sliding_window": None},
        "qwen3_moe": {
            "num_experts": config.num_experts,
            "moe_intermediate_size": described["intermediate_size"],
            "norm_topk_prob": config.normalize_router_weights,
            "use_sliding_window": False,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    }
    return described | by_family[family] | (_write_router(config) if config.num_experts else {})


def _write_router(config: GPTConfig) -> dict[str, object]:
    coefficient = config.router_aux_loss * max(config.num_layers, 1) / config.experts_per_token
    return {
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": float(
            f"{coefficient:.12g}"
        ),  # rounded to the number that was divided in `_read_experts`
    }
