"""The verdict, the tables and the pictures of `mixture_curves.py`, from the curves of its runs."""

import dataclasses
import json
import pathlib
import statistics

import numpy as np
import tables
from matplotlib.figure import Figure

CONTROLLED = "delayed"  # the recipe of both controls
COLORS = {"bf16": "tab:blue", "delayed": "tab:orange", "block": "tab:green", "frozen": "tab:red"}
Bounds = tuple[float, float]  # the least and the most that `bound_at` returns


@dataclasses.dataclass(frozen=True)
class Point:
    """What an evaluation finds.

    Args:
      step: how many steps were taken.
      training_loss: the mean since the point before, with the auxiliary loss.
      validation_loss: the cross-entropy of the validation tokens.
      loads: the load of each layer.
    """

    step: int
    training_loss: float
    validation_loss: float
    loads: list[float]


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of one run; `recipe` is a name of RECIPES or "frozen"."""

    recipe: str
    balance: str
    seed: int
    points: list[Point]
    seconds: float

    def at(self, step: int) -> Point:
        return next(point for point in self.points if point.step == step)


def grouped(runs: list[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs by recipe and balance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.recipe, run.balance), []).append(run)
    return groups


def loss_at(runs: list[Run], step: int) -> float:
    return statistics.fmean(run.at(step).validation_loss for run in runs)


def last_load(runs: list[Run]) -> float:
    """The mean over seeds and layers."""
    return statistics.fmean(load for run in runs for load in run.points[-1].loads)


def bound_at(reference: list[Run], step: int, bounds: Bounds) -> float:
    """How far a mean loss may be from that of the reference, as a share of it: twice the noise, within `bounds`."""
    losses = [run.at(step).validation_loss for run in reference]
    noise = (max(losses) - min(losses)) / statistics.fmean(losses)
    least, most = bounds
    return min(max(least, 2 * noise), most)


def judge(runs: list[Run], bounds: Bounds) -> tuple[str, list[dict]]:
    """The verdict, and for each recipe and balance what was found and whether that is as required."""
    groups, rows = grouped(runs), []
    for (recipe, balance), group in groups.items():
        step, load = group[0].points[-1].step, last_load(group)
        row = {
            "recipe": recipe,
            "balance": balance,
            "step": step,
            "validation_losses": [run.points[-1].validation_loss for run in group],
            "load": load,
            "highest_load": max(load for run in group for load in run.points[-1].loads),
        }
        if balance == "none":
            others = [last_load(of) for (name, how), of in groups.items() if name == CONTROLLED and how != "none"]
            row |= {"requirement": f"load above {max(others):.2f}", "as_required": load > max(others)}
        elif recipe != "bf16":
            reference = groups["bf16", balance]
            bound = bound_at(reference, step, bounds)
            difference = loss_at(group, step) / loss_at(reference, step) - 1
            row |= {"difference": difference, "bound": bound}
            if recipe == "frozen":  # worse, or not a number
                requirement, as_required = f"more than {100 * bound:.2f} % worse", not difference <= bound
            else:
                requirement, as_required = f"within {100 * bound:.2f} %", abs(difference) <= bound
            row |= {"requirement": requirement, "as_required": as_required}
        rows.append(row)
    judged = [row for row in rows if "requirement" in row]
    if not all(row["as_required"] for row in judged):
        return "FAIL", rows
    balances = {balance for _, balance in groups} - {"none"}
    wanted = {("frozen", balance) for balance in balances} | {(CONTROLLED, "none")}
    in_fp8 = {balance for recipe, balance in groups if recipe not in ("bf16", "frozen")} - {"none"}
    return ("PASS" if wanted <= groups.keys() and in_fp8 == balances else "INCOMPLETE"), rows


def plot(runs: list[Run], path: pathlib.Path, title: str, bounds: Bounds) -> None:
    """A column for each balance: validation losses, their differences from the mean of bf16, and loads. A line is a
    run, the controls are dashed.
    """
    balances = list(dict.fromkeys(run.balance for run in runs if run.balance != "none"))
    figure = Figure(figsize=(7 * len(balances), 12), layout="constrained")
    axes = figure.subplots(3, len(balances), squeeze=False, sharex=True, sharey="row")
    figure.suptitle(title)
    for balance, (losses, differences, loads) in zip(balances, axes.T, strict=True):
        reference = [run for run in runs if (run.recipe, run.balance) == ("bf16", balance)]
        steps = [point.step for point in reference[0].points]
        bound = 100 * np.array([bound_at(reference, step, bounds) for step in steps])
        differences.fill_between(steps, -bound, bound, color="0.9", label="the bound")
        for run in runs:
            if run.balance not in (balance, "none"):
                continue
            is_control = run.recipe == "frozen" or run.balance == "none"
            label = run.recipe if run.balance != "none" else f"{run.recipe}, not balanced"
            style = {
                "color": "0.3" if run.balance == "none" else COLORS[run.recipe],
                "linestyle": "--" if is_control else "-",
                "label": None if run.seed else label,
                "linewidth": 1.2,
            }
            steps = [point.step for point in run.points]
            losses.plot(steps, [point.validation_loss for point in run.points], **style)
            loads.plot(steps, [statistics.fmean(point.loads) for point in run.points], **style)
            if not is_control:
                apart = [100 * (point.validation_loss / loss_at(reference, point.step) - 1) for point in run.points]
                differences.plot(steps, apart, **style)
        losses.set(title=f"balance: {balance}", ylabel="validation cross-entropy, nats per token")
        differences.set(ylabel="% above the mean of bf16")
        loads.set(xlabel="step", ylabel="busiest expert / mean expert, mean of the layers")
        for panel in (losses, differences, loads):
            panel.legend(fontsize="small")
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_results(path: pathlib.Path, runs: list[Run], title: str, text: str, settings: dict) -> str:
    """`.md`, `.json` with all curves, and `.png`, from the runs so far; returns the verdict."""
    bounds = settings["least_bound"], settings["most_bound"]
    verdict, rows = judge(runs, bounds)
    found, groups = tables.environment(), grouped(runs)
    lines = [
        [
            row["recipe"],
            row["balance"],
            f"{row['step']:,}",
            ", ".join(f"{loss:.4f}" for loss in row["validation_losses"]),
            f"{100 * row['difference']:+.3f} %" if "difference" in row else "-",
            row.get("requirement", "-"),
            {True: "yes", False: "NO", None: "-"}[row.get("as_required")],
            f"{row['load']:.2f}",
            f"{row['highest_load']:.2f}",
            ", ".join(f"{run.seconds:.0f}" for run in groups[row["recipe"], row["balance"]]),
        ]
        for row in rows
    ]
    headings = ["recipe", "balance", "steps", "validation loss of each seed", "mean, difference to bf16"]
    headings += ["requirement", "met", "load at the end, mean of the layers", "highest load of a layer"]
    headings += ["seconds of each seed, the first with compilation"]
    sections = [
        f"# A mixture of experts learns in FP8 as in bfloat16: {verdict}",
        f"{title}. {tables.environment_line(found)}",
        f"Text: {text}.",
        tables.table(headings, lines),
        f"The bound is twice the difference of bf16's seeds, at least {100 * bounds[0]:g} % and at most "
        f"{100 * bounds[1]:g} %. Losses are cross-entropies, without the auxiliary loss. A load is the share of the "
        "busiest expert of a layer, divided by the mean share: 1 is even. `frozen` is delayed scaling with every scale "
        f"set to {settings['frozen_scale']:g} after each step, compared with bf16 at its last step; `none` balances "
        "nothing.",
        f"![losses and loads]({path.name}.png)",
    ]
    tables.write(path.with_name(f"{path.name}.md"), "\n\n".join(sections))
    summary = {
        "verdict": verdict,
        "environment": found,
        "settings": settings,
        "text": text,
        "results": rows,
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    tables.write(path.with_name(f"{path.name}.json"), json.dumps(summary))
    plot(runs, path.with_name(f"{path.name}.png"), title, bounds)
    return verdict
