"""Costs and gains of microbatches, the weight cache and CUDA graphs: the time of one microbatch in a step of many.

    python benchmarks/microbatches.py                   # both shapes and a small model: about 8 minutes on one H200
    python benchmarks/microbatches.py --variants --long-run 1000  # nothing but a long run of the small model
    python benchmarks/microbatches.py --self-test                 # a tiny model on any machine; its times mean nothing

All programs are compiled before timing. Programs with equally many microbatches take turns, so a drift affects all.

    random tokens, one state ─→ cached, uncached, launches, caller, cached, uncached, ... ─→ medians ─→ table
"""

import argparse
import dataclasses
import gc
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
import tables
from variants import SHAPES, Shape

import jax_fp8 as fp8
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS, zero_metrics
from jax_fp8.train.step import TrainStep

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
START = time.perf_counter()
COMPILED = "/jax/core/compile/backend_compile_duration"  # XLA has compiled something, whoever asked for it
FLAT_BYTES = 2**20  # a batch and some scalars may come and go
LONG_RUN_MICROBATCHES = 2
LONG_RUN_BATCHES = 4  # few enough to be learnt by heart: random tokens teach nothing else
MODELS = {**SHAPES, "124m": Shape(num_layers=12, hidden_size=768, num_heads=12, batch_size=1, seq_len=1024)}
OPTIMIZER = fp8.fused_adamw(1e-4, weight_decay=0.1)
RECIPES = {"bf16": None, "delayed": fp8.DelayedScaling()}
SCANNED = {  # whether the weights are cast once a step, and options of XLA
    "cached": (True, CUDA_GRAPH_OPTIONS),
    "uncached": (False, CUDA_GRAPH_OPTIONS),
    "launches": (True, {"xla_gpu_enable_command_buffer": ""}),
}
VARIANTS = (*SCANNED, "caller", "small")
FIGURES = ("ms_a_microbatch", "host_ms", "waited_ms")
SMALL, LONG_RUN = "A small model", "A long run"
METHOD = """Random tokens, float32 parameters, `fused_adamw`, `DelayedScaling()` unless said otherwise; \
`warm_start=False` saves compiling twice and changes no time
after step 1. Variants take turns on one state: a step untimed, one with the device idle, then a row with one step \
queued ahead, as a training loop runs.
Medians; all samples are in the JSON file.

- `cached`: ms a microbatch, from the end of one step to the end of the next in a row; the weights are cast once a \
step, and the step is one CUDA graph.
- `uncached`: the same with the weights cast in every microbatch; for one microbatch both are the same program, so \
that `difference` there is noise.
- `no graph`: `cached` without CUDA graphs, every kernel launched by the host.
- `caller`: one call a microbatch (`accumulate_step`) and one for the optimizer (`apply_step`), each a CUDA graph.
- `host`: ms until the call of a whole `cached` step returned, the device being idle; beside it the same of \
`no graph`, and of all calls of `caller`.
- `waited`: ms until that step was done."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and what trains it."""

    shape: Shape
    recipe: str = "delayed"

    def model(self) -> fp8.GPT:
        names = ("vocab_size", "num_layers", "num_heads", "hidden_size")
        config = fp8.GPTConfig(**{name: getattr(self.shape, name) for name in names}, max_seq_len=self.shape.seq_len)
        return fp8.GPT(config, recipe=RECIPES[self.recipe])

    def new_state(self) -> fp8.TrainState:
        variables = jax.jit(self.model().init)(jax.random.key(1), self.tokens(1)[:, :-1])
        return jax.jit(lambda variables: fp8.TrainState.create(variables=variables, tx=OPTIMIZER))(variables)

    def make_step(self, microbatches: int, **settings) -> TrainStep:
        loss_fn = fp8.next_token_loss(self.model())
        return fp8.make_train_step(loss_fn, OPTIMIZER, RECIPES[self.recipe], microbatches=microbatches, **settings)

    def tokens(self, microbatches: int) -> jax.Array:
        size = (microbatches * self.shape.batch_size, self.shape.seq_len + 1)
        return jax.random.randint(jax.random.key(0), size, 0, self.shape.vocab_size, jnp.int32)


