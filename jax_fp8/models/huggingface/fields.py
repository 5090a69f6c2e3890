"""The fields of a config.json, each with the type and the size that it must have.

A file may come from a stranger, who may put a list where a number belongs, or a number such as 10**9. `Fields` refuses
both in one sentence that names field and file. The table below has each family's default for a missing field. These are
the defaults of `transformers` 5.24: a model whose file lacks a field was trained with its default.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from jax_fp8.core.files import shown

# Defaults of the fields of each family. A field without a default must be there: sizes of a model are never guessed.
_LLAMA = {
    "num_key_value_heads": None,  # num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_QWEN2 = _LLAMA | {"num_key_value_heads": 32}
_WITH_EXPERTS = {"norm_topk_prob": False, "router_aux_loss_coef": 0.001}
DEFAULTS: dict[str, Mapping[str, object]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128},
    "mixtral": _LLAMA | _WITH_EXPERTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": _LLAMA | _WITH_EXPERTS | {"num_key_value_heads": 4},
    "gpt2": {
        "n_inner": None,  # 4 n_embd
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
}
LARGEST_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Fields:
    """The fields of one config.json; messages name its file `where`."""

    described: Mapping[str, object]
    where: str
    family: str

    def has(self, *names: str) -> bool:
        """Whether the file has one of these fields, with a value other than null."""
        return any(self.described.get(name) is not None for name in names)

    def get(self, name: str) -> object:
        """The field, or the default of the family; ValueError where there is neither."""
        defaults = DEFAULTS[self.family]
        if name not in self.described and name not in defaults:
            raise ValueError(f"{self.where} must have the field {name!r}, which a {self.family} needs, but lacks it")
        return self.described.get(name, defaults.get(name))

    def integer(self, name: str) -> int:
        """A count or a size. `GPTConfig` refuses one that is too small."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST_INTEGER:
            raise self.error(name, f"an integer of at most {LARGEST_INTEGER:,}", value)
        return value

    def optional_integer(self, name: str) -> int | None:
        """The same, or None where it is null."""
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str) -> float:
        value = self.get(name)
        if not is_number(value):
            raise self.error(name, "a finite number", value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def part(self, name: str) -> dict[str, object]:
        """A field that is an object itself; an empty one where it is null or missing."""
        value = self.described.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return value or {}

    def names(self, name: str) -> list[str]:
        """A field that is a list of words; an empty one where it is null or missing."""
        value = self.described.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(word, str) for word in value)):
            raise self.error(name, "a list of words", value)
        return value or []

    def error(self, name: str, wanted: str, value: object) -> ValueError:
        return ValueError(f"{name} in {self.where} must be {wanted}, got {shown(value)}; no other can be converted")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether this is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
