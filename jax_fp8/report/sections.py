"""The sections of a report as HTML: findings, curves, maps, tables. All text from files is escaped."""

import json
import math
from html import escape

from jax_fp8.report.changes import Change, changes, column_before
from jax_fp8.report.charts import Chart, Curve, draw
from jax_fp8.report.diagnosed import Diagnosed
from jax_fp8.report.finding import Finding
from jax_fp8.report.formatting import counted, number, tensor_word
from jax_fp8.report.heading import last_step, written
from jax_fp8.report.ranking import COLUMNS, MOST, worst_tensors
from jax_fp8.report.run_folder import Event, Metrics, RunFolder
from jax_fp8.report.run_format import JsonObject
from jax_fp8.report.step_checks import loss_against_limit

SHOWN = 3  # findings of a kind; the others are folded
EVENTS_SHOWN = 20
CHANGES_SHOWN = 12
BROKEN_SHOWN = 4  # of these, tensors that are not finite; the others only follow from the first


def findings_section(findings: list[Finding], folder: RunFolder) -> str:
    """The findings, grouped by kind."""
    if not findings:
        return f"<h2>Findings</h2>{_nothing_found(folder)}"
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.kind, finding.run), []).append(finding)
    items = "".join(_item(alike, len(folder.runs) > 1) for alike in groups.values())
    return f'<h2>Findings</h2><ul class="findings">{items}</ul>'


def _nothing_found(folder: RunFolder) -> str:
    steps = sum(len(diagnosed.steps) for diagnosed in folder.diagnosed.values())
    looked = f"{counted(steps, 'diagnosed step')}, the log and the events" if steps else "the log and the events alone"
    return f'<p><span class="level good">nothing</span> No findings in {looked}.</p>'


def _item(alike: list[Finding], names_run: bool) -> str:
    """The findings of one kind: the first few, the others folded, and their common remedy."""
    first, rest = alike[0], alike[SHOWN:]
    shown = "".join(f"<p>{_sentence(finding)}</p>" for finding in alike[:SHOWN])
    folded = "".join(f"<p>{_sentence(finding)}</p>" for finding in rest)
    details = f"<details><summary>{len(rest):,} more of this kind</summary>{folded}</details>" if rest else ""
    run = f"<small>{escape(first.run)}</small>" if names_run else ""
    return (
        f'<li><div><span class="level {first.level}">{escape(first.kind)}</span> {run}</div>'
        f'<div>{shown}{details}<p class="remedy">{_with_code(first.remedy)}</p></div></li>'
    )


def _sentence(finding: Finding) -> str:
    if finding.place is None:
        return written(finding.sentence)
    layer, tensor = finding.place
    names = {"of": finding.run, "layer": layer, "tensor": tensor_word(tensor)}
    data = " ".join(f'data-{key}="{escape(value)}"' for key, value in names.items())
    return f'{written(finding.sentence)} <button type="button" {data}>show in the map</button>'


