"""Residuals on the device, on the host, or computed again: the memory that each frees, and the time that it costs.

    python benchmarks/offload.py                                   # GPT-3 1.3B: 8 minutes on one H200
    python benchmarks/offload.py --width 8192 --layers 6 --remat none full offload:2 --large 0 --check-layers 0
    python benchmarks/offload.py --self-test                       # a tiny model anywhere; its times mean nothing

All rows use one GPU, the same params and the same random tokens; each runs in a process of its own:

    --remat    steps of `--batch` sequences: tokens a second, peak memory
    --large    steps of more sequences, which do not fit with `none`
    --check-layers    one step of a model with few layers and XLA's attention: are all bits those of `none`?

In the last check, `none` runs twice as a control: if its two runs differ, other differences mean nothing. XLA must not
choose GEMMs by timing there, because every process would then have another program. The embedding's table is left out,
because a GPU sums its gradient in any order; cuDNN's attention does so, too, so the check does not use it.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tables
from fresh import measure_in_fresh_process

import jax_fp8 as fp8
from jax_fp8.jaxprs.equations import all_equations
from jax_fp8.train.cuda_graph import default_options

HERE = pathlib.Path(__file__).resolve()
WARMUP_STEPS = 3
CHECKED_STEPS = 1  # behind it, the table of the embedding would reach all others
GIB = 2**30
NO_ROOM = "RESOURCE_EXHAUSTED"
TIMED, LARGE, BITS = "the same batch", "a large batch", "bits"
METHOD = f"""`DelayedScaling` with fast accumulation, FP8 head, float32 params, `fused_adamw`, random tokens.
`ms a step` is the median after {WARMUP_STEPS + 1} steps, with a wait after each. `peak` is `peak_bytes_in_use` of the \
device, `freed` how much less that is
than with `none`, `moved` what the program copies to the host in one microbatch, and `host` the largest resident \
memory of the process; all in GiB."""


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a fresh process must know."""

    part: str
    remat: str
    preset: str
    layers: int
    width: int
    sequence: int
    batch: int
    microbatches: int
    steps: int
    options: dict


# --- in the fresh process -------------------------------------------------------------------------------------------


