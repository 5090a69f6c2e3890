"""The fields of a GPTConfig from those of a config.json, for each family.

transformers has one load-balancing loss for all layers, and its shares add up to the number of experts of a token. Here
each layer has a loss, and shares add up to 1. So the coefficient is multiplied by `experts_per_token`, and divided by
the number of layers that have experts.
"""

from collections.abc import Callable

from jax_fp8.core.files import shortened
from jax_fp8.models.huggingface.families import ARCHITECTURES, EXPERTS, GATED_ACTIVATIONS, GPT2_ACTIVATIONS
from jax_fp8.models.huggingface.fields import Fields
from jax_fp8.models.huggingface.rotary_fields import read_rotary

Shape = dict[str, object]  # fields of a GPTConfig
# Families whose MLPs all have one width.
OF_ONE_WIDTH = tuple(family for family in ARCHITECTURES if family not in EXPERTS or family == "mixtral")
FULL, SLIDING = "full_attention", "sliding_attention"


def read_fields(fields: Fields) -> Shape:
    """The fields of a GPTConfig, from a config.json of any family."""
    if fields.family == "gpt2":
        return _read_gpt2(fields)
    shape = _read_common(fields) | _OWN[fields.family](fields)
    if shape.get("sliding_window") is None:  # only layers with a window have a base of their own
        shape["window_rotary_base"] = None
    return shape


def _read_common(fields: Fields) -> Shape:
    """What all families but GPT-2 have."""
    family, heads, width = fields.family, fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads, head_dim = fields.optional_integer("num_key_value_heads"), fields.optional_integer("head_dim")
    activation = fields.get("hidden_activation" if family.startswith("gemma") else "hidden_act")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "hidden_size": width,
        "max_seq_len": fields.integer("max_position_embeddings"),
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "mlp_hidden_size": fields.integer("intermediate_size" if family in OF_ONE_WIDTH else "moe_intermediate_size"),
        "norm": "rmsnorm",
        "activation": GATED_ACTIVATIONS[str(activation)],
        "positions": "rotary",
        "use_bias": False,
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "norm_epsilon": fields.number("rms_norm_eps"),
        "head_dim": None if head_dim is None or head_dim * heads == width else head_dim,
        **read_rotary(fields),
    }


def _read_biases(fields: Fields, has_mlp_bias: bool) -> Shape:
    """Biases of all linear maps of attention, and of those of the MLP."""
    in_attention = fields.flag("attention_bias")
    in_mlp = fields.flag("mlp_bias") if has_mlp_bias else False
    return {"use_bias": in_attention, "use_mlp_bias": None if in_mlp == in_attention else in_mlp}


def _read_llama(fields: Fields) -> Shape:
    return _read_biases(fields, has_mlp_bias=True) | _without_windows(fields)


def _read_mistral(fields: Fields) -> Shape:
    return {"sliding_window": fields.optional_integer("sliding_window")} | _without_windows(fields)


def _read_qwen2(fields: Fields) -> Shape:
    return {"use_qkv_bias": True} | _read_qwen_windows(fields)


def _read_qwen3(fields: Fields) -> Shape:
    return {"qk_norm": True} | _read_biases(fields, has_mlp_bias=False) | _read_qwen_windows(fields)


def _read_qwen_windows(fields: Fields) -> Shape:
    has_window, layers = fields.flag("use_sliding_window"), fields.integer("num_hidden_layers")
    window, first = (fields.optional_integer(name) for name in ("sliding_window", "max_window_layers"))
    is_windowed = [has_window and window is not None and index >= (first or 0) for index in range(layers)]
    return _read_windows(fields, is_windowed, window if has_window else None)


def _read_mixtral(fields: Fields) -> Shape:
    window = {"sliding_window": fields.optional_integer("sliding_window")}
    return window | _without_windows(fields) | _read_experts(fields)


def _read_qwen3_moe(fields: Fields) -> Shape:
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    biases = {"use_bias": fields.flag("attention_bias")}
    own = {"qk_norm": True, "sliding_window": window} | biases | _without_windows(fields)
    return own | _read_experts(fields) | _read_dense_layers(fields)


