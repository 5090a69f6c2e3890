"""Limits for models whose shape comes from a file: a few words in a stranger's file must not exhaust a host.

Every shape from a file is checked here before anything is allocated. The limits are far above every existing model, and
low enough that no size overflows an int32, and no check takes minutes.
"""

from collections.abc import Mapping

from jax_fp8.core.files import shortened, shown
from jax_fp8.models.config import GPTConfig

MOST = {
    "vocab_size": 2**24,
    "num_layers": 2**12,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "hidden_size": 2**20,
    "mlp_hidden_size": 2**24,
    "head_dim": 2**16,
    "max_seq_len": 2**30,
    "sliding_window": 2**30,
    "num_experts": 2**14,
    "experts_per_token": 2**14,
    "shared_expert_features": 2**24,
    "dense_hidden_size": 2**24,
    "expert_groups": 2**14,
    "groups_per_token": 2**14,
    "group_score_experts": 2**14,
}
FLOATS = (
    "rotary_base",
    "norm_epsilon",
    "router_aux_loss",
    "router_z_loss",
    "router_scale",
    "capacity_factor",
    "dropout_rate",
    "attention_dropout_rate",
    "window_rotary_base",
    "rotary_fraction",
    "attention_scale",
    "attention_logit_cap",
    "residual_multiplier",
    "embedding_multiplier",
    "logit_divisor",
    "logit_cap",
)
MOST_LENGTH = 2**31 - 1  # tokens: the sequence length for which rotary positions were trained before they were scaled
MOST_TENSORS = 2**21  # of all layers with all experts


def check_limits(described: Mapping[str, object], where: str, names: Mapping[str, str] | None = None) -> None:
    """Raise unless all sizes of a shape are within the limits. `GPTConfig` itself refuses values that are no numbers.

    Args:
      described: fields of a `GPTConfig` by name.
      where: the file, for messages.
      names: the file's own names of these fields, for messages.
    """
    sizes = {name: value for name in MOST if isinstance(value := described.get(name), int | float)}
    for name, value in sizes.items():
        if not value <= MOST[name]:
            raise ValueError(
                f"{(names or {}).get(name, name)} in {where} must be at most {MOST[name]:,}, got {shown(value)}; "
                "no model is that large"
            )
    tensors = sizes.get("num_layers", 0) * max(sizes.get("num_experts", 0), 1)
    if tensors > MOST_TENSORS:
        raise ValueError(
            f"{where} must have layers and experts for at most {MOST_TENSORS:,} tensors of a kind, got {tensors:,}; no "
            "model is that large"
        )


def config_of(described: object, where: str) -> GPTConfig:
    """The GPTConfig that a file describes by its fields; ValueError in one sentence where it is not valid."""
    if not isinstance(described, Mapping):
        raise ValueError(f"{where} must describe a model by the fields of a GPTConfig, got {shown(described)}")
    check_limits(described, where)
    try:
        return GPTConfig.from_dict(_with_floats(described))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where} must describe a model: {shortened(str(error), 300)}") from None


def _with_floats(described: Mapping[str, object]) -> dict[str, object]:
    """With floats in the fields that are floats. JSON may have integers there, too large ones for arrays as well."""
    floats = {name: _as_float(described[name]) for name in FLOATS if name in described}
    scaling = described.get("rotary_scaling")
    if isinstance(scaling, Mapping):
        length = scaling.get("original_length", 1)
        if isinstance(length, int) and length > MOST_LENGTH:
            raise ValueError(f"original_length of a RotaryScaling must be at most {MOST_LENGTH:,}, got {shown(length)}")
        others = {name: _as_float(value) for name, value in scaling.items() if name != "original_length"}
        floats["rotary_scaling"] = {**scaling, **others}
    return {**described, **floats}


def _as_float(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
