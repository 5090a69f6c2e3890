"""Costs of pipeline schedules, computed and not measured: a table, and a picture with their timelines.

    python benchmarks/pipelines.py --stages 4 --microbatches 12
    python benchmarks/pipelines.py --output docs/explanation/pipelines.png

Nothing runs on a device. All stages synchronize at the end of every tick, as in the real step. Times are in units of a
forward's time, unless `--costs` sets others.
"""

import argparse
import pathlib
import sys

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tables import table

from jax_fp8.parallel.schedule import Kind, Schedule
from jax_fp8.parallel.schedules import SCHEDULES, make_schedule
from jax_fp8.parallel.ticks import make_ticks
from jax_fp8.parallel.timeline import Costs, Timeline, make_timeline, most_kept

COLORS = {
    Kind.FORWARD: "tab:blue",
    Kind.BACKWARD: "tab:green",
    Kind.INPUT_GRADIENT: "tab:olive",
    Kind.WEIGHT_GRADIENT: "tab:purple",
}
HEADINGS = ["schedule", "ticks", "time", "bubble", "kept", "room"]


def make_all(stages: int, microbatches: int, chunks: int) -> dict[str, Schedule]:
    """Every schedule by name; the name has the number of chunks if stages have several."""
    found = {}
    for name in SCHEDULES:
        own = chunks if name == "interleaved" else 1
        found[name if own == 1 else f"{name}, {own} chunks"] = make_schedule(name, stages, microbatches, own)
    return found


def row(name: str, schedule: Schedule, costs: Costs) -> list[str]:
    """The cells under HEADINGS. Residuals are counted in microbatches of all layers of a stage; those of a chunk are a
    share.
    """
    timeline = make_timeline(schedule, costs)
    kept = ", ".join(f"{sum(of_stage) / schedule.chunks:g}" for of_stage in most_kept(schedule))
    room = sum(make_ticks(schedule).slots) / schedule.chunks
    ticks = str(len(schedule.table))
    return [f"`{name}`", ticks, f"{timeline.time:g}", f"{timeline.bubble:.1%}", kept, f"{room:g}"]


def draw(timelines: dict[str, Timeline]) -> Figure:
    """A row of bars for each stage: units in the color of their kind, later chunks paler, the bubble white."""
    figure = Figure(figsize=(11, 1.9 * len(timelines)), layout="constrained")
    for axes, (name, timeline) in zip(figure.subplots(len(timelines), sharex=True), timelines.items(), strict=True):
        for stage, spans in enumerate(timeline.stages):
            for span in spans:
                color = COLORS[span.unit.kind], 0.8 / (1 + span.unit.chunk)
                axes.barh(stage, span.end - span.begin, 0.9, span.begin, color=color, edgecolor="white", linewidth=0.5)
                middle = (span.begin + span.end) / 2
                axes.text(middle, stage, str(span.unit.microbatch), ha="center", va="center", fontsize=6)
        axes.set_title(f"{name}: bubble {timeline.bubble:.1%}", fontsize="medium", loc="left")
        axes.set(yticks=range(len(timeline.stages)), ylabel="stage")
        axes.invert_yaxis()  # stage 0 above
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("time, in that of a forward; the numbers are microbatches")
    patches = [Patch(color=(color, 0.8), label=kind.value) for kind, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize="small", frameon=False)
    return figure


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stages", 4), ("microbatches", 12), ("chunks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    costs = ("FORWARD", "INPUT_GRADIENT", "WEIGHT_GRADIENT")
    parser.add_argument("--costs", type=float, nargs=3, default=[1.0, 1.0, 1.0], metavar=costs)
    parser.add_argument("--output", type=pathlib.Path, help="the picture; none is drawn by default")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        costs = Costs(**dict(zip(("forward", "input_gradient", "weight_gradient"), options.costs, strict=True)))
        schedules = make_all(options.stages, options.microbatches, options.chunks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(HEADINGS, [row(name, schedule, costs) for name, schedule in schedules.items()]))
    if options.output:
        timelines = {name: make_timeline(schedule, costs) for name, schedule in schedules.items()}
        draw(timelines).savefig(options.output, dpi=110)
        print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
