"""Which run `--resume RUN|auto` resumes, and which of its settings must stay the same.

A run is refused if the model's config or the tokenizer differs. All else may change: options of the step, the mesh, the
recipe, even the text. The run prints what changed, for its losses are then not those of an uninterrupted run.
"""

import dataclasses
import glob
import json
import re
from pathlib import Path

from jax_fp8.models.config import GPTConfig
from jax_fp8.models.limits import config_of
from jax_fp8.report.run_format import (
    BASELINE,
    CHECKPOINTS,
    CONFIG,
    METRICS,
    OF_A_RUN,
    CannotResume,
    JsonObject,
    read_config,
    rows_in_notes,
)
from jax_fp8.run.checkpoints import read_last, steps_in
from jax_fp8.run.folder import Existing
from jax_fp8.run.settings import OF_THE_PROCESS, Settings, describe, settings_from

# Settings that do not change what is computed. A change of the text itself is told by its fingerprint.
ASIDE = {"resume", "checkpoint_every", "keep", "name", "output", "cache", "data", "validation_data", "compare"}
ASIDE |= {"sample_tokens", "profile", "init_from", "export", "export_dtype", "tokenizer", *OF_THE_PROCESS}
FLAGS = {"hidden_size": "--hidden-size", "num_layers": "--num-layers", "num_heads": "--num-heads",
         "max_seq_len": "--seq-len"}  # fmt: skip


def locate_run(settings: Settings, name: str) -> Path | None:
    """The folder of the run to resume; None for a new run.

    Args:
      name: of the new run; `--resume auto` looks for the last run of this name.
    """
    if not settings.resume:
        return None
    if settings.resume == "auto":
        return _last_run(settings.output, name)
    folders = settings.output / settings.resume, Path(settings.resume)
    path = next((folder for folder in folders if steps_in(folder / CHECKPOINTS)), None)
    if path is None:
        runs = sorted(folder.name for folder in settings.output.glob("*") if steps_in(folder / CHECKPOINTS))
        has = f"runs with checkpoints are {', '.join(runs)}" if runs else "--checkpoint-every saves checkpoints"
        raise CannotResume(
            f"--resume must name a run with checkpoints in {settings.output}, got {settings.resume!r}; {has}"
        )
    return path


def existing_run(path: Path | None, run: JsonObject) -> Existing | None:
    """The run to resume in this folder; None for a new run.

    Args:
      run: the new run, as `describe_run` describes it. Raises if it cannot continue the one in the folder.
    """
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
            other = f"; changed: {changed}" if changed else ""
            print(f"{path} continues after step {notes['step']}{other}")
    return Existing(path, rows)


def _last_run(output: Path, name: str) -> Path | None:
    """The last of the runs `name`, `name-2`, `name-3`, ... that can be resumed."""
    runs = [path for path in output.glob(f"{glob.escape(name)}*") if _number(path, name) and _can_resume(path)]
    return max(runs, key=lambda path: _number(path, name), default=None)


def _number(path: Path, name: str) -> int:
    """1 for `name` itself, 2 for `name-2`; 0 for a run of another name."""
    match = re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name)
    return int(match[1] or 1) if match else 0


def _can_resume(run: Path) -> bool:
    """Whether a run has checkpoints, or would have saved some but ended before the first one."""
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


def describe_run(settings: Settings, model: GPTConfig, tokenizer: str, text: str) -> JsonObject:
    """The entries of a checkpoint's notes that describe its run: settings, model, and the fingerprints of tokenizer and
    text.
    """
    described = {"model": dataclasses.asdict(model), "tokenizer": tokenizer, "text": text}
    return json.loads(json.dumps({"settings": describe(settings)} | described))


def check_same(saved: JsonObject, run: JsonObject) -> None:
    """Raise if a run cannot resume from a checkpoint, because its arrays or its tokens have another meaning.

    Args:
      saved: notes of the checkpoint.
      run: the run, as `describe_run` describes it.
    """
    then, now = saved["settings"], run["settings"]
    # Each pair: what a message calls it, its value in the checkpoint, and its value now.
    pairs = [("--tokenizer", _tokenizer_of(saved), _tokenizer_of(run))]
    # FP8 attention has scales of its own in the FP8 state.
    pairs.append(("--fp8-attention", then.get("fp8_attention", False), now["fp8_attention"]))
    if now["tokenizer"] == "bpe":
        pairs.append(("--vocab-size", then["vocab_size"], now["vocab_size"]))
        pairs.append(("--data, from which bpe was learnt,", f"text {saved['tokenizer']}", f"text {run['tokenizer']}"))
    no_dropout = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}  # dropout has no params, so it may change
    before, after = (dataclasses.asdict(config_of(one["model"] | no_dropout, "the notes")) for one in (saved, run))
    if then.get("init_from") and not now["init_from"]:
        pairs.append(("--init-from", then["init_from"], "no model to begin with"))
    for field, flag in FLAGS.items():
        pairs.append((flag, before[field], after[field]))
    if before != after:  # older checkpoints have fewer fields
        pairs.append(("--preset", then["preset"], now["preset"]))
        pairs += [(f"{field} of the model", before[field], after[field]) for field in before]
    for flag, value_then, value_now in pairs:
        if value_then != value_now:
            raise CannotResume(
                f"{flag} must be {value_then} as in the checkpoint, got {value_now}; begin a new run to change it"
            )
    if now["steps"] < saved["step"]:
        raise CannotResume(
            f"--steps must be at least {saved['step']}, the step of the checkpoint, got {now['steps']}; "
            "give more, or begin a new run"
        )
    if now["compare"] and then["recipe"] != now["recipe"]:
        raise CannotResume(
            f"--compare needs --recipe {then['recipe']} from the first step on, got {now['recipe']}; leave it out"
        )


def _tokenizer_of(run: JsonObject) -> str:
    """The tokenizer of a run, as notes describe it, in words. One from files is the same wherever they are."""
    named = run["settings"]["tokenizer"]
    return named if named in ("bytes", "bpe") else f"the tokenizer {run['tokenizer']}"


def differences(saved: JsonObject, run: JsonObject) -> str:
    """The settings that differ from the checkpoint's, in words; empty if none does."""
    then, now = describe(Settings()) | saved["settings"], run["settings"]  # older ones have fewer
    changed = [
        f"--{field.replace('_', '-')} {now[field]} (was {then[field]})"
        for field in now
        if field not in ASIDE and then[field] != now[field]
    ]
    return ", ".join(changed + (["another text"] if saved["text"] != run["text"] else []))


def interruption(settings: Settings, run: Path, rows: list[JsonObject]) -> str:
    """The step at which a run was interrupted, the files that it left, and how to resume it."""
    if not rows:
        return f"interrupted before the first step; the configuration is in {run}"
    if steps := steps_in(run / CHECKPOINTS):
        remedy = f"the same command with --resume {run.name} continues after step {steps[-1]}"
    else:
        remedy = "with --checkpoint-every, a run can be resumed"
    return (
        f"interrupted after step {rows[-1]['step']} of {settings.steps} of {rows[-1]['run']}; "
        f"log, configuration and the curves so far are in {run}; {remedy}"
    )