def _read_qwen2_moe(fields: Fields) -> Shape:
    layers, first = fields.integer("num_hidden_layers"), fields.optional_integer("max_window_layers")
    has_window = fields.flag("use_sliding_window")
    window = fields.optional_integer("sliding_window") if has_window else None
    is_windowed = [window is not None and index % 2 == 0 and index < (first or 0) for index in range(layers)]
    shared = {"shared_expert_features": fields.integer("shared_expert_intermediate_size"), "gate_shared_expert": True}
    biases = {"use_qkv_bias": fields.flag("qkv_bias") or None}
    own = _read_windows(fields, is_windowed, window) | biases | shared
    return own | _read_experts(fields) | _read_dense_layers(fields)


def _read_glm4_moe(fields: Fields) -> Shape:
    first, layers = fields.integer("first_k_dense_replace"), fields.integer("num_hidden_layers")
    if first < 0:
        raise fields.error("first_k_dense_replace", "an integer of at least 0", first)
    shared = fields.integer("n_shared_experts") * fields.integer("moe_intermediate_size")
    return {
        "use_qkv_bias": fields.flag("attention_bias") or None,
        "qk_norm": fields.flag("use_qk_norm"),
        "num_experts": fields.integer("n_routed_experts"),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "normalize_router_weights": fields.flag("norm_topk_prob"),
        "router_scores": "sigmoid",
        "router_scale": fields.number("routed_scaling_factor"),
        "router_correction_bias": True,
        "router_aux_loss": 0.0,
        "expert_groups": fields.integer("n_group"),
        "groups_per_token": fields.integer("topk_group"),
        "shared_expert_features": shared,
        "dense_layers": tuple(range(min(first, layers))),
        "dense_hidden_size": fields.integer("intermediate_size") if first and layers else None,
    } | _without_windows(fields)


