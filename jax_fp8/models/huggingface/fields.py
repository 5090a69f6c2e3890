"""The fields of a config.json, each with the type and the size that it must have.

A file may come from a stranger, who may put a list where a number belongs, or a number such as 10**9. `Fields` refuses
both in one sentence that names field and file. A missing field has the default of its family (families.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from jax_fp8.core.files import shown
from jax_fp8.models.huggingface.families import DEFAULTS

LARGEST_INTEGER = 2**31 - 1
MOST_NUMBERS = 2**15  # in a list: half the features of the largest head


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

    def integers(self, name: str) -> list[int] | None:
        """A field that is a list of integers; None where it is null or missing."""
        value = self.described.get(name)
        is_list = isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        if value is not None and not is_list:
            raise self.error(name, "a list of integers", value)
        return None if value is None else list(value)  # type: ignore[call-overload]

    def numbers(self, name: str) -> tuple[float, ...]:
        """A field that is a list of numbers."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) > MOST_NUMBERS or not all(map(is_number, value)):
            raise self.error(name, f"a list of at most {MOST_NUMBERS:,} finite numbers", value)
        return tuple(map(float, value))

    def optional_number(self, name: str) -> float | None:
        """A number, or None where it is null."""
        return None if self.get(name) is None else self.number(name)

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
