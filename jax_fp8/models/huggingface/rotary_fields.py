"""The fields of a config.json about rotary positions, in and out.

transformers 5 writes base and scaling as one object, `rope_parameters`; older versions wrote `rope_theta` and
`rope_scaling`. Families whose layers with a window have a base of their own write an object for each kind of layer.
"""

import math
from collections.abc import Mapping
from typing import Any

from jax_fp8.core.files import shortened, shown
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.fields import Fields
from jax_fp8.ops.rotary_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RotaryScaling, YarnScaling

BY_LAYER_TYPE = ("gemma3_text", "olmo3")
ROTATES_A_PART = ("phi3", "glm4_moe")  # families that say which part of a head rotates
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
LLAMA3 = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
ORIGINAL = "original_max_position_embeddings"
YARN = ("factor", ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
# The fields beside the kind, by kind; with a star those that must be there.
FIELDS = {
    "linear": ("factor*",),
    "dynamic": ("factor*", ORIGINAL),
    "yarn": ("factor*", *YARN[1:]),
    "longrope": ("short_factor*", "long_factor*", "factor", "attention_factor", ORIGINAL),
    "llama3": tuple(f"{name}*" for name in LLAMA3.values()),
}


def read_rotary(fields: Fields) -> dict[str, object]:
    """The fields of a GPTConfig about rotary positions. `window_rotary_base` is for layers with a window alone."""
    if fields.part("rope_parameters") and fields.part("rope_scaling"):
        raise ValueError(
            f"{fields.where} must have one field that scales rotary positions, got rope_parameters and rope_scaling; "
            "remove one"
        )
    if fields.family in BY_LAYER_TYPE:
        return _read_by_layer_type(fields)
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    found: dict[str, object] = {"rotary_base": _base(rope, fields), "rotary_scaling": _scaling(rope, fields)}
    if fields.family in ROTATES_A_PART:
        of_rope = rope.get("partial_rotary_factor") is not None
        found["rotary_fraction"] = (_of(rope, fields) if of_rope else fields).number("partial_rotary_factor")
    return found


def _read_by_layer_type(fields: Fields) -> dict[str, object]:
    nested = fields.part("rope_parameters")
    if set(nested) - set(KINDS_OF_LAYERS):
        raise ValueError(
            f"rope_parameters in {fields.where} must have an object for each of {' and '.join(KINDS_OF_LAYERS)}, got "
            f"{shown(nested, 300)}"
        )
    full, sliding = (_of(nested, fields).part(kind) for kind in KINDS_OF_LAYERS)
    full = full or fields.part("rope_scaling")
    if _kind(sliding) != "default" or set(sliding) - {"rope_theta", "rope_type", "type"}:
        raise ValueError(
            f"rope_parameters in {fields.where} must not scale the positions of sliding_attention, got "
            f"{shown(sliding, 300)}; no other can be converted"
        )
    # Older files have a field of its own for the base of Gemma 3. For OLMo 3 transformers takes the default.
    if "rope_theta" in sliding:
        own = _base(sliding, fields)
    elif fields.family == "gemma3_text":
        own = fields.number("rope_local_base_freq")
    else:
        own = Fields({}, fields.where, fields.family).number("rope_theta")
    found = {"rotary_base": _base(full, fields), "rotary_scaling": _scaling(full, fields, nested=True)}
    return {**found, "window_rotary_base": own}


def _of(part: Mapping[str, object], fields: Fields) -> Fields:
    return Fields(part, fields.where, fields.family)


def _base(rope: Mapping[str, object], fields: Fields) -> float:
    return (_of(rope, fields) if "rope_theta" in rope else fields).number("rope_theta")


def _kind(rope: Mapping[str, object]) -> object:
    return rope.get("rope_type", rope.get("type")) or "default"


def _scaling(rope: dict[str, object], fields: Fields, nested: bool = False) -> object:
    """The scaling that this object describes, or None."""
    kind, family = _kind(rope), fields.family
    kind = "longrope" if family == "phi3" and kind in ("su", "yarn") else kind
    beside = {"rope_theta", "rope_type", "type"} | ({"partial_rotary_factor"} if family in ROTATES_A_PART else set())
    if rope.get("partial_rotary_factor") == 1:
        beside.add("partial_rotary_factor")
    others = {name: value for name, value in rope.items() if name not in beside}
    if kind == "default" and not others:
        return None
    names = FIELDS.get(kind, ()) if isinstance(kind, str) else ()
    allowed = {name.rstrip("*") for name in names}
    lacking = [name[:-1] for name in names if name.endswith("*") and name[:-1] not in others]
    is_known = bool(names) and not lacking and set(others) <= allowed
    if not is_known or (family == "phi3" and kind != "longrope"):
        wanted = f"{kind} with {' and '.join(lacking)}" if lacking else f"default, or one of {', '.join(FIELDS)}"
        raise ValueError(
            f"the scaling of rotary positions in {fields.where} must be of rope_type {wanted}, with no other field, "
            f"got {shown(rope, 300)}"
        )
    if nested and others.get("truncate", True) is not True:
        raise _of(rope, fields).error("truncate", "true", others["truncate"])
    if kind == "dynamic":
        others.pop(ORIGINAL, None)  # transformers does not use it
    given = {name: value for name, value in others.items() if value is not None}
    try:
        return _SCALINGS[str(kind)](_of(given, fields), fields)
    except ValueError as error:
        raise ValueError(f"{fields.where} must describe a model: {shortened(str(error), 300)}") from error


def _llama3(rope: Fields, fields: Fields) -> RotaryScaling:
    del fields
    numbers = {name: rope.number(theirs) for name, theirs in LLAMA3.items() if name != "original_length"}
    return RotaryScaling(**numbers, original_length=rope.integer(ORIGINAL))


def _linear(rope: Fields, fields: Fields) -> LinearScaling:
    del fields
    return LinearScaling(factor=rope.number("factor"))


def _dynamic(rope: Fields, fields: Fields) -> DynamicScaling:
    return DynamicScaling(factor=rope.number("factor"), original_length=fields.integer("max_position_embeddings"))


def _yarn(rope: Fields, fields: Fields) -> YarnScaling:
    longest = fields.integer("max_position_embeddings")
    original = rope.integer(ORIGINAL) if rope.has(ORIGINAL) else longest
    factor = rope.number("factor") if rope.has("factor") else longest / max(original, 1)
    attention = rope.number("attention_factor") if rope.has("attention_factor") else None
    mscales = [rope.number(name) if rope.has(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    if attention is None and all(mscales):
        own, of_all = (0.1 * mscale * math.log(max(factor, 1)) + 1 for mscale in mscales)
        attention = own / of_all
    fast, slow = (rope.number(name) if rope.has(name) else 0.0 for name in ("beta_fast", "beta_slow"))
    truncate = rope.flag("truncate") if rope.has("truncate") else True
    return YarnScaling(
        factor=factor,
        original_length=original,
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        attention_factor=attention,
        truncate=truncate,
    )


def _longrope(rope: Fields, fields: Fields) -> LongRopeScaling:
    longest = fields.integer("max_position_embeddings")
    if fields.family == "phi3":
        original = fields.integer(ORIGINAL)
    else:
        original = rope.integer(ORIGINAL) if rope.has(ORIGINAL) else longest
    factor = rope.number("factor") if rope.has("factor") else longest / max(original, 1)
    attention = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    attention = rope.number("attention_factor") if rope.has("attention_factor") else attention
    return LongRopeScaling(
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        original_length=original,
        attention_factor=attention,
    )


_SCALINGS = {"llama3": _llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}


def write_rotary(config: GPTConfig, family: str) -> dict[str, object]:
    """The fields of a config.json about rotary positions. What a family has no field for is left out."""
    scaling = _write_scaling(config.rotary_scaling)
    if family == "olmo3":
        full = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rotary_base}
        own = config.rotary_base if config.window_rotary_base is None else config.window_rotary_base
        sliding = {"rope_type": "default", "rope_theta": own}
        return {"rope_parameters": dict(zip(KINDS_OF_LAYERS, (full, sliding), strict=True))}
    found: dict[str, object] = {"rope_theta": config.rotary_base, "rope_scaling": scaling}
    if family == "gemma3_text":
        own = config.window_rotary_base
        found["rope_local_base_freq"] = config.rotary_base if own is None else own
    if family in ROTATES_A_PART:
        found["partial_rotary_factor"] = config.rotary_fraction
    if family == "phi3":
        original = getattr(config.rotary_scaling, "original_length", None)
        found[ORIGINAL] = config.max_seq_len if original is None else original
    return found


def _write_scaling(scaling: Any) -> dict[str, object] | None:
    if scaling is None:
        return None
    kind: dict[str, object] = {"rope_type": scaling.kind}
    if scaling.kind == "llama3":
        return kind | {theirs: getattr(scaling, name) for name, theirs in LLAMA3.items()}
    if scaling.kind == "longrope":
        return kind | {
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "attention_factor": scaling.attention_factor,
            ORIGINAL: scaling.original_length,
        }
    kind["factor"] = scaling.factor
    if scaling.kind != "yarn":
        return kind
    kind |= {ORIGINAL: scaling.original_length, "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    kind |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return kind if scaling.truncate else kind | {"truncate": False}