def _with_code(text: str) -> str:
    """HTML of a text of this package, in which code is between backticks."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def charts_section(folder: RunFolder) -> str:
    """Loss, throughput, utilization and memory of all runs."""
    if not folder.metrics:
        return ""
    skips = tuple(sorted({event.step for event in folder.events}))
    losses = [
        curve
        for color, (run, rows) in enumerate(folder.metrics.items())
        for curve in (
            Curve(f"{run}, training", rows.steps, rows.values["loss"], color % 4),
            Curve(f"{run}, validation", rows.steps, rows.values["val_loss"], color % 4, dotted=True),
        )
    ]
    charts = [
        Chart("Loss", "nats a token", losses, skips),
        Chart("Throughput", "tokens/s", _curves(folder, "tokens_per_second"), from_zero=True),
        Chart("Model operations", "TFLOP/s a device", _curves(folder, "model_tflops"), from_zero=True),
        Chart("Peak memory of the first device", "GiB", _curves(folder, "peak_memory_gib"), from_zero=True),
    ]
    drawn = "".join(draw(chart, last_step(folder)) for chart in charts)
    about = "<p><small>Dashed red lines are skipped steps.</small></p>" if skips else ""
    return f'<h2>Curves</h2>{about}<div class="charts">{drawn}</div>' if drawn else ""


def _curves(folder: RunFolder, name: str) -> list[Curve]:
    def curve(color: int, run: str, rows: Metrics) -> Curve:
        return Curve(run, rows.steps, rows.values[name], color % 4)

    return [curve(color, run, rows) for color, (run, rows) in enumerate(folder.metrics.items())]


def map_section(title: str, about: str, name: str, data: JsonObject) -> str:
    """A map with its switches, which page.js draws; one in which all is well is closed.

    Args:
      about: HTML that explains the map.
      name: by which the buttons of findings find the map.
      data: from `tensor_map` or `gradient_map`.
    """
    parts = list(dict.fromkeys(part for _, part in data["rows"] if part))
    switches = _switch(name, "scale", [(scale["name"], scale["title"]) for scale in data["scales"]])
    if len(parts) > 1:
        switches += _switch(name, "part", [("", "all tensors"), *((part, part + "s") for part in parts)])
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return (
        f'<section data-map="{escape(name)}"><h2>{escape(title)}</h2>{_summary(data)}<p>{about}</p>{switches}'
        f'<ul class="legend"></ul><div class="frame"><canvas tabindex="0" role="img" '
        f'aria-label="{escape(title)}: a map of layers over steps, arrow keys move"></canvas></div>'
        f'<script type="application/json">{content}</script></details></section>'
    )


def _summary(data: JsonObject) -> str:
    """The start of the part that opens and closes, with a line that says what the map shows."""
    rows, first, last = data["rows"], data["columns"][0][0], data["columns"][-1][1]
    shown = f"{counted(len(rows), 'tensor' if rows[0][1] else 'layer')}, steps {first:,} to {last:,}"
    if data["quiet"]:
        return f'<details><summary><span class="level good">all well</span> {shown}: open the map</summary>'
    return f"<details open><summary>{shown}</summary>"


def _switch(name: str, kind: str, choices: list[tuple[str, str]]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{escape(f"{kind} of {name}")}" data-kind="{kind}" value="{escape(value)}"'
        f"{' checked' if index == 0 else ''}><span>{escape(words)}</span></label>"
        for index, (value, words) in enumerate(choices)
    )
    return f"<fieldset>{inputs}</fieldset>"


def tensors_section(title: str, diagnosed: Diagnosed) -> str:
    """The table of the worst-scaled tensors."""
    rows = "".join(
        f"<tr><td>{_breakable(name)}</td>"
        + "".join(f"<td>{escape(cell.last)}<small>{escape(cell.worst)}</small></td>" for cell in cells)
        + "</tr>"
        for name, cells in worst_tensors(diagnosed)
    )
    heads = "".join(f"<th>{name}</th>" for name, *_ in COLUMNS)
    shown = min(MOST, len(diagnosed.places))
    return (
        f"<h2>{escape(title)}</h2><p><small>{shown:,} of {counted(len(diagnosed.places), 'tensor')}. Large: at step "
        f"{diagnosed.steps[-1]:,}, the last one diagnosed. Small: the worst, and its step.</small></p>"
        f'<div class="scroll"><table><tr><th>tensor</th>{heads}</tr>{rows}</table></div>'
    )


def _breakable(name: str) -> str:
    """A tensor's name as HTML, which may be broken into lines after a slash."""
    return escape(name).replace("/", "/<wbr>")


def events_section(folder: RunFolder) -> str:
    """Each event, and what changed in its step."""
    if not folder.events:
        return ""
    shown = "".join(_event(event, folder) for event in folder.events[:EVENTS_SHOWN])
    rest = len(folder.events) - EVENTS_SHOWN
    more = f"<p>{counted(rest, 'event')} more are in events.jsonl.</p>" if rest > 0 else ""
    return f"<h2>Events</h2>{shown}{more}"


def _event(event: Event, folder: RunFolder) -> str:
    diagnosed = folder.diagnosed.get(event.run)
    column = column_before(diagnosed, event.step)
    fault = f" The fault: {event.fault}." if event.fault else ""
    sentence = f"It was {event.event} {loss_against_limit(event)}.{fault}"
    if diagnosed is None or column is None:
        table = "<p><small>No step before it was diagnosed, so there is nothing to compare it with.</small></p>"
    elif not event.sample.places and not event.sample.layers:
        table = "<p><small>It was not diagnosed.</small></p>"
    else:
        before = int(diagnosed.steps[column])
        sentence += f" At step {before:,}, the last one diagnosed before, the loss was "
        sentence += f"{number(float(diagnosed.losses[column]))}."
        table = _changes(changes(event.sample, diagnosed, column), before, event.step)
    return f"<h3>Step {event.step:,} of {escape(event.run)}</h3><p>{written(sentence)}</p>{table}"


def _changes(every: list[Change], before: int, after: int) -> str:
    """The table of the largest changes between two steps; `every` begins with those that are not finite."""
    if not every:
        return "<p><small>No tensor and no gradient changed by more than a factor of 2.</small></p>"
    broken = [change for change in every if math.isinf(change.size)]
    shown = [*broken[:BROKEN_SHOWN], *every[len(broken) :]][:CHANGES_SHOWN]
    rows = "".join(
        f"<tr><td>{_breakable(change.what)}</td>"
        f"<td>{change.before}</td><td>{change.after}</td><td>{change.change}</td></tr>"
        for change in shown
    )
    left_out = max(0, len(broken) - BROKEN_SHOWN)
    rest = len(every) - len(shown) - left_out
    words = f"{left_out:,} more tensors or gradients are not finite, " if left_out else ""
    words += f"{rest:,} more changed by a factor of 2 or more."
    more = f"<p><small>{words}</small></p>" if left_out + rest else ""
    heads = f"<tr><th>what changed most</th><th>step {before:,}</th><th>step {after:,}</th><th>change</th></tr>"
    return f'<div class="scroll"><table>{heads}{rows}</table></div>{more}'


def config_section(folder: RunFolder) -> str:
    if not folder.config:
        return ""
    text = json.dumps(folder.config, indent=2, ensure_ascii=False)
    return f"<h2>Configuration</h2><details><summary>config.json</summary><pre>{escape(text)}</pre></details>"