def measure(job: Job) -> dict:
    """Run one job in this process."""
    config = fp8.GPTConfig.preset(job.preset, num_layers=job.layers, max_seq_len=job.sequence)
    if job.width != config.hidden_size:
        config = dataclasses.replace(config, hidden_size=job.width, num_heads=max(1, job.width // 128))
    recipe = fp8.DelayedScaling(split_accumulator=())
    attention = {"attention_implementation": "xla"} if job.part == BITS else {}
    model = fp8.GPT(config, recipe=recipe, head_recipe=fp8.CurrentScaling(), remat=job.remat, **attention)
    defaults = default_options(on_mesh=False, offloads="offload" in job.remat)
    extra = job.options | ({"xla_gpu_autotune_level": 0} if job.part == BITS else {})
    on_gpu = jax.default_backend() == "gpu"
    step = fp8.make_train_step(
        fp8.next_token_loss(model),
        fp8.fused_adamw(1e-4, weight_decay=0.1),
        recipe,
        job.microbatches,
        warm_start=job.part == BITS,  # it compiles twice, and changes no time
        compiler_options=defaults | extra if extra and on_gpu else None,
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (job.batch, job.sequence + 1), np.int32)
    tokens = jnp.asarray(tokens)
    state = step.init_state(model.init, jax.random.key(1), tokens[:1, :-1])
    found = {"moved_bytes": moved_bytes(step.trace(state, tokens).jaxpr.jaxpr), "environment": tables.environment()}
    losses, taken = [], []
    for _ in range(CHECKED_STEPS if job.part == BITS else 1 + WARMUP_STEPS + job.steps):
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        taken.append(1e3 * (time.perf_counter() - start))
    found |= {"first_loss": losses[0], "last_loss": losses[-1], "first_step_s": taken[0] / 1e3}
    if job.part == BITS:
        return found | {"losses": [loss.hex() for loss in losses], "checksums": checksums(state)}
    step_ms = statistics.median(taken[1 + WARMUP_STEPS :])
    stats = jax.devices()[0].memory_stats() or {}  # a CPU has none
    return found | {
        "step_ms": step_ms,
        "spread_ms": [min(taken[1 + WARMUP_STEPS :]), max(taken[1 + WARMUP_STEPS :])],
        "tokens_per_s": 1e3 * job.batch * job.sequence / step_ms,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def moved_bytes(jaxpr) -> int:
    """Bytes that a traced program copies to the host's memory; the body of a loop counts once."""
    total = 0
    for equation, _ in all_equations(jaxpr):
        if equation.primitive.name == "device_put":
            arrays = [var.aval for var in equation.outvars]
            total += sum(a.size * a.dtype.itemsize for a in arrays if a.memory_space == jax.memory.Space.Host)
    return total


@jax.jit
def _checksums(leaves):
    """For each array, the sum of its bits as integers, each times an odd number from its index, modulo 2**32."""

    def checksum(x):
        bits = jax.lax.bitcast_convert_type(x.ravel(), f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(bits * (2 * jax.lax.iota(jnp.uint32, x.size) + 1), dtype=jnp.uint32)

    return jnp.stack([checksum(x) for x in leaves])


def checksums(state: fp8.TrainState) -> dict[str, int]:
    """Checksums of params, moments and FP8 state by path, without those of the embedding's table."""
    leaves = jax.tree.leaves_with_path([state.params, state.opt_state, state.fp8])
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if leaf.size}
    chosen = {path: leaf for path, leaf in named.items() if "embedding" not in path}
    return dict(zip(chosen, np.asarray(_checksums(list(chosen.values()))).tolist(), strict=True))


# --- in the parent --------------------------------------------------------------------------------------------------


def run_job(job: Job, host_memory: int) -> dict:
    """The measurement of a job, or the error that ended its process."""
    limit = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(host_memory)}  # XLA takes no more than 64 GB by itself
    found, complaints = measure_in_fresh_process(HERE, job, **limit)
    if "failed" in found and NO_ROOM in complaints:
        return {"failed": NO_ROOM}
    return found


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """All jobs; those that are compared with `none` come after it."""
    layers, extra = options.layers, json.loads(options.options)
    remats = options.remat or ["none", "norms", "full", *(f"offload:{n}" for n in (layers // 6, layers // 3, layers))]

    def job(part, remat, layers, batch):
        shape = options.preset, layers, options.width, options.sequence, batch
        return Job(part, remat, *shape, options.microbatches, options.steps, extra if "offload" in remat else {})

    if few := options.check_layers:
        of_few = ["none", "none", "norms", "full", f"offload:{few}", f"offload:{few // 2}:mlp_hidden,norm_input"]
        for remat in of_few[3:5] if options.self_test else of_few:
            yield job(BITS, remat, few, options.batch)
    for remat in remats:
        yield job(TIMED, remat, layers, options.batch)
    if options.large:
        for remat in options.large_remat or ("none", f"offload:{layers // 3}"):
            yield job(LARGE, remat, layers, options.large)


def markdown(rows: list[dict], options: argparse.Namespace) -> str:
    parts = [f"# What layers keep, and where: {options.preset}, {options.layers} layers, {options.width} wide"]
    measured = [row for row in rows if "failed" not in row]
    parts += [tables.environment_line(measured[0]["environment"]), METHOD] if measured else []
    for part in (TIMED, LARGE):
        chosen = [row for row in rows if row["job"]["part"] == part]
        if chosen:
            parts += [_title(part, chosen[0]["job"]), _timed_table(chosen)]
    checked = [row for row in rows if row["job"]["part"] == BITS]
    if checked:
        parts += [_title("bits after one step", checked[0]["job"]), _bits_table(checked)]
    return "\n\n".join(parts)


def _title(part: str, job: dict) -> str:
    parts = f" in {job['microbatches']} microbatches" if job["microbatches"] > 1 else ""
    return f"## {part.capitalize()}: {job['layers']} layers, {job['batch']} x {job['sequence']} tokens{parts}"


def _timed_table(rows: list[dict]) -> str:
    base = next((row for row in rows if row["job"]["remat"] == "none" and "failed" not in row), {})
    headings = ["remat", "ms a step", "times none", "tokens/s", "peak", "freed", "moved", "host", "loss"]
    return tables.table(headings, [_timed_row(row, base) for row in rows])


def _timed_row(row: dict, base: dict) -> list:
    remat = f"`{row['job']['remat']}`"
    if "failed" in row:
        return [remat, "does not fit" if NO_ROOM in row["failed"] else f"failed: {row['failed']}", *["-"] * 7]
    peak, before = row["peak_bytes"], base.get("peak_bytes")
    figures = [
        row["step_ms"],
        row["step_ms"] / base["step_ms"] if base else "-",
        round(row["tokens_per_s"]),
        "-" if peak is None else peak / GIB,
        "-" if peak is None or before is None else (before - peak) / GIB,
        row["moved_bytes"] / GIB,
        row["host_bytes"] / GIB,
    ]
    return [remat, *figures, f"{row['first_loss']:.4f} to {row['last_loss']:.4f}"]


def _bits_table(rows: list[dict]) -> str:
    base, body = rows[0], []
    for row in rows:
        if "failed" in row or "failed" in base:
            body.append([f"`{row['job']['remat']}`", row.get("failed", "-"), "-"])
            continue
        other = [path for path, checksum in row["checksums"].items() if checksum != base["checksums"][path]]
        loss = "yes" if row["losses"] == base["losses"] else "no"
        body.append([f"`{row['job']['remat']}`", loss, f"{len(other)} of {len(row['checksums'])}"])
    return tables.table(["remat", "the first row's loss", "other arrays (params, moments, FP8 state)"], body)


def is_good(row: dict) -> bool:
    """Whether a row is as expected: a large batch may fail if nothing is offloaded."""
    of_interest = row["job"]["part"] == LARGE and "offload" not in row["job"]["remat"]
    return "failed" not in row or (of_interest and NO_ROOM in row["failed"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt3-1.3b")
    parser.add_argument("--layers", type=int, help="layers, if not the preset's")
    parser.add_argument("--width", type=int, help="width, if not the preset's; heads have 128 features")
    parser.add_argument("--sequence", type=int, help="tokens of a sequence, if not the preset's")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument(
        "--remat", nargs="+", help="default: none, norms, full, and offload of a sixth, a third and all layers"
    )
    parser.add_argument(
        "--large", type=int, default=64, help="sequences of a step that does not fit with `none`; 0 leaves it out"
    )
    parser.add_argument("--large-remat", nargs="+", help="default: none, and offload of a third of the layers")
    parser.add_argument(
        "--check-layers", type=int, default=4, help="layers of the model whose bits are compared; 0 leaves it out"
    )
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--options", default="{}", help="options of XLA for rows that offload, as JSON")
    parser.add_argument("--host-memory", type=int, default=96, help="GB of the host that XLA may pin")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--name", default="offload", help="of the two result files")
    parser.add_argument("--self-test", action="store_true", help="a tiny shape and few steps, to run the whole file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.self_test:
        options.preset, options.sequence, options.batch, options.large, options.steps = "tiny", 32, 2, 4, 1
        options.layers, options.check_layers = 2, 2
        options.remat, options.large_remat = ["none"], ["offload:1"]
    config = fp8.GPTConfig.preset(options.preset)
    options.layers, options.sequence = options.layers or config.num_layers, options.sequence or config.max_seq_len
    options.width = options.width or config.hidden_size
    if min(options.layers, options.batch, options.microbatches, options.steps) < 1:
        parser.error("--layers, --batch, --microbatches and --steps must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.job:
        options.result.write_text(json.dumps(measure(Job(**json.loads(options.job)))))
        return 0
    rows = []
    for job in jobs_of(options):
        row = run_job(job, options.host_memory) | {"job": dataclasses.asdict(job)}
        said = {name: row.get(name) for name in ("failed", "step_ms", "peak_bytes", "losses") if row.get(name)}
        print(f"{job.part}, {job.remat}: {said}", flush=True)
        rows.append(row)
        tables.write(options.output / f"{options.name}.md", markdown(rows, options))
        tables.write(options.output / f"{options.name}.json", json.dumps(rows, indent=1))
    print((options.output / f"{options.name}.md").read_text())
    return 0 if all(is_good(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
