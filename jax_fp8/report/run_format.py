"""The format of a run's folder: which files there are, and what each of them has. The room `run` writes it, the report
reads it.

    runs/<name>/config.json             "settings", "model", and what the run was computed with
                metrics.jsonl           loss and speed (MEASURED), one row every few steps
                diagnostics.jsonl       what FP8 does to each tensor, one row a diagnosed step: `Diagnostics.rows()`
                events.jsonl            steps that were skipped, and why
                loss.png                the curves
                tokenizer.json          of a run that has learnt one
                checkpoints/<step>/     arrays (params, opt_state, fp8), and notes: everything else, as JSON
                checkpoints-baseline/   those of the second run of `--compare`
                profile/, tensorboard/  a folder for each run

Each row has the name of its run and a step. Logs grow; every other file is written under a new name and moved into its
place. A file may be damaged, or written by a stranger, so each entry is checked when it is read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_fp8.core.files import Unreadable, read_json, shown, write_text

CONFIG, PICTURE, TOKENIZER = "config.json", "loss.png", "tokenizer.json"
METRICS, DIAGNOSTICS, EVENTS = LOGS = ("metrics.jsonl", "diagnostics.jsonl", "events.jsonl")
CHECKPOINTS, BASELINE = "checkpoints", "checkpoints-baseline"  # of the run, and of the bfloat16 run of `--compare`
PROFILE, TENSORBOARD = "profile", "tensorboard"
NOTES = "notes/metadata"  # in the folder of a checkpoint
MEASURED = (
    "loss",
    "val_loss",
    "tokens_per_second",
    "model_tflops",
    "bf16_utilization",
    "fp8_utilization",
    "peak_memory_gib",
)
MOST_CONFIG, MOST_NOTES = 2**24, 2**28  # bytes; notes have a line for each of a million arrays
LAST_STEP = 2**53  # which a page can still count to


class CannotResume(ValueError):
    """A run cannot continue from what is in its folder."""


# ---- types -----------------------------------------------------------------------------------------------------------


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Also one that is not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def is_known(value: Any) -> bool:
    """A number, or nothing where it was not measured."""
    return value is None or is_number(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_counts(value: Any) -> bool:
    """Rows of a log by the names of runs."""
    return is_object(value) and all(map(is_count, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def _are_arrays(value: Any) -> bool:
    """Of each item, by the paths of its arrays: dtype, shape and the sum of bits."""
    return is_object(value) and all(is_object(item) and all(map(_is_array, item.values())) for item in value.values())


def _is_array(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    dtype, shape, total = value
    return is_text(dtype) and isinstance(shape, list) and all(map(is_count, shape)) and is_count(total)


def _are_spikes(value: Any) -> bool:
    """The losses of the last steps, and how many steps were skipped since."""
    if not is_object(value) or not isinstance(value.get("losses"), list) or not is_count(value.get("skipped")):
        return False
    return all(
        isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and is_number(pair[1])
        for pair in value["losses"]
    )


# ---- config.json -----------------------------------------------------------------------------------------------------


def write_config(folder: Path, settings: Mapping, model: Mapping, computed_with: Mapping) -> None:
    """`computed_with`: "device", and versions by their packages."""
    config = {"settings": settings, "model": model} | dict(computed_with)
    write_text(folder / CONFIG, json.dumps(config, indent=2, default=str) + "\n")


def read_config(path: Path) -> dict[str, Any]:
    """`Unreadable` where it is none, or its settings are no object."""
    config = read_json(path, MOST_CONFIG, constant=float)
    if not is_object(config.get("settings")):
        raise Unreadable(f"settings that are {shown(config.get('settings'))}")
    return config


# ---- rows of logs ----------------------------------------------------------------------------------------------------

OF_ALL: dict[str, Callable[[Any], bool]] = {
    "run": is_text,
    "step": lambda value: is_count(value) and value < LAST_STEP,
}
# A run that continues draws the losses of metrics.jsonl again.
NEEDED = {METRICS: OF_ALL | {"loss": is_known, "val_loss": is_known}, DIAGNOSTICS: OF_ALL, EVENTS: OF_ALL}


def metrics_row(measured: Mapping[str, float | None]) -> dict[str, float | None]:
    """What a row of metrics.jsonl has beside run and step; None where nothing was measured."""
    assert set(measured) <= set(MEASURED), measured
    return {name: measured.get(name) for name in MEASURED}


def check_row(row: Mapping[str, Any], needed: Mapping[str, Callable[[Any], bool]] = OF_ALL) -> None:
    """`Unreadable` unless a row has these entries."""
    for name, holds in needed.items():
        if not holds(row.get(name)):
            raise Unreadable(f"a row whose {name} is {shown(row.get(name))}")


# ---- notes of checkpoints --------------------------------------------------------------------------------------------

ENTRIES: dict[str, Callable[[Any], bool]] = {
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
# What a model that generates needs, and what a run that continues needs; older notes have no other entries.
OF_A_MODEL = ("settings", "model", "tokenizer")
OF_A_RUN = (*OF_A_MODEL, "text", "rows", "losses", "val_loss")


def read_notes(path: Path, step: int, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The notes of the checkpoint of this step; ValueError where they cannot be its own, or lack an entry that is
    needed beside step and arrays.
    """
    notes = read_json(path, MOST_NOTES, constant=float)  # before the first validation there is none, and NaN says so
    missing = next((name for name in ("step", "arrays", *needed) if name not in notes), None)
    if missing is not None:
        raise ValueError(f"notes without {missing}")
    for name, holds in ENTRIES.items():
        if name in notes and not holds(notes[name]):
            raise ValueError(f"notes whose {name} is {shown(notes[name])}")
    if notes["step"] != step:
        raise ValueError(f"notes of step {notes['step']}")
    return notes


def rows_as_notes(counts: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The entries that say how many rows each log has of each run."""
    others = {Path(log).stem: counts[log] for log in (DIAGNOSTICS, EVENTS)}
    return {"rows": counts[METRICS], "other_rows": others}


def rows_in_notes(notes: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The same, by the names of logs."""
    others = notes.get("other_rows", {})
    return {METRICS: notes["rows"]} | {log: others.get(Path(log).stem, {}) for log in (DIAGNOSTICS, EVENTS)}
