"""Measured rates of a GPU: a file beside its description, which also says where each figure is from.

gpus/h200_rates.json ─RateTable.for_gpu, load→ rates, sources ─estimate→ seconds of a step
                       ▲ `renewed` puts in what plan/rates_bench.py measures on one GPU
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

LARGEST = 1e30  # of a rate or a size; larger ones cannot have been measured
Curve = tuple[tuple[float, float], ...]  # pairs of a call's size, ascending, and the operations a second at that size


@dataclass(frozen=True)
class Rates:
    """Rates in units a second, and a few durations.

    Args:
      fp8, fp8_split: operations of matrix products in FP8, with fast and with split accumulation, by the operations of
        one product.
      bf16: operations of matrix products in 16 bits, by the operations of one product.
      attention, attention_fp8: operations of causal attention in 16 bits and in FP8, by the tokens of a sequence. Half
        of all pairs of tokens count.
      memory: bytes that a kernel reads or writes, if it computes little; 0.9 of a copy's.
      wire: bytes that a device sends to others of its host.
      between_hosts: bytes that a device sends to other hosts.
      collective: seconds of a collective in addition to those of its bytes.
      launch: seconds between two kernels.
      beside: the share by which a kernel takes longer while a collective runs.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            _check_curve(field.name, value) if field.type == Curve else _check_rate(field.name, value)


@dataclass(frozen=True)
class RateTable:
    """The rates of a GPU, and by the name of each rate, where it is from."""

    gpu: str
    rates: Rates
    sources: Mapping[str, str]

    @classmethod
    def for_gpu(cls, gpu: str) -> "RateTable":
        """The rates that come with the description of this GPU."""
        return cls.load(FOLDER / f"{gpu}_rates.json")

    @classmethod
    def load(cls, path: str | Path) -> "RateTable":
        """The rates of a file that `save` wrote."""
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
            raise ValueError(f"rates must be written to {path}, got {error.strerror}; choose another path") from error

    def renewed(self, gpu: str, source: str, **measured: Curve | float) -> "RateTable":
        """A table with the rates that were measured on a GPU; the others stay, with their sources.

        Args:
          source: where the measured rates are from.
        """
        sources = {**self.sources, **dict.fromkeys(measured, source)}
        return RateTable(gpu, replace(self.rates, **measured), sources)


# The speed of products by tile, relative to those with one scale a tensor and split accumulation. On an H200 they had
# 1,083 to 1,283 TFLOP/s, the others 1,198 to 1,407; "1d1d" had 965 to 1,014 where "1d2d" had 1,230 to 1,275.
BY_TILE = {"1d2d": 0.91, "2d1d": 0.91, "1d1d": 0.72}


@functools.cache
def rates_of(gpu: str) -> Rates:
    """The rates that come with the description of this GPU."""
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}; choose one of these")
    return RateTable.for_gpu(gpu).rates


def rate_at(curve: Curve, size: float) -> float:
    """The rate of a call of this size. Between two measured sizes it is interpolated over the logarithm of the size;
    beyond the first or the last one it is constant.
    """
    below, above = ([point for point in curve if (point[0] > size) is beyond] for beyond in (False, True))
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (small, slow), (large, fast) = below[-1], above[0]
    return slow + (fast - slow) * math.log(size / small) / math.log(large / small)


def fp8_rate(rates: Rates, accumulation: str, operations: float) -> float:
    """Operations a second of an FP8 product with this number of operations.

    Args:
      accumulation: "fast" or "split", or for products by tile a name in BY_TILE; "" counts as "fast".
    """
    curve = rates.fp8 if accumulation in ("fast", "") else rates.fp8_split
    return rate_at(curve, operations) * BY_TILE.get(accumulation, 1.0)


def _check_entry(name: str, entry: object) -> None:
    if not isinstance(entry, dict) or "value" not in entry or not isinstance(entry.get("from"), str):
        raise ValueError(f"no value of {name} and where it is from, but {shown(entry)}")


def _frozen(value: Any) -> Any:
    """A list of lists, which is a curve in JSON, as tuples; any other value as it is. `Rates` checks both."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(point) if isinstance(point, list) else point for point in value)


def _check_rate(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(
            f"a rate must be a number from 0 to {LARGEST:.0e}, got {name}={shown(value)}; measure it again"
        )
    if value == 0 and name not in ("collective", "launch", "beside"):
        raise ValueError(f"a rate must be above 0, got {name}={value!r}; measure it again")


def _check_curve(name: str, curve: object) -> None:
    points: tuple = curve if isinstance(curve, tuple) else ()
    is_curve = bool(points) and all(isinstance(point, tuple) and len(point) == 2 for point in points)
    if is_curve:
        for value in itertools.chain(*points):
            _check_rate(name, value)
    if not is_curve or any(size >= larger for (size, _), (larger, _) in itertools.pairwise(points)):
        raise ValueError(
            f"rates by size must be pairs of a size and a rate, with ascending sizes, got {name}={shown(curve)}; "
            "measure them again"
        )
