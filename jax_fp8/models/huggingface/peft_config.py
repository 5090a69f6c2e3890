"""The adapter_config.json of PEFT: what its fields say about adapters, and which are refused."""

from collections.abc import Mapping
from pathlib import Path

from jax_fp8.core.checks import check_integer, check_number
from jax_fp8.core.files import shortened, shown
from jax_fp8.models.huggingface.json_files import read_object

SETTINGS = "adapter_config.json"
MOST_SETTINGS = 2**20  # bytes
RANK = 8  # and alpha, where a file does not say it
# Fields that change nothing of the function that the tensors compute with their base.
WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",  # as target_modules
    "fan_in_fan_out",  # of a merge: our layouts know it
    "inference_mode",
    "layers_pattern",  # as target_modules
    "layers_to_transform",
    "lora_dropout",  # of training by PEFT
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",  # the tensors say which
    "task_type",
}
# Fields that must have one of these values, where a file has them. All other fields must be empty.
ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base, too
    "megatron_core": ("megatron.core", None),
}
NUMBERS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # read below


def read_adapter_config(folder: Path) -> dict[str, object]:
    """The fields of a file that describes LoRA of linear layers alone."""
    described = read_object(folder / SETTINGS, "it has the rank and alpha of the adapters", MOST_SETTINGS)
    _check_fields(described, folder / SETTINGS)
    return described


def _check_fields(described: Mapping[str, object], where: Path) -> None:
    for name, value in described.items():
        if name in WITHOUT_EFFECT or name in NUMBERS:
            continue
        if value not in ALLOWED[name] if name in ALLOWED else bool(value):
            wanted = " or ".join(map(repr, ALLOWED[name])) if name in ALLOWED else "empty"
            raise ValueError(
                f"{shortened(name)} in {where} must be {wanted}, got {shown(value)}; only LoRA of linear layers can be "
                "read"
            )
    if "peft_type" not in described:
        raise ValueError(f'{where} must have a peft_type, "LORA", got none; copy it again')


def rank_of(described: Mapping[str, object], folder: Path) -> int:
    """The rank of the adapters that `rank_pattern` does not name."""
    rank = described.get("r", RANK)
    check_integer(f"r in {folder / SETTINGS}", rank)
    assert isinstance(rank, int)
    return rank


def scaling_of(described: Mapping[str, object], module: str, rank: int, folder: Path) -> float:
    """The factor of an adapter: `alpha / rank`, or with rank-stabilized LoRA `alpha / sqrt(rank)`."""
    where = folder / SETTINGS
    alpha, own_rank = (
        _of_pattern(described.get(pattern), module, described.get(field, RANK), where, pattern)
        for pattern, field in (("alpha_pattern", "lora_alpha"), ("rank_pattern", "r"))
    )
    check_number(f"lora_alpha in {where}", alpha, "that is positive", lambda value: value > 0)
    if own_rank != rank:
        raise ValueError(f"r in {where} must be the rank of {module}, {rank}, got {shown(own_rank)}; copy both again")
    is_stabilized = described.get("use_rslora", False)
    if not isinstance(is_stabilized, bool):
        raise ValueError(f"use_rslora in {where} must be true or false, got {shown(is_stabilized)}")
    return float(alpha) / (rank**0.5 if is_stabilized else rank)  # type: ignore[arg-type]


def _of_pattern(pattern: object, module: str, otherwise: object, where: Path, field: str) -> object:
    """The value that a pattern has for a module, by the end of its name; PEFT reads its keys as regular expressions,
    of which the plain ones are names.
    """
    if pattern in (None, {}):
        return otherwise
    if not isinstance(pattern, dict) or not all(_is_module(name) for name in pattern):
        raise ValueError(
            f"{field} in {where} must be an object with names of modules, got {shown(pattern)}; other patterns cannot "
            "be read"
        )
    found = [value for name, value in pattern.items() if f".{module}".endswith(f".{name}")]
    return found[0] if found else otherwise


def _is_module(name: str) -> bool:
    return name.replace(".", "").replace("_", "").isalnum()
