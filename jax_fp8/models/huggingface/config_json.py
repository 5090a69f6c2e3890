"""config.json of Hugging Face as a GPTConfig and back. families.py lists the families.

If a field changes what a model computes and a GPT has no such field, the file is refused, and the message names the
field. Fields that do not change the shape (dropout, the tokens that begin and end a text) are ignored when reading, and
written as null or not at all.

A model is written in the layout of the first family whose config.json, read again, describes the same model. So no
field of a GPTConfig is lost that a family has no field for.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace

from jax_fp8.core.files import shortened, shown
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.families import ARCHITECTURES, EXPERTS, FIXED
from jax_fp8.models.huggingface.fields import Fields
from jax_fp8.models.huggingface.quantized import block_of
from jax_fp8.models.huggingface.reading import read_fields
from jax_fp8.models.huggingface.writing import write_fields
from jax_fp8.models.limits import check_limits

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
    "sliding_window": "sliding_window",
    "num_experts": "the number of experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_expert_features": "the width of shared experts",
    "dense_hidden_size": "intermediate_size",
}
OF_ROUTERS = (
    "router_scores",
    "router_scale",
    "router_correction_bias",
    "expert_groups",
    "groups_per_token",
    "group_score_experts",
)
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
    for name, (default, allowed) in FIXED[family].items():
        if described.get(name, default) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            arrived = shown(described[name])
            raise ValueError(f"{name} in {where} must be {wanted}, got {arrived}; no other can be converted")
    block_of(described, where)
    fields, names = Fields(described, where, family), GPT2_SIZES if family == "gpt2" else SIZES
    check_limits({"num_layers": fields.integer(names["num_layers"])}, where, names)  # before lists of so many layers
    shape = read_fields(fields)
    check_limits(shape, where, names)
    try:
        return GPTConfig.from_dict(shape)
    except ValueError as error:
        raise ValueError(f"{where} must describe a model: {shortened(str(error), 300)}") from error


def family_of(config: GPTConfig, family: str | None = None) -> str:
    """The first family in whose layout a model can be written, one of ARCHITECTURES; or `family`, if it can be that."""
    if family is not None and family not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {', '.join(ARCHITECTURES)}, got {family!r}; leave it out")
    families = tuple(ARCHITECTURES) if family is None else (family,)
    others = {name: _differences(config, name) for name in families}
    fitting = [name for name, differences in others.items() if differences == {}]
    if fitting:
        return fitting[0]
    near = {name: differences for name, differences in others.items() if differences}
    why = "no family has such sizes and layers"
    if near:
        nearest = min(near, key=lambda name: len(near[name]))
        needs = ", ".join(f"{field}={value!r}" for field, value in near[nearest].items())
        why = f"{nearest}, the nearest, needs {needs}"
    raise ValueError(
        f"a model for Hugging Face must be like one of {', '.join(families)}, in every field that changes what it "
        f"computes: {why}; got {config}"
    )


def fits(config: GPTConfig, family: str) -> bool:
    """Whether a family can compute what a config says."""
    return _differences(config, family) == {}


def _differences(config: GPTConfig, family: str) -> dict[str, object] | None:
    """The fields in which a family's model is another one, with its values; None where it has no model like this."""
    if bool(config.num_experts) != (family in EXPERTS):
        return None
    try:
        found, wanted = _canonical(read_config(write_fields(config, family), "config.json")), _canonical(config)
    except ValueError:
        return None
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return {name: value for name, value in values.items() if value != getattr(wanted, name)}


def _canonical(config: GPTConfig) -> GPTConfig:
    """The same model, with one way to say what fields can say in several ways, and without what no config.json has."""
    optional: dict[str, object] = {}
    if config.num_kv_heads == config.num_heads:
        optional["num_kv_heads"] = None
    if config.features_of_head * config.num_heads == config.hidden_size:
        optional["head_dim"] = None
    if config.use_qkv_bias == config.use_bias:
        optional["use_qkv_bias"] = None
    if config.use_mlp_bias == config.use_bias or config.num_experts:
        optional["use_mlp_bias"] = None
    if config.attention_scale == config.features_of_head**-0.5:
        optional["attention_scale"] = None
    if not config.qk_norm:
        optional["qk_norm_over"] = "head"
    optional |= _canonical_experts(config)
    return replace(
        replace(config, **_canonical_windows(config)),
        mlp_hidden_size=config.mlp_hidden_size or 4 * config.hidden_size,
        rotary_base=float(config.rotary_base),
        norm_epsilon=float(config.norm_epsilon),
        router_z_loss=0.0,
        capacity_factor=None,
        dropout_rate=0.0,
        attention_dropout_rate=0.0,
        unrotated_layers=tuple(sorted(set(config.unrotated_layers))),
        **optional,
    )


def _canonical_experts(config: GPTConfig) -> dict[str, object]:
    if not config.num_experts:
        unused = ("experts_per_token", "normalize_router_weights", "router_aux_loss", "dense_hidden_size", *OF_ROUTERS)
        return {field.name: field.default for field in dataclasses.fields(config) if field.name in unused}
    found: dict[str, object] = {"router_aux_loss": float(f"{config.router_aux_loss:.9g}")}  # multiplied and divided
    if config.router_correction_bias:  # no config.json with such biases has a coefficient
        found["router_aux_loss"] = 0.0
    if config.expert_groups == 1:
        found["group_score_experts"] = 2
    if config.dense_layers:
        found["dense_layers"] = tuple(sorted(set(config.dense_layers)))
        found["dense_hidden_size"] = config.dense_hidden_size or config.mlp_hidden_size or 4 * config.hidden_size
    return found


def _canonical_windows(config: GPTConfig) -> dict[str, object]:
    layers = tuple(range(config.num_layers))
    windowed = tuple(i for i in layers if config.layer_fields(i)["sliding_window"] is not None)
    if not windowed and layers:
        return {"sliding_window": None, "windowed_layers": None, "window_rotary_base": None}
    rotates_alike = config.window_rotary_base == config.rotary_base and config.rotary_scaling is None
    own_base = None if rotates_alike else config.window_rotary_base
    return {"windowed_layers": None if windowed == layers else windowed, "window_rotary_base": own_base}


def write_config(config: GPTConfig, family: str, dtype: str) -> dict[str, object]:
    """The config.json of a model of this family whose tensors have this dtype."""
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return write_fields(config, family) | {"torch_dtype": dtype, **ends}
