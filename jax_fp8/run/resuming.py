"""Which run goes on, and whether it may: `--resume RUN|auto`, and what of a run must stay as it is.

A model of another shape or another tokenizer is refused. All else may change, and is named: options of the step, the
mesh, the recipe, even the text. What then comes is no longer the run that would have been without an interruption.
"""

import dataclasses
import glob
import json
import re
from pathlib import Path
from typing import Any

from jax_fp8.models.limits import config_of
from jax_fp8.report.run_format import (
    BASELINE,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    OF_A_RUN,
    CannotResume,
    read_config,
    rows_in_notes,
)
from jax_fp8.run.checkpoints import read_last, steps_in
from jax_fp8.run.folder import Existing
from jax_fp8.run.settings import OF_THE_PROCESS, Settings, describe, settings_from

# Settings that do not change what is computed.
ASIDE = {"resume", "checkpoint_every", "keep", "name", "output", "cache", "data", "validation_data", "compare"}
ASIDE |= {"sample_tokens", "profile", *OF_THE_PROCESS}
FLAGS = {"hidden_size": "--hidden-size", "num_layers": "--num-layers", "num_heads": "--num-heads",
         "max_seq_len": "--seq-len"}  # fmt: skip


def find_run(settings: Settings, name: str, run: dict[str, Any]) -> Existing | None:
    """The run that goes on, which the one that is described here can take up; None for a new one."""
    if not settings.resume:
        return None
    if settings.resume == "auto":
        path = _last_run(settings.output, name)
    else:
        places = settings.output / settings.resume, Path(settings.resume)
        path = next((place for place in places if steps_in(place / CHECKPOINTS)), None)
        if path is None:
            raise CannotResume(
                f"--resume must name a run with checkpoints in {settings.output}, got {settings.resume!r}; "
                "they are saved with --checkpoint-every"
            )
    if path is None:
        return None
    rows: dict[str, dict[str, int]] = {}
    for folder in (CHECKPOINTS, BASELINE):
        notes = read_last(path / folder, OF_A_RUN)
        if notes is None:
            continue
        check_same(notes, run)
        for log, counts in rows_in_notes(notes).items():
            before = rows.setdefault(log, {})
            for label, count in counts.items():
                before[label] = max(count, before.get(label, 0))
        if folder == CHECKPOINTS:
            changed = differences(notes, run)
            other = f"; other than before: {changed}" if changed else ""
            print(f"{path} goes on after step {notes['step']}{other}")
    return Existing(path, rows)


def _last_run(output: Path, name: str) -> Path | None:
    """Of the runs `name`, `name-2`, `name-3`, ... that may go on, the last one."""
    found = [path for path in output.glob(f"{glob.escape(name)}*") if _number(path, name) and _may_go_on(path)]
    return max(found, key=lambda path: _number(path, name), default=None)


def _number(path, name) -> int:
    """1 for `name` itself, 2 for `name-2`; 0 for a run of another name."""
    found = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name)
    return int(found[1] or 1) if found else 0


def _may_go_on(run: Path) -> bool:
    """Whether a run has checkpoints, or has ended before its first one."""
    if steps_in(run / CHECKPOINTS):
        return True
    config = run / CONFIG
    if not config.exists():
        return run.is_dir() and not (run / METRICS).exists()
    try:
        return settings_from(read_config(config)["settings"]).checkpoint_every > 0
    except ValueError as error:
        raise CannotResume(
            f"{config} must be as it was written, got {error}; remove {run}, or leave out --resume"
        ) from None


def describe_run(settings: Settings, model: Any, tokenizer: str, text: str) -> dict[str, Any]:
    """What a checkpoint says of its run, as JSON has it."""
    described = {"model": dataclasses.asdict(model), "tokenizer": tokenizer, "text": text}
    return json.loads(json.dumps({"settings": describe(settings)} | described))


def check_same(saved: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise where a run cannot go on from a checkpoint of another one."""
    then, now = saved["settings"], run["settings"]
    pairs = [("--tokenizer", then["tokenizer"], now["tokenizer"])]
    # Its scales are more of the state.
    pairs.append(("--fp8-attention", then.get("fp8_attention", False), now["fp8_attention"]))
    if now["tokenizer"] == "bpe":
        pairs.append(("--vocab-size", then["vocab_size"], now["vocab_size"]))
        pairs.append(("--data, from which bpe was learnt,", f"text {saved['tokenizer']}", f"text {run['tokenizer']}"))
    any_dropout = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}  # no part of what is trained
    before, after = (dataclasses.asdict(config_of(of["model"] | any_dropout, "the notes")) for of in (saved, run))
    for field, flag in FLAGS.items():
        pairs.append((flag, before[field], after[field]))
    if before != after:  # older checkpoints have fewer fields
        pairs.append(("--preset", then["preset"], now["preset"]))
        pairs += [(f"{field} of the model", before[field], after[field]) for field in before]
    for flag, was, given in pairs:
        if was != given:
            raise CannotResume(
                f"{flag} must be {was} as in the checkpoint, got {given}; begin a new run for another one"
            )
    if now["steps"] < saved["step"]:
        raise CannotResume(
            f"--steps must be at least {saved['step']}, after which the checkpoint was saved, got {now['steps']}; "
            "give more, or begin a new run"
        )
    if now["compare"] and then["recipe"] != now["recipe"]:
        raise CannotResume(
            f"--compare needs --recipe {then['recipe']} from the first step on, got {now['recipe']}; leave it out"
        )


def differences(saved: dict[str, Any], run: dict[str, Any]) -> str:
    """What is another than in the checkpoint, in words; empty if the run goes on as it was."""
    then, now = describe(Settings()) | saved["settings"], run["settings"]  # older ones have fewer
    changed = [
        f"--{field.replace('_', '-')} {now[field]} (was {then[field]})"
        for field in now
        if field not in ASIDE and then[field] != now[field]
    ]
    return ", ".join(changed + (["another text"] if saved["text"] != run["text"] else []))


def interruption(settings: Settings, run: Path, rows: list[dict]) -> str:
    """Where a run was when it was interrupted, what it left, and how to go on."""
    if not rows:
        return f"interrupted before the first step; the configuration is in {run}"
    if steps := steps_in(run / CHECKPOINTS):
        remedy = f"the same command with --resume {run.name} goes on after step {steps[-1]}"
    else:
        remedy = "to go on from there another time, give it --checkpoint-every"
    return (
        f"interrupted after step {rows[-1]['step']} of {settings.steps} of {rows[-1]['run']}; "
        f"log, configuration and the curves so far are in {run}; {remedy}"
    )
