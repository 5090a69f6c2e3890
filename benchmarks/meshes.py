"""Training steps of a GPT on the GPUs of one host: data, fsdp, tensor and sequence parallel, pipelines; in jax_fp8 and
plain Flax.

    python benchmarks/meshes.py --all                                   # every mesh of all devices, three recipes
    python benchmarks/meshes.py --mesh data=4 tensor=4+sequence --recipe delayed bf16 plain --fast --fp8-head
    python benchmarks/meshes.py --mesh data=2 --recipe delayed --profile 2
    python benchmarks/meshes.py --mesh pipe=4 pipe=2,tensor=2+sequence --schedule 1f1b zero-bubble --microbatches 16
    python benchmarks/meshes.py --mesh pipe=2 data=2 --recipe delayed bf16 --cold --compile-ahead --limit 300
    python benchmarks/meshes.py --mesh data=2 --text batches.npy --losses data.json   # mesh_curves.py makes and draws

Each case runs in a process of its own for at most `--limit` seconds; if it hangs, its row says where. With
`--compile-ahead`, all cases first compile at the same time, within the same limit. A case takes the median of `--steps`
steps with a wait after each, and then times as many steps that are dispatched without waiting. Every step has other
random tokens, which are on the devices before the clock starts. Peak memory is that of the fullest device. The bubble
is not measured but computed from the schedule, with the durations of units that `--costs` gives.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import overlap
import tables
from mesh_cases import GRAPHS, RECIPES, REMAT, SEQUENCE, Case, cases_for, has_stages
from mesh_processes import CaseProcess, compile_side_by_side
from mesh_steps import WARMUP_STEPS, Job

from jax_fp8.parallel.schedules import SCHEDULES
from jax_fp8.parallel.timeline import Costs, make_timeline

TOO_SHORT = 10.0  # seconds, to begin a case


def markdown(results: list[dict]) -> str:
    """One row for each case; failed ones say how they failed."""
    rows = []
    for r in results:
        case = Case(**r["case"])
        row = [case.mesh, case.name, case.graphs, case.sequences]
        if "failed" in r:
            rows.append([*row, *["-"] * 10, f"failed: {r['failed']}"])
            continue
        timed = ("samples_per_s", "step_ms", "row_samples_per_s", "row_ms")
        row += [r.get(name, "-") for name in timed]
        row += [f"{r['bubble']:.1%}" if "bubble" in r else "-"]
        row += [max(r["peak_gib"]) if r["peak_gib"] else "-", f"{r['first_loss']:.4f}", f"{r['last_loss']:.4f}"]
        rows.append([*row, r.get("wire_mib", "-"), r.get("first_step_s", "-"), r.get("failed_beside", "")])
    headings = ["mesh", "recipe", "graphs", "sequences", "samples/s", "ms a step", "samples/s in a row", "ms in a row"]
    headings += ["bubble, computed", "peak GiB", "first loss", "last loss", "wire MiB", "first step s", "remarks"]
    return tables.table(headings, rows)


def computed_bubble(case: Case, costs: Costs) -> dict:
    """The share of a step in which a stage is idle, if units take this long; empty without stages."""
    if case.pipeline is None:
        return {}
    return {"bubble": make_timeline(case.pipeline, costs).bubble, "costs": dataclasses.asdict(costs)}


def check_same_model(results: list[dict]) -> None:
    """Raise if cases have different numbers of parameters: their times could not be compared."""
    counts = {r["case"]["mesh"] + " " + r["case"]["recipe"]: r["num_params"] for r in results if "failed" not in r}
    if len(set(counts.values())) > 1:
        raise ValueError(f"all cases must have the same number of parameters, got {counts}; compare like models")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="every axis with all devices; delayed at its fastest and bf16"
    )
    parser.add_argument("--devices", type=int, default=0, help="number of devices for --all; 0 asks jax")
    parser.add_argument("--mesh", nargs="+", help=f"such as data=2,tensor=2, tensor=4{SEQUENCE} or pipe=2,tensor=2")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES)
    parser.add_argument("--preset", default="gpt3-1.3b", help="tiny runs on any machine; its times mean nothing")
    parser.add_argument("--batch", type=int, default=0, help="sequences a step, all devices and microbatches")
    parser.add_argument(
        "--batch-per-data", type=int, default=0, help="sequences for each part of the batch, if no --batch"
    )
    for name in ("seq-len", "num-layers", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, default=0, help="0 keeps the preset's (default)")
    parser.add_argument("--microbatches", type=int, default=0, help="of a step; 0 means 1, or 4 for each stage of pipe")
    parser.add_argument(
        "--schedule", nargs="+", choices=tuple(SCHEDULES), help="pipeline schedules, for every mesh with pipe"
    )
    parser.add_argument("--chunks", type=int, default=0, help="chunks on each stage of interleaved; 0 means 2")
    lengths = ("FORWARD", "INPUT_GRADIENT", "WEIGHT_GRADIENT")
    parser.add_argument("--costs", type=float, nargs=3, default=(1.0, 1.0, 1.0), metavar=lengths)
    parser.add_argument("--sequence-parallel", action="store_true", help=f"add {SEQUENCE} to every mesh")
    parser.add_argument("--compile-ahead", action="store_true", help="compile all cases first, at the same time")
    for name in ("fast", "fp8-head", "fp8-attention", "cold"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--pieces", action="store_true", help="one call for each microbatch, not one step")
    parser.add_argument("--cache-weights", action=argparse.BooleanOptionalAction, default=True, help="for all of them")
    parser.add_argument("--param-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gradient-dtype", choices=("float32", "bfloat16"), default="")
    parser.add_argument(
        "--remat", choices=REMAT, default="none", help="what layers keep for the backward; not for plain"
    )
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=["default"])
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="options of XLA")
    parser.add_argument("--gemms", default="", help="a table of tuned GEMMs, for delayed and current")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=WARMUP_STEPS, help="untimed steps, besides the first one")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="trace N more steps (GPU only)")
    parser.add_argument("--report", action="store_true", help="bytes of collectives; compiles again (GPU only)")
    parser.add_argument("--text", default="", help="train on a file that `mesh_curves.py text` wrote")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each case")
    parser.add_argument(
        "--total", type=float, default=float("inf"), help="seconds for all cases; later ones are left out"
    )
    parser.add_argument("--output", "--losses", type=pathlib.Path, help="a file for all results, as JSON")
    options = parser.parse_args(arguments)
    if not (options.all or options.mesh):
        parser.error("say --all, or a --mesh")
    if options.pieces and (options.profile or options.report):
        parser.error("--profile and --report are of a step as a whole; leave out --pieces")
    if options.compile_ahead and (options.pieces or options.profile or options.report or options.text):
        parser.error(
            "--compile-ahead is of times of a step as a whole; leave out --pieces, --profile, --report, --text"
        )
    if options.steps < 1 or options.warmup < 0:
        parser.error("--steps must be at least 1, and --warmup at least 0")
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every mesh with every recipe and all `--graphs`, mesh by mesh; a mesh with `pipe` also with every schedule."""
    meshes, recipes = options.mesh, [{"recipe": name} for name in options.recipe or ["delayed"]]
    if options.all:
        found, fastest = cases_for(options.devices or count_devices())
        meshes, recipes = meshes or found, recipes if options.recipe else fastest
    own = ("mesh", "recipe", "options", "graphs", "schedule", "chunks")
    common = {field.name: getattr(options, field.name) for field in dataclasses.fields(Case) if field.name not in own}
    common["options"] = read_options(options.option)
    if options.text:
        sequences, columns = np.load(options.text, mmap_mode="r").shape[-2:]
        common |= {"batch": sequences, "seq_len": columns - 1}
    if options.sequence_parallel:
        meshes = [mesh if mesh.endswith(SEQUENCE) else mesh + SEQUENCE for mesh in meshes]
    cases = [
        Case(**{**common, **recipe, **how, "mesh": mesh, "graphs": graphs})
        for mesh in meshes
        for recipe in recipes
        for how in schedules_of(mesh, meshes, options)
        for graphs in options.graphs
        if not (options.all and recipe["recipe"] == "plain" and has_stages(mesh))  # it has no pipeline
    ]
    asked = {name: getattr(options, name) for name in ("steps", "warmup", "profile", "report", "text")}
    return [Job(case, **asked) for case in cases]