def say(line: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {line}", flush=True)


def compile_programs(training: Training, chosen: dict[str, set[int]]) -> dict[int, dict[str, Future]]:
    """The compiled steps, by number of microbatches and variant. The first is compiled alone, because XLA times
    algorithms and remembers the fastest; the others, side by side, take the same."""
    state = jax.eval_shape(training.new_state)
    programs, first = {}, []
    with ThreadPoolExecutor(16) as pool:
        for count in sorted(set().union(*chosen.values())):
            lowered, programs[count] = {}, {}
            tokens = jax.eval_shape(lambda count=count: training.tokens(count))
            for variant in [variant for variant in SCANNED if count in chosen.get(variant, ())]:
                cached, options = SCANNED[variant]
                if cached not in lowered:  # graphs or launches is a question to the compiler
                    step = training.make_step(count, cache_weights=cached, warm_start=False, compiler_options={})
                    lowered[cached] = step.trace(state, tokens).lower()
                programs[count][variant] = pool.submit(_compile_after, first, lowered[cached], options)
                first = first or [programs[count][variant]]
    say("programs compiled")
    return programs


def _compile_after(first: list[Future], lowered: jax.stages.Lowered, options: dict) -> jax.stages.Compiled:
    wait(first)
    return lowered.compile(options)


def scanned(program: Future, tokens: jax.Array) -> Callable:
    return lambda state: program.result()(state, tokens, zero_metrics())


def caller_driven(step: TrainStep, microbatches: list[jax.Array]) -> Callable:
    """The same step with one call for each microbatch."""
    pending = None

    def run(state):
        nonlocal pending
        pending = step.start(state) if pending is None else pending
        for i, microbatch in enumerate(microbatches):
            pending = step.accumulate_step(state, pending, microbatch, is_first_microbatch=i == 0)
        state, pending, metrics = step.apply_step(state, pending)
        return state, metrics

    return run


class Times:
    """Milliseconds of single steps. The device idle: until the call returned, `host`, and until the step was done,
    `waited`. The device busy: from the end of one step to the end of the next, which was queued meanwhile, `in_a_row`.
    A call that queues more kernels than the driver takes returns late, and the end of the step before is seen late,
    by the same time at every step."""

    def __init__(self):
        self.host, self.waited, self.in_a_row, self.losses = [], [], [], []
        self.failed = ""

    def alone(self, run: Callable, state):
        start = time.perf_counter()
        state, metrics = run(state)
        self.host.append(1e3 * (time.perf_counter() - start))
        self.losses.append(float(metrics["loss"]))
        self.waited.append(1e3 * (time.perf_counter() - start))
        return state

    def row(self, run: Callable, state, steps: int):
        state, queued = run(state)
        ends = []
        for _ in range(steps):
            running = queued
            state, queued = run(state)
            jax.block_until_ready(running)
            ends.append(1e3 * time.perf_counter())
        self.losses.append(float(queued["loss"]))  # nothing was queued behind this one: its end was not seen late
        self.in_a_row += [end - start for start, end in itertools.pairwise(ends)]
        return state

    def to_json(self, microbatches: int) -> dict:
        if self.failed:
            return {"failed": self.failed}
        ms, host_ms, waited_ms = map(statistics.median, (self.in_a_row, self.host, self.waited))
        if not np.all(np.isfinite(self.losses)) or len(set(self.losses)) == 1:
            self.failed = f"a step that trains has finite losses that change, got {self.losses}"
        return {**dict(zip(FIGURES, (ms / microbatches, host_ms, waited_ms), strict=True)), **vars(self)}


def take_turns(training: Training, state, runs: dict[str, Callable], rounds: int, steps: int):
    """The last state, and the times of runs that take turns with it."""
    found = {variant: Times() for variant in runs}
    for variant, run in runs.items():
        try:
            state = Times().alone(run, state)
        except jax.errors.JaxRuntimeError as error:  # a row that says so; the others are still worth having
            found[variant].failed = str(error).splitlines()[0][:300]
            state = training.new_state() if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)) else state
    for variant, times in [*found.items()] * rounds:
        if not times.failed:
            state = Times().alone(runs[variant], state)  # at other addresses than last: a graph is recorded anew
            state = times.alone(runs[variant], state)
            state = times.row(runs[variant], state, steps)
    return state, found