def _read_dense_layers(fields: Fields) -> Shape:
    """The layers without experts."""
    dense = _dense_layers(fields)
    return {"dense_layers": dense, "dense_hidden_size": fields.integer("intermediate_size") if dense else None}


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Of Qwen: the numbers of the layers without experts."""
    every, alone = fields.integer("decoder_sparse_step"), fields.integers("mlp_only_layers") or []
    if every < 1:
        raise fields.error("decoder_sparse_step", "an integer of at least 1", every)
    layers = range(fields.integer("num_hidden_layers"))
    return tuple(index for index in layers if index in alone or (index + 1) % every)


def _read_gemma2(fields: Fields) -> Shape:
    layers = fields.integer("num_hidden_layers")
    is_windowed = [index % 2 == 0 for index in range(layers)]
    cap = fields.optional_number("attn_logit_softcapping")
    return _read_gemma(fields) | {"attention_logit_cap": cap} | _read_own_windows(fields, is_windowed)


def _read_gemma3(fields: Fields) -> Shape:
    layers, pattern = fields.integer("num_hidden_layers"), fields.integer("sliding_window_pattern")
    if pattern < 1:
        raise fields.error("sliding_window_pattern", "an integer of at least 1", pattern)
    is_windowed = [(index + 1) % pattern != 0 for index in range(layers)]
    return _read_gemma(fields) | {"qk_norm": True} | _read_own_windows(fields, is_windowed)


def _read_gemma(fields: Fields) -> Shape:
    scalar = fields.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise fields.error("query_pre_attn_scalar", "above 0", scalar)
    return _read_biases(fields, has_mlp_bias=False) | {
        "norm_placement": "both",
        "zero_centered_scale": True,
        "embedding_multiplier": float(fields.integer("hidden_size")) ** 0.5,
        "attention_scale": scalar**-0.5,
        "logit_cap": fields.optional_number("final_logit_softcapping"),
    }


def _read_olmo2(fields: Fields) -> Shape:
    return _read_olmo(fields) | _without_windows(fields)


def _read_olmo3(fields: Fields) -> Shape:
    is_windowed = [(index + 1) % 4 != 0 for index in range(fields.integer("num_hidden_layers"))]
    return _read_olmo(fields) | _read_own_windows(fields, is_windowed)


def _read_olmo(fields: Fields) -> Shape:
    olmo = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "all"}
    return olmo | _read_biases(fields, has_mlp_bias=False)


def _read_phi3(fields: Fields) -> Shape:
    return {"sliding_window": fields.optional_integer("sliding_window")} | _without_windows(fields)


def _read_smollm3(fields: Fields) -> Shape:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    rotated = fields.integers("no_rope_layers")
    if rotated is None:
        if interval < 1:
            raise fields.error("no_rope_layer_interval", "an integer of at least 1", interval)
        rotated = [int((index + 1) % interval != 0) for index in range(layers)]
    if len(rotated) < layers:
        raise fields.error("no_rope_layers", f"a list of a number for each of {layers} layers", rotated)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    windows = _read_windows(fields, [window is not None and not rotates for rotates in rotated[:layers]], window)
    unrotated = tuple(index for index, rotates in enumerate(rotated[:layers]) if not rotates)
    return _read_biases(fields, has_mlp_bias=True) | windows | {"unrotated_layers": unrotated}


def _read_granite(fields: Fields) -> Shape:
    multipliers = {"embedding_multiplier": "embedding_multiplier", "residual_multiplier": "residual_multiplier"}
    multipliers |= {"attention_scale": "attention_multiplier", "logit_divisor": "logits_scaling"}
    found: Shape = {ours: fields.number(theirs) for ours, theirs in multipliers.items()}
    return _read_biases(fields, has_mlp_bias=True) | _without_windows(fields) | found


def _read_own_windows(fields: Fields, is_windowed: list[bool]) -> Shape:
    return _read_windows(fields, is_windowed, fields.optional_integer("sliding_window"))


def _read_windows(fields: Fields, is_windowed: list[bool], window: int | None) -> Shape:
    """The window, and the layers that have it: those of `layer_types`, or where that is missing `is_windowed`."""
    _check_layer_types(fields, {FULL, SLIDING}, len(is_windowed))
    kinds = fields.names("layer_types")
    is_windowed = [kind == SLIDING for kind in kinds] if kinds else is_windowed
    if not any(is_windowed):
        return {"sliding_window": None}
    if window is None:
        raise ValueError(
            f"sliding_window in {fields.where} must be an integer where layers have {SLIDING}, got none; give it, and "
            "use_sliding_window where a family has it"
        )
    windowed = tuple(index for index, is_own in enumerate(is_windowed) if is_own)
    return {"sliding_window": window, "windowed_layers": None if all(is_windowed) else windowed}


def _without_windows(fields: Fields) -> Shape:
    """No field. Raise where `layer_types` gives some layers a window, in a family whose layers are alike."""
    _check_layer_types(fields, {FULL}, fields.integer("num_hidden_layers"))
    return {}


def _check_layer_types(fields: Fields, allowed: set[str], layers: int) -> None:
    kinds = fields.names("layer_types")
    others = sorted(set(kinds) - allowed)
    if others:
        arrived = shortened(", ".join(others))
        raise ValueError(f"layer_types in {fields.where} must be {' or '.join(sorted(allowed))}, got {arrived}")
    if kinds and len(kinds) != layers:
        raise ValueError(f"layer_types in {fields.where} must be one for each of {layers} layers, got {len(kinds)}")


def _read_experts(fields: Fields) -> Shape:
    # transformers accepts either name of the number of experts; each family writes its own.
    own, other = ("num_experts", "num_local_experts")[:: -1 if fields.family == "mixtral" else 1]
    experts = fields.integer(own if own in fields.described or other not in fields.described else other)
    if fields.has(own) and fields.has(other) and fields.integer(other) != experts:
        raise ValueError(
            f"{own} and {other} in {fields.where} must be equal, got {experts} and {fields.integer(other)}; remove one"
        )
    choices = fields.integer("num_experts_per_tok")
    dense = () if fields.family == "mixtral" else _dense_layers(fields)
    layers = fields.integer("num_hidden_layers") - len(dense)
    return {
        "num_experts": experts,
        "experts_per_token": choices,
        "normalize_router_weights": fields.family == "mixtral" or fields.flag("norm_topk_prob"),
        "router_aux_loss": fields.number("router_aux_loss_coef") * choices / max(layers, 1),
    }


def _read_gpt2(fields: Fields) -> Shape:
    _check_layer_types(fields, {FULL}, fields.integer("n_layer"))
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


_OWN: dict[str, Callable[[Fields], Shape]] = {
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
    "qwen2_moe": _read_qwen2_moe,
    "glm4_moe": _read_glm4_moe,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3,
    "olmo2": _read_olmo2,
    "olmo3": _read_olmo3,
    "phi3": _read_phi3,
    "smollm3": _read_smollm3,
    "granite": _read_granite,
}