def schedules_of(mesh: str, meshes: list[str], options: argparse.Namespace) -> list[dict]:
    """The schedules of the cases of a mesh: empty without stages, and with chunks where a schedule has them. If there
    is no such mesh or schedule, the case itself refuses it.
    """
    if any(map(has_stages, meshes)) and not has_stages(mesh):
        return [{}]
    schedules = options.schedule or [""]
    with_chunks = [name for name in schedules if name == "interleaved"] or schedules
    return [{"schedule": name, "chunks": options.chunks if name in with_chunks else 0} for name in schedules]


def read_options(texts: list[str]) -> dict[str, str | bool]:
    """XLA's options from `NAME=VALUE` each; true and false become bools."""
    unclear = [text for text in texts if "=" not in text]
    if unclear:
        raise ValueError(f"--option needs NAME=VALUE, got {' '.join(unclear)}; say xla_name=true")
    pairs = dict(text.split("=", 1) for text in texts)
    return {name: {"true": True, "false": False}.get(value.lower(), value) for name, value in pairs.items()}


def count_devices() -> int:
    """The number of devices, found by a process of its own, so that this one allocates no GPU memory."""
    command = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def measure_all(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[dict]:
    """The measurement of each job, or how it failed, one after the other."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        waiting = []
        if options.compile_ahead:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            waiting = compile_side_by_side(jobs, options.limit, cache)
            for process in waiting:
                stack.callback(process.end)
        for index, job in enumerate(jobs):
            left = options.total - (time.monotonic() - started)
            if left > TOO_SHORT:
                process = waiting[index] if waiting else CaseProcess(job, options.limit)
                yield process.result(min(options.limit, left))
            else:
                yield {"case": dataclasses.asdict(job.case), "failed": f"not begun within {options.total:g} s"}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        costs = Costs(**dict(zip(("forward", "input_gradient", "weight_gradient"), options.costs, strict=True)))
        jobs = jobs_of(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = []
    for job, found in zip(jobs, measure_all(jobs, options), strict=True):
        found |= computed_bubble(job.case, costs)
        results.append(found)
        print(f"{job.case.mesh} {job.case.name}: {found.get('failed', 'done')}", flush=True)
        if options.output:  # each time: an interrupted run keeps what it has
            tables.write(options.output, "[\n" + ",\n".join(map(json.dumps, results)) + "\n]")
    for found in results:
        if "profile" in found:
            case = Case(**found["case"])
            print(f"\n{case.mesh} {case.name}, kernels of a step\n\n{overlap.markdown(found['profile'])}")
    environments = [found["environment"] for found in results if "environment" in found]
    if environments:
        print(f"\n{tables.environment_line(environments[0])}")
    print(f"\n{markdown(results)}")
    try:
        check_same_model(results)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if any("failed" in found or "failed_beside" in found for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