def measure(training: Training, chosen: dict[str, set[int]], steps: int) -> Iterator[dict]:
    """A row for each variant and number of microbatches; long steps get fewer turns."""
    programs = compile_programs(training, chosen)
    state = training.new_state()
    for count in list(programs):
        tokens = training.tokens(count)
        runs = {variant: scanned(program, tokens) for variant, program in programs.pop(count).items()}
        if count in chosen.get("caller", ()):
            runs["caller"] = caller_driven(training.make_step(count, warm_start=False), jnp.split(tokens, count))
        rounds = 2 if count <= 4 else 1
        state, found = take_turns(training, state, runs, rounds, steps if count <= 8 else 2)
        for variant, times in found.items():
            yield {"recipe": training.recipe, "variant": variant, "microbatches": count, **times.to_json(count)}
        del runs  # a graph holds device memory
        gc.collect()


def long_run(training: Training, steps: int) -> dict:
    """Train as a user does, with batches from the host, while counting compilations and watching the memory."""
    compiled = []

    def listen(event: str, duration_secs: float, **_):
        compiled.extend([event] if event == COMPILED else [])

    batches = np.split(np.asarray(training.tokens(LONG_RUN_BATCHES * LONG_RUN_MICROBATCHES)), LONG_RUN_BATCHES)
    state, step = training.new_state(), training.make_step(LONG_RUN_MICROBATCHES)
    losses, memory, first = [], {}, 0
    jax.monitoring.register_event_duration_secs_listener(listen)
    for i in range(1, steps + 1):
        state, metrics = step(state, batches[i % LONG_RUN_BATCHES])
        if i == 1:
            losses, first = [float(metrics["loss"])], len(compiled)
        elif i == 10 or (i > 10 and i % (steps // 10) == 0):
            losses.append(float(metrics["loss"]))
            memory[i] = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)  # CPU devices have none
    jax.monitoring.unregister_event_duration_listener(listen)
    later, grown = len(compiled) - first, max(memory.values()) - min(memory.values())
    found = {"steps": steps, "compiled_first": first, "compiled_later": later, "grown": grown, "bytes_in_use": memory}
    if first == 0 or later or grown > FLAT_BYTES or not losses[-1] < losses[0]:
        found["failed"] = "it must compile in step 1 and never again, keep its memory, and learn"
    return {**found, "losses": losses}


def shape_table(rows: list[dict]) -> str:
    lines = []
    for count in dict.fromkeys(row["microbatches"] for row in rows):
        ms, host, waited = ({v: _figure(rows, n, microbatches=count, variant=v) for v in VARIANTS} for n in FIGURES)
        line = [ms["cached"], ms["uncached"], ms["uncached"] - ms["cached"], ms["launches"], ms["caller"]]
        line += [host["cached"], host["launches"], host["caller"], waited["cached"], waited["launches"]]
        lines.append([count, *("-" if np.isnan(value) else value for value in line)])
    headings = ["microbatches", "cached", "uncached", "difference", "no graph", "caller"]
    headings += ["host", "host, no graph", "host, caller", "waited", "waited, no graph"]
    return tables.table(headings, lines)


def small_table(rows: list[dict]) -> str:
    """Milliseconds of whole steps, and the gains of graphs and of FP8."""
    columns = [(name, variant) for name in FIGURES for variant in ("cached", "launches")]
    bf16, delayed = ([_figure(rows, n, recipe=r, variant=v) for n, v in columns] for r in RECIPES)
    lines = [[name, *line, line[1] / line[0]] for name, line in (("bf16", bf16), ("delayed", delayed))]
    gains = ["bf16 / delayed", *(a / b for a, b in zip(bf16, delayed, strict=True)), "-"]
    headings = ["one microbatch", "graph", "no graph", "host", "host, no graph", "waited", "waited, no graph"]
    return tables.table([*headings, "no graph / graph"], [*lines, gains])


def _figure(rows: list[dict], name: str, **of) -> float:
    """One figure of the row of this variant; NaN if it is missing."""
    return next((row.get(name, np.nan) for row in rows if of.items() <= row.items()), np.nan)


def long_run_sentences(rows: list[dict]) -> str:
    memory, losses = (rows[0][name] for name in ("bytes_in_use", "losses"))
    return (
        f"{rows[0]['steps']:,} steps of {LONG_RUN_MICROBATCHES} microbatches, called as in a training loop, warm start "
        f"included. Compiled up to the end of step 1: {rows[0]['compiled_first']} programs; after it: "
        f"{rows[0]['compiled_later']} (backend compilations of the whole process, counted by `jax.monitoring`). "
        f"Bytes in use at steps {', '.join(map(str, memory))}: at most {max(memory.values()):,}, and "
        f"{rows[0]['grown']:,} less at least; what CUDA graphs hold is not among them. "
        f"Loss: {losses[0]:.4f} to {losses[-1]:.4f}."
    )


def write_results(directory: pathlib.Path, environment: dict, results: dict[str, list[dict]]) -> None:
    """`microbatches.md` and `.json`, rewritten after each measurement so that an interrupted run keeps what it has."""
    parts = ["# Microbatches", tables.environment_line(environment), METHOD]
    for title, rows in results.items():
        failures = [f"Failed: {row.get('variant', '')} {row['failed']}." for row in rows if row.get("failed")]
        to_text = {SMALL: small_table, LONG_RUN: long_run_sentences}.get(title, shape_table)
        parts += [f"## {title}", to_text(rows), *failures]
    tables.write(directory / "microbatches.md", "\n\n".join(parts))
    tables.write(directory / "microbatches.json", json.dumps({"environment": environment} | results, indent=1))


def all_rows(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """All measurements, each row under the title of its section."""
    counts = {"launches": {1, 8}, "caller": {8}}
    wanted = [variant for variant in options.variants if variant != "small"]
    chosen = {variant: counts.get(variant, set(options.counts)) & set(options.counts) for variant in wanted}
    for name in options.shapes if chosen else ():
        for row in measure(Training(MODELS[name]), chosen, steps=3):
            yield name, row
    for recipe in RECIPES if "small" in options.variants else ():
        for row in measure(Training(MODELS[options.shape], recipe), {"cached": {1}, "launches": {1}}, steps=30):
            yield SMALL, row
    if options.long_run:
        yield LONG_RUN, long_run(Training(MODELS[options.shape]), options.long_run)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=["1.3b", "4096"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="microbatches in a step")
    parser.add_argument("--shape", choices=MODELS, default="124m", help="of the small model and the long run")
    parser.add_argument("--long-run", type=int, metavar="STEPS", help="train for STEPS steps, at least 10")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--self-test", action="store_true", help="a tiny shape and few steps, to run the whole file")
    options = parser.parse_args(arguments)
    if options.self_test:
        options.shapes, options.shape, options.counts, options.long_run = ["tiny"], "tiny", [1, 8], 20
    if min(options.counts) < 1 or (options.long_run is not None and options.long_run < 10):
        parser.error("--counts must be at least 1 and --long-run at least 10")
    environment, results = tables.environment(), {}
    for title, row in all_rows(options):
        results.setdefault(title, []).append(row)
        figures = {name: value for name, value in row.items() if value and not isinstance(value, list | dict)}
        say(f"{title}: {figures}")
        write_results(options.output, environment, results)
    print(f"written to {options.output}/microbatches.md and microbatches.json")
    return 1 if any(row.get("failed") for rows in results.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
