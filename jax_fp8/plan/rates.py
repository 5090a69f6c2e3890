"""What a GPU reaches, as measured: a file beside its description, with where each figure comes from.

gpus/h200_rates.json ─RateTable.of, load→ rates, sources ─estimate→ seconds of a step
                       ▲ renewed by what plan/rates_bench.py measures on one GPU
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jax_fp8.core.files import read_json, shortened, shown, write_text
from jax_fp8.plan.described import FOLDER, GPUS

LARGEST = 1e30  # of a rate or a size: what is beyond was not measured
Curve = tuple[tuple[float, float], ...]  # sizes of a call, rising, and operations a second at each


@dataclass(frozen=True)
class Rates:
    """In units a second, unless it says otherwise.

    Args:
      fp8, fp8_split: operations of matrix products in FP8, with fast and with split accumulation, by the operations of
        one product.
      bf16: operations of matrix products in 16 bits, likewise.
      attention, attention_fp8: operations of causal attention in 16 bits and in FP8, of which half of all pairs count,
        by the tokens of a sequence.
      memory: bytes read or written by a kernel that does little else; 0.9 of those of a copy.
      wire: bytes that a device sends to others of its host.
      between_hosts: bytes that a device sends to other hosts.
      collective: seconds that one takes beside its bytes.
      launch: seconds between two kernels.
      beside: by which part of it a kernel takes longer while a collective runs.
    """

    fp8: Curve
    fp8_split: Curve
    bf16: Curve
    attention: Curve
    attention_fp8: Curve
    memory: float
    wire: float
    between_hosts: float
    collective: float
    launch: float
    beside: float

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            _check_curve(field.name, value) if field.type == Curve else _check_rate(field.name, value)


@dataclass(frozen=True)
class RateTable:
    """Rates of a GPU, and where each of them comes from, by its name."""

    gpu: str
    rates: Rates
    sources: Mapping[str, str]

    @classmethod
    def of(cls, gpu: str) -> "RateTable":
        """Those that come with the description of a GPU."""
        return cls.load(FOLDER / f"{gpu}_rates.json")

    @classmethod
    def load(cls, path: str | Path) -> "RateTable":
        try:
            content = read_json(path)
            gpu, entries = content.get("gpu"), content.get("rates")
            if not isinstance(gpu, str) or not isinstance(entries, dict):
                raise ValueError("no gpu and rates")
            for field in fields(Rates):
                _check_entry(field.name, entries.get(field.name))
            values = {field.name: _frozen(entries[field.name]["value"]) for field in fields(Rates)}
            return cls(gpu, Rates(**values), {field.name: entries[field.name]["from"] for field in fields(Rates)})
        except ValueError as error:
            raise ValueError(
                f"rates must be a file that `python -m jax_fp8 tune --rates` wrote, got {path} "
                f"({shortened(str(error), 300)}); write it again"
            ) from None

    def save(self, path: str | Path) -> None:
        names = [field.name for field in fields(Rates)]
        entries = {name: {"value": getattr(self.rates, name), "from": self.sources[name]} for name in names}
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"gpu": self.gpu, "rates": entries}, indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"rates must find room in {path}, got {error.strerror}; choose another path") from error

    def renewed(self, gpu: str, source: str, **measured: Any) -> "RateTable":
        """With what was measured on a GPU; what was not, stays, with the source that it has."""
        sources = {**self.sources, **dict.fromkeys(measured, source)}
        return RateTable(gpu, replace(self.rates, **measured), sources)


# How fast products by tile are, where those with one scale a tensor and split accumulation are 1: on an H200 1,083 to
# 1,283 TFLOP/s where the others had 1,198 to 1,407, and "1d1d" 965 to 1,014 where "1d2d" had 1,230 to 1,275.
BY_TILE = {"1d2d": 0.91, "2d1d": 0.91, "1d1d": 0.72}


@functools.cache
def rates_of(gpu: str) -> Rates:
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}; choose one of these")
    return RateTable.of(gpu).rates


def rate_at(curve: Curve, size: float) -> float:
    """Of a call of this size: between two sizes by the logarithm, beyond the first and the last what these have."""
    below, above = ([point for point in curve if (point[0] > size) is beyond] for beyond in (False, True))
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (small, slow), (large, fast) = below[-1], above[0]
    return slow + (fast - slow) * math.log(size / small) / math.log(large / small)


def fp8_rate(rates: Rates, accumulation: str, operations: float) -> float:
    """Of a product in FP8 of this size, added up "fast" or "split", or by tile as `BY_TILE` names it."""
    curve = rates.fp8 if accumulation in ("fast", "") else rates.fp8_split
    return rate_at(curve, operations) * BY_TILE.get(accumulation, 1.0)


def _check_entry(name: str, entry: Any) -> None:
    if not isinstance(entry, dict) or "value" not in entry or not isinstance(entry.get("from"), str):
        raise ValueError(f"no value of {name} and where it is from, but {shown(entry)}")


def _frozen(value: Any) -> Any:
    """Pairs in tuples, as a curve has them; whatever else is there, as it is."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(point) if isinstance(point, list) else point for point in value)


def _check_rate(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(
            f"a rate must be a number from 0 to {LARGEST:.0e}, got {name}={shown(value)}; measure it again"
        )
    if value == 0 and name not in ("collective", "launch", "beside"):
        raise ValueError(f"a rate must be above 0, got {name}={value!r}; measure it again")


def _check_curve(name: str, curve: Any) -> None:
    pairs = isinstance(curve, tuple) and all(isinstance(point, tuple) and len(point) == 2 for point in curve)
    if pairs:
        for value in itertools.chain(*curve):
            _check_rate(name, value)
    if not curve or not pairs or any(size >= larger for (size, _), (larger, _) in itertools.pairwise(curve)):
        raise ValueError(
            f"rates by size must be pairs of a size and a rate, of rising sizes, got {name}={shown(curve)}; "
            "measure them again"
        )
