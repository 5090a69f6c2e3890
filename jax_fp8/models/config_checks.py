"""Checks of the fields of a GPTConfig. They run when it is made, so that a bad value is reported by its name."""

from typing import Any

from jax_fp8.core.checks import check_bool, check_integer, check_number
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.norm import check_norm
from jax_fp8.nn.dropout import is_rate
from jax_fp8.ops.expert_rows import check_capacity
from jax_fp8.ops.rotary import ROTARY_BASE, check_rotary, rotated_features
from jax_fp8.ops.router import RouterRule

DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate")
LAYER_NUMBERS = ("windowed_layers", "unrotated_layers", "dense_layers")
OF_ROTARY = {
    "rotary_base": ROTARY_BASE,
    "rotary_scaling": None,
    "rotary_fraction": 1.0,
    "window_rotary_base": None,
    "unrotated_layers": (),
}  # by name, what they are without rotary positions


def check_fields(config: Any) -> None:
    """Raise unless the fields of a config fit together."""
    for name in ("vocab_size", "num_heads", "hidden_size", "max_seq_len"):
        check_integer(name, getattr(config, name))
    check_integer("num_layers", config.num_layers, least=0)
    for name in ("num_kv_heads", "mlp_hidden_size", "dense_hidden_size", "head_dim", "sliding_window"):
        if getattr(config, name) is not None:
            check_integer(name, getattr(config, name))
    for name in ("use_bias", "tie_embeddings", "qk_norm", "normalize_router_weights", "zero_centered_scale"):
        check_bool(name, getattr(config, name))
    for name in ("use_qkv_bias", "use_mlp_bias"):
        if getattr(config, name) is not None:
            check_bool(name, getattr(config, name))
    check_number("norm_epsilon", config.norm_epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
    for name in DROPOUT_RATES:
        check_number(name, getattr(config, name), "of at least 0 and below 1", is_rate)
    check_rotary(config.rotary_base, config.rotary_scaling, config.rotary_fraction)
    if config.positions not in ("learned", "rotary"):
        raise ValueError(f'positions must be "learned" or "rotary", got {config.positions!r}')
    check_norm(config.norm)
    is_gated(config.activation)
    _check_layer_numbers(config)
    _check_experts(config)
    _check_numerics(config)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.hidden_size
    if config.head_dim is None and width % heads:
        raise ValueError(
            f"num_heads must divide hidden_size, got num_heads={heads} and hidden_size={width}; change one of them, or "
            "give head_dim"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}")
    if config.positions == "rotary":
        _check_rotated(config)
    elif any(getattr(config, name) != default for name, default in OF_ROTARY.items()):
        raise ValueError(
            f"{', '.join(OF_ROTARY)} are for rotary positions, got them with positions={config.positions!r}; leave "
            "them out"
        )


def _check_rotated(config: Any) -> None:
    features = rotated_features(config.features_of_head, config.rotary_fraction)
    fraction = "" if config.rotary_fraction == 1 else f" with rotary_fraction={config.rotary_fraction}"
    if features % 2 or not features:
        raise ValueError(
            "rotary positions rotate pairs and need an even head_dim, which is hidden_size / num_heads if it is None, "
            f"got {config.features_of_head}{fraction}; change one of them"
        )
    divisors = getattr(config.rotary_scaling, "short_factors", None)
    if divisors is not None and len(divisors) != features // 2:
        raise ValueError(
            f"a LongRopeScaling must have a factor for each of {features // 2} pairs of rotated features, got "
            f"{len(divisors)}; change rotary_fraction or the factors"
        )


def _check_layer_numbers(config: Any) -> None:
    for name in LAYER_NUMBERS:
        numbers = getattr(config, name)
        if numbers is None and name == "windowed_layers":
            continue
        if not isinstance(numbers, tuple):
            raise ValueError(f"{name} must be a tuple of the numbers of layers, got {numbers!r}")
        for number in numbers:
            check_integer(f"{name}: each number", number, least=0, most=max(config.num_layers - 1, 0))
    if config.sliding_window is None and (config.windowed_layers is not None or config.window_rotary_base is not None):
        raise ValueError(
            "windowed_layers and window_rotary_base are for layers with a sliding_window, got them without one; give "
            "it, or leave them out"
        )


def _check_numerics(config: Any) -> None:
    """Raise unless the fields that change what layers and head compute are valid."""
    for name in ("attention_scale", "attention_logit_cap", "logit_cap", "window_rotary_base"):
        if getattr(config, name) is not None:
            least = 1 if name == "window_rotary_base" else 0
            check_number(name, getattr(config, name), f"above {least}", lambda value, least=least: value > least)
    check_number("logit_divisor", config.logit_divisor, "above 0", lambda value: value > 0)
    for name in ("residual_multiplier", "embedding_multiplier"):
        check_number(name, getattr(config, name), "", lambda _: True)
    if config.qk_norm_over not in ("head", "all"):
        raise ValueError(f'qk_norm_over must be "head" or "all", got {config.qk_norm_over!r}')
    if config.norm_placement not in ("before", "after", "both"):
        raise ValueError(f'norm_placement must be "before", "after" or "both", got {config.norm_placement!r}')
    if config.zero_centered_scale and config.norm != "rmsnorm":
        raise ValueError(f'zero_centered_scale is for norm="rmsnorm", got {config.norm!r}; leave it out')
    if config.num_experts and (config.norm_placement != "before" or config.residual_multiplier != 1):
        raise ValueError(
            'experts need norm_placement="before" and residual_multiplier=1, got '
            f"{config.norm_placement!r} and {config.residual_multiplier}; leave these out"
        )


def _check_experts(config: Any) -> None:
    check_integer("num_experts", config.num_experts, least=0)
    check_integer("experts_per_token", config.experts_per_token)
    check_integer("shared_expert_features", config.shared_expert_features, least=0)
    for name in ("router_correction_bias", "gate_shared_expert"):
        check_bool(name, getattr(config, name))
    check_capacity("capacity_factor", config.capacity_factor)
    for name in ("router_aux_loss", "router_z_loss"):
        check_number(name, getattr(config, name), "that is not negative", lambda weight: weight >= 0)
    if config.num_experts:
        RouterRule.from_fields(vars(config)).check(config.num_experts)
    else:
        given = [name for name in ("shared_expert_features", "dense_layers") if getattr(config, name)]
        if given:
            raise ValueError(f"{given[0]} is for a model with experts, got num_experts=0; leave it out")
    if config.gate_shared_expert and not config.shared_expert_features:
        raise ValueError("gate_shared_expert is for a shared expert, got shared_expert_features=0; give it a size")
    if config.dense_hidden_size is not None and not config.dense_layers:
        raise ValueError("dense_hidden_size is for dense_layers, got none; leave it out")
