"""The format of a run's folder: its files, and the entries of each file. The room `run` writes them, this room reads
them.

    runs/<name>/config.json             "settings", "model", device and versions
                metrics.jsonl           loss and speed (MEASURED), one row every few steps
                diagnostics.jsonl       how each tensor was cast to FP8: `Diagnostics.rows()`, one row a diagnosed step
                events.jsonl            skipped steps, and why they were skipped
                loss.png                the curves
                tokenizer.json          only if the run has learnt one
                checkpoints/<step>/     arrays (params, opt_state, fp8), and notes: everything else, as JSON
                checkpoints-baseline/   checkpoints of the second run of `--compare`
                profile/, tensorboard/  a folder for each run

Each row has the name of its run and a step. Rows are appended to the logs; every other file is written under a new name
and then renamed. A file may be damaged, or come from a stranger, so the reader checks each entry.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from jax_fp8.core.files import Unreadable, read_json, shown, write_text

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as the module `json` has it. Its entries are checked, or about to be."""

CONFIG, PICTURE, TOKENIZER = "config.json", "loss.png", "tokenizer.json"
METRICS, DIAGNOSTICS, EVENTS = LOGS = ("metrics.jsonl", "diagnostics.jsonl", "events.jsonl")
CHECKPOINTS, BASELINE = "checkpoints", "checkpoints-baseline"  # of the run, and of the bfloat16 run of `--compare`
PROFILE, TENSORBOARD = "profile", "tensorboard"
NOTES = "notes/metadata"  # of a checkpoint: a path in its folder
MEASURED = (
    "loss",
    "val_loss",
    "tokens_per_second",
    "model_tflops",
    "bf16_utilization",
    "fp8_utilization",
    "peak_memory_gib",
)
MOST_CONFIG, MOST_NOTES = 2**24, 2**28  # bytes; enough for notes of a million arrays
LAST_STEP = 2**53  # numbers of JavaScript, which the page uses, are exact up to here


class CannotResume(ValueError):
    """A run cannot continue from what is in its folder."""


# ---- types -----------------------------------------------------------------------------------------------------------


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: object) -> bool:
    """NaN is a number here; infinity is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def is_known(value: object) -> bool:
    """A number, or null where nothing was measured."""
    return value is None or is_number(value)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_object(value: object) -> TypeGuard[JsonObject]:
    return isinstance(value, dict)


def _are_counts(value: object) -> bool:
    """Numbers of rows, by the names of runs."""
    return is_object(value) and all(map(is_count, value.values()))


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _are_arrays(value: object) -> bool:
    """By item and path, the dtype, shape and checksum of each array."""
    return is_object(value) and all(is_object(item) and all(map(_is_array, item.values())) for item in value.values())


def _is_array(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    dtype, shape, total = value
    return is_text(dtype) and isinstance(shape, list) and all(map(is_count, shape)) and is_count(total)


def _are_spikes(value: object) -> bool:
    """The losses of the last steps, and how many steps in a row were skipped since."""
    if not is_object(value) or not isinstance(value.get("losses"), list) or not is_count(value.get("skipped")):
        return False
    return all(
        isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and is_number(pair[1])
        for pair in value["losses"]
    )


# ---- config.json -----------------------------------------------------------------------------------------------------


def write_config(
    folder: Path, settings: Mapping[str, object], model: Mapping[str, object], computed_with: Mapping[str, object]
) -> None:
    """`computed_with`: "device", and versions by the names of packages."""
    config = {"settings": settings, "model": model} | dict(computed_with)
    write_text(folder / CONFIG, json.dumps(config, indent=2, default=str) + "\n")


def read_config(path: Path) -> JsonObject:
    """The config that a file has; `Unreadable` if it is no JSON object, or its settings are not one."""
    config = read_json(path, MOST_CONFIG, constant=float)
    if not is_object(config.get("settings")):
        raise Unreadable(f"settings that are {shown(config.get('settings'))}")
    return config


# ---- rows of logs ----------------------------------------------------------------------------------------------------

OF_ALL: dict[str, Callable[[object], bool]] = {
    "run": is_text,
    "step": lambda value: isinstance(value, int) and is_count(value) and value < LAST_STEP,
}
# A resumed run plots the losses of metrics.jsonl again.
NEEDED = {METRICS: OF_ALL | {"loss": is_known, "val_loss": is_known}, DIAGNOSTICS: OF_ALL, EVENTS: OF_ALL}


def metrics_row(measured: Mapping[str, float | None]) -> dict[str, float | None]:
    """The entries of a row of metrics.jsonl beside "run" and "step"; None where nothing was measured."""
    assert set(measured) <= set(MEASURED), measured
    return {name: measured.get(name) for name in MEASURED}


def check_row(row: Mapping[str, object], needed: Mapping[str, Callable[[object], bool]] = OF_ALL) -> None:
    """Raise `Unreadable` unless a row has these entries.

    Args:
      needed: by the name of an entry, whether its value is valid.
    """
    for name, holds in needed.items():
        if not holds(row.get(name)):
            raise Unreadable(f"a row whose {name} is {shown(row.get(name))}")


# ---- notes of checkpoints --------------------------------------------------------------------------------------------

ENTRIES: dict[str, Callable[[object], bool]] = {
    "step": is_count,
    "settings": is_object,
    "model": is_object,
    "tokenizer": is_text,
    "text": is_text,
    "rows": _are_counts,
    "losses": _are_numbers,
    "val_loss": is_number,
    "arrays": _are_arrays,
    "other_rows": lambda value: is_object(value) and all(map(_are_counts, value.values())),
    "spikes": _are_spikes,
}
# The entries that generating needs, and those that resuming needs. Older notes lack the other entries.
OF_A_MODEL = ("settings", "model", "tokenizer")
OF_A_RUN = (*OF_A_MODEL, "text", "rows", "losses", "val_loss")


def read_notes(path: Path, step: int, needed: tuple[str, ...] = ()) -> JsonObject:
    """The notes of a checkpoint; ValueError if they are of another step, or lack "step", "arrays" or an entry that is
    needed.
    """
    # The constant NaN is allowed: it is the validation loss before the first validation.
    notes = read_json(path, MOST_NOTES, constant=float)
    missing = next((name for name in ("step", "arrays", *needed) if name not in notes), None)
    if missing is not None:
        raise ValueError(f"notes without {missing}")
    for name, holds in ENTRIES.items():
        if name in notes and not holds(notes[name]):
            raise ValueError(f"notes whose {name} is {shown(notes[name])}")
    if notes["step"] != step:
        raise ValueError(f"notes of step {notes['step']}")
    return notes


def rows_as_notes(counts: Mapping[str, Mapping[str, int]]) -> JsonObject:
    """The entries of notes for these numbers of rows, by log and name of a run."""
    others = {Path(log).stem: counts[log] for log in (DIAGNOSTICS, EVENTS)}
    return {"rows": counts[METRICS], "other_rows": others}


def rows_in_notes(notes: JsonObject) -> dict[str, dict[str, int]]:
    """The numbers of rows that notes have, by log and name of a run."""
    others = notes.get("other_rows", {})
    return {METRICS: notes["rows"]} | {log: others.get(Path(log).stem, {}) for log in (DIAGNOSTICS, EVENTS)}
