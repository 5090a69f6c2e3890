"""The head of a report: model, recipe, device and dates of the run, and a line of key numbers."""

from collections.abc import Iterator
from html import escape

from jax_fp8.report.formatting import number, percent
from jax_fp8.report.run_folder import RunFolder
from jax_fp8.report.run_format import JsonObject


def heading(folder: RunFolder) -> str:
    """Title, model, recipe, device, time, steps."""
    lines = [", ".join(part) for part in (_model(folder.config), _how(folder.config)) if part]
    lines.append(_when(folder))
    about = "".join(f'<p class="about">{escape(line)}</p>' for line in lines)
    return f"<h1>{escape(folder.path.resolve().name)}</h1>{about}"


def written(text: str) -> str:
    """Text as HTML, without a line break between a number and its percent sign."""
    return escape(text).replace(" %", "\u00a0%")


def _model(config: JsonObject) -> list[str]:
    settings, model = (_part(config, name) for name in ("settings", "model"))
    words = (
        ("num_layers", "layers"),
        ("hidden_size", "wide"),
        ("num_heads", "heads"),
        ("vocab_size", "tokens in the vocabulary"),
    )
    known = [f"{_counted(model[key])} {word}" for key, word in words if model.get(key)]
    return [str(settings["preset"]), *known] if settings.get("preset") else known


def _how(config: JsonObject) -> list[str]:
    settings = _part(config, "settings")
    parts = [f"recipe {settings['recipe']}"] if settings.get("recipe") else []
    parts += ["fast accumulation"] if settings.get("fast") else []
    parts += ["head in FP8"] if settings.get("fp8_head") else []
    if settings.get("batch_size") and settings.get("seq_len"):
        parts.append(f"{_counted(settings['batch_size'])} x {_counted(settings['seq_len'])} tokens a step")
    device = config.get("device")
    return [*parts, f"on {device}"] if device else parts


def _when(folder: RunFolder) -> str:
    begun, ended = (f"{time:%Y-%m-%d %H:%M}" for time in (folder.begun, folder.ended))
    written = f"Files written {begun} UTC" if begun == ended else f"Files written {begun} to {ended} UTC"
    planned = _part(folder.config, "settings").get("steps")
    reached = last_step(folder)
    whole = f" of {_counted(planned)}" if planned else ""
    return f"{written}. Step {reached:,}{whole} was reached."


def last_step(folder: RunFolder) -> int:
    """The last step that any file has a row of."""
    steps = [int(rows.steps[-1]) for rows in (*folder.metrics.values(), *folder.diagnosed.values())]
    return max([*steps, *(event.step for event in folder.events)], default=0)


def _part(config: JsonObject, name: str) -> JsonObject:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _counted(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def tiles(folder: RunFolder) -> str:
    """Key numbers of the first run, with those of other runs in small letters below."""
    divisions = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{written(value)} <em>{unit}</em><small>{written(note)}</small></dd></div>"
        for name, value, unit, note in _key_numbers(folder)
    )
    return f'<dl class="tiles">{divisions}</dl>'


def _key_numbers(folder: RunFolder) -> Iterator[tuple[str, str, str, str]]:
    """Name, value and unit of each number, and the note below it."""
    words = (
        ("loss", "Training loss", "", "nats a token, step {step}"),
        ("val_loss", "Validation loss", "", "nats a token, step {step}"),
        ("tokens_per_second", "Throughput", "tokens/s", ""),
        ("model_tflops", "Model operations", "TFLOP/s", "a device"),
        ("bf16_utilization", "Utilization", "", "of the bfloat16 peak"),
        ("peak_memory_gib", "Peak memory", "GiB", "of the first device"),
    )
    for key, name, unit, note in words:
        last = {run: found for run, rows in folder.metrics.items() if (found := rows.last(key))}
        if not last:
            continue
        write = percent if key == "bf16_utilization" else number
        first, *others = last
        step, value = last[first]
        notes = [note.format(step=f"{step:,}"), *_peak_of_fp8(folder, key, first)]
        notes += [f"{run}: {write(last[run][1])}" for run in others]
        yield name, write(value), unit, "; ".join(filter(None, notes))
    skipped = sum(event.event == "skipped" for event in folder.events)
    if skipped:
        yield "Skipped", f"{skipped:,}", "step" if skipped == 1 else "steps", "they changed nothing"


def _peak_of_fp8(folder: RunFolder, key: str, run: str) -> list[str]:
    """The note with the share of the FP8 peak, below the share of the bfloat16 peak; empty for other numbers."""
    last = folder.metrics[run].last("fp8_utilization") if key == "bf16_utilization" else None
    return [f"{percent(last[1])} of the FP8 peak"] if last else []
