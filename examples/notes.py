"""The notes of a checkpoint, which are JSON: what they must have, and that they have it.

A file that was damaged, or that somebody has changed, may say anything. Here each entry is looked at before a run goes
on from it, so that whoever reads notes finds in them what a run writes. What is wrong is told in a few words, which fit
after "got".
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from settings import Settings

from jax_fp8.core.files import read_json, shown
from jax_fp8.models.limits import config_of

RECIPES, TOKENIZERS = (get_args(get_type_hints(Settings)[name]) for name in ("recipe", "tokenizer"))
MOST_BYTES = 2**28  # a line for each of a million arrays


class CannotResume(ValueError):
    """A run cannot go on from this checkpoint."""


def read_notes(path: Path, step: int, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Those of the checkpoint of this step; ValueError where they cannot be its own, or lack an entry that is needed
    beside step and arrays.
    """
    notes = read_json(path, MOST_BYTES, constant=float)  # before the first validation there is none, and NaN says so
    missing = next((name for name in ("step", "arrays", *needed) if name not in notes), None)
    if missing is not None:
        raise ValueError(f"notes without {missing}")
    for name, holds in ENTRIES.items():
        if name in notes and not holds(notes[name]):
            raise ValueError(f"notes whose {name} is {shown(notes[name])}")
    if notes["step"] != step:
        raise ValueError(f"notes of step {notes['step']}")
    if "settings" in notes:
        _check_settings(notes["settings"])
    if "model" in notes:
        config_of(notes["model"], "notes")
    return notes


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Also one that is not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def is_known(value: Any) -> bool:
    """A number, or nothing where it was not measured."""
    return value is None or is_number(value)


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise unless settings have the types that a command line gives them. Older checkpoints have fewer of them."""
    for name in ("preset", "recipe", "tokenizer", "vocab_size"):
        if name not in settings:
            raise ValueError(f"notes whose settings are without {name}")
    for field in dataclasses.fields(Settings):
        if field.name in settings and not _is_like(settings[field.name], field.default):
            raise ValueError(f"notes whose {field.name} is {shown(settings[field.name])}")
    if settings["recipe"] not in RECIPES or settings["tokenizer"] not in TOKENIZERS:
        raise ValueError(f"notes of {shown(settings['recipe'])} and {shown(settings['tokenizer'])}")


def _is_like(value: Any, default: Any) -> bool:
    """Whether JSON has a value for a setting with this default; None may be a number or a path."""
    if default is None:
        return value is None or isinstance(value, str) or is_count(value)
    if isinstance(default, float):
        return is_number(value)
    kind = str if isinstance(default, Path) else type(default)
    return type(value) is kind and (kind is not int or is_count(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_counts(value: Any) -> bool:
    """Rows of a log by the names of runs."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def _are_logs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_are_counts, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _are_arrays(value: Any) -> bool:
    """Of each item, by the paths of its arrays: dtype, shape and the sum of bits."""
    return isinstance(value, dict) and all(
        isinstance(item, dict) and all(map(_is_array, item.values())) for item in value.values()
    )


def _is_array(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    dtype, shape, total = value
    return isinstance(dtype, str) and isinstance(shape, list) and all(map(is_count, shape)) and is_count(total)


def _are_spikes(value: Any) -> bool:
    """The losses of the last steps, and how many steps were skipped since."""
    if not isinstance(value, dict) or not isinstance(value.get("losses"), list) or not is_count(value.get("skipped")):
        return False
    pairs = (pair for pair in value["losses"] if isinstance(pair, list) and len(pair) == 2)
    return sum(is_count(step) and is_number(loss) for step, loss in pairs) == len(value["losses"])


ENTRIES: dict[str, Callable[[Any], bool]] = {
    "step": is_count,
    "settings": lambda value: isinstance(value, dict),
    "model": lambda value: isinstance(value, dict),
    "tokenizer": _is_text,
    "text": _is_text,
    "rows": _are_counts,
    "losses": _are_numbers,
    "val_loss": is_number,
    "arrays": _are_arrays,
    "other_rows": _are_logs,
    "spikes": _are_spikes,
}
# What is asked of notes: by a model that writes text, and by a run that goes on. Older ones have no others.
OF_A_MODEL = ("settings", "model", "tokenizer")
OF_A_RUN = (*OF_A_MODEL, "text", "rows", "losses", "val_loss")
