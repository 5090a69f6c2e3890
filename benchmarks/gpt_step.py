"""One training step of a GPT: plain bfloat16, Flax's own FP8, and jax_fp8, side by side.

    python benchmarks/gpt_step.py                              # both shapes, five variants: about 8 minutes on one H200
    python benchmarks/gpt_step.py --shapes 1.3b --variants bf16 delayed --profile
    python benchmarks/gpt_step.py --shapes llama3_8b --microbatches 16 --steps 3 \\
        --variants ours_bf16_small delayed_fast_head_small      # XLA_PYTHON_CLIENT_MEM_FRACTION=0.97: it fills an H200
    python benchmarks/gpt_step.py --shapes moe_8x --variants bf16 delayed current block   # with experts
    python benchmarks/gpt_step.py --self-test                  # a tiny model on any machine; its times mean nothing

Every variant does the same work in its own process: the same shapes, random tokens, float32 parameters (one variant
stores them in two halves) and float32 AdamW. Each process times its first step (compilation and, for FP8, the warm
start). After the warmup it takes the median of `--steps` steps with a wait after each, and then times the same number
of steps that are dispatched without waiting. A variant that fails gets a row with its error, and the exit status is 1.

    parent ──job as JSON──→ python gpt_step.py --job ... ──measurement as JSON──→ table
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import kernel_profile
import tables
from fresh import compile_side_by_side, measure_in_fresh_process
from variants import (
    COMMON_VARIANTS,
    OPTIONS,
    PLAIN,
    RECIPES,
    SHAPES,
    Shape,
    Variant,
    build,
    compile_ahead,
    gemms_of,
    variant_name,
)

HERE = pathlib.Path(__file__).resolve()
WARMUP_STEPS = 4
PROFILED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a fresh process must know."""

    variant: str
    shape: Shape
    microbatches: int
    steps: int
    profile: bool
    warmup: int = WARMUP_STEPS


# --- in the fresh process -------------------------------------------------------------------------------------------


def measure(job: Job) -> dict:
    """Run one job in this process."""
    with gemms_of(job.variant):
        return _measure(job)


def _measure(job: Job) -> dict:
    shape = job.shape
    batch = shape.batch_size * job.microbatches
    tokens = jax.random.randint(jax.random.key(0), (batch, shape.seq_len + 1), 0, shape.vocab_size, jnp.int32)
    step, state, num_params = build(job.variant, shape, job.microbatches, tokens)
    hlo_text = step.lower(state, tokens).compile().as_text() if job.profile else ""

    losses = []
    blocking_ms = []
    for _ in range(1 + job.warmup + job.steps):
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        # A number, as a training loop logs it: device arrays that are kept alive move the buffers of later steps.
        losses.append(float(metrics["loss"]))
        blocking_ms.append(1e3 * (time.perf_counter() - start))
    step_ms = statistics.median(blocking_ms[1 + job.warmup :])

    start = time.perf_counter()
    for _ in range(job.steps):
        state, metrics = step(state, tokens)
    jax.block_until_ready(state)
    async_ms = 1e3 * (time.perf_counter() - start) / job.steps

    # CPU devices have no memory statistics; a GPU's peak is of the whole process, initialisation included.
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    step_tokens = batch * shape.seq_len
    result = {
        "variant": job.variant,
        "environment": tables.environment(),
        "num_params": num_params,
        "tokens": step_tokens,
        "step_ms": step_ms,
        "spread_ms": [min(blocking_ms[1 + job.warmup :]), max(blocking_ms[1 + job.warmup :])],
        "async_ms": async_ms,
        "first_step_s": blocking_ms[0] / 1e3,
        "tokens_per_s": step_tokens / step_ms * 1e3,
        "model_tflops": shape.flops(num_params, step_tokens) / step_ms / 1e9,
        "peak_gib": None if peak is None else peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if job.profile:

        def run():
            nonlocal state
            for _ in range(PROFILED_STEPS):
                state, _metrics = step(state, tokens)
            jax.block_until_ready(state)

        try:
            profile = kernel_profile.trace(run, PROFILED_STEPS, hlo_text)
        except (
            ValueError
        ) as error:  # the times above are good; the table says what is missing, and so does the exit status
            result["profile_failed"] = str(error)
        else:
            result["profile"] = profile.to_json()
            result["profile_markdown"] = profile.markdown()
    return result


# --- in the parent --------------------------------------------------------------------------------------------------


def markdown(shape_name: str, shape: Shape, microbatches: int, results: list[dict]) -> str:
    """The section of one shape: its table, and the profiles if there are any."""
    measured = {r["variant"]: r["step_ms"] for r in results if "failed" not in r}
    baseline = measured.get("bf16", measured.get("ours_bf16_small"))
    rows = []
    for r in results:
        if "failed" in r:
            rows.append([str(Variant.parse(r["variant"])), f"failed: {r['failed']}", *["-"] * 8])
            continue
        rows.append(
            [
                str(Variant.parse(r["variant"])),
                f"{r['step_ms']:.1f}",
                baseline / r["step_ms"] if baseline else "-",
                r["async_ms"],
                round(r["tokens_per_s"]),
                r["model_tflops"],
                "-" if r["peak_gib"] is None else r["peak_gib"],
                r["first_step_s"],
                f"{r['spread_ms'][0]:.1f} to {r['spread_ms'][1]:.1f}",
                f"{r['first_loss']:.4f} to {r['last_loss']:.4f}",
            ]
        )
    headings = ["variant", "ms a step", "times bf16", "ms, not waiting", "tokens/s", "model TFLOP/s", "peak GiB"]
    headings += ["first step s", "min to max ms", "loss, first to last"]
    sizes = (
        f"{shape.num_layers} layers, {shape.hidden_size} wide, {shape.num_heads} heads, vocabulary {shape.vocab_size:,}"
    )
    if shape.num_experts:
        sizes += f", {shape.experts_per_token} of {shape.num_experts} experts of {shape.mlp_hidden_size:,}"
    batch = f"{microbatches} x {shape.batch_size} x {shape.seq_len} tokens a step (microbatches x sequences x length)"
    parts = [f"## {shape_name}: {sizes}; {batch}", tables.table(headings, rows)]
    parts += [f"No profile of {r['variant']}: {r['profile_failed']}." for r in results if "profile_failed" in r]
    profiles = {r["variant"]: r["profile"] for r in results if "profile" in r}
    if profiles:
        parts += ["### Kernel time by category", kernel_profile.merged(profiles)]
    parts += [
        f"### Profile: {Variant.parse(r['variant'])}\n\n{r['profile_markdown']}" for r in results if "profile" in r
    ]
    return "\n\n".join(parts)


def check_same_work(results: list[dict]) -> None:
    """Raise if variants have different numbers of parameters: their times could not be compared."""
    counts = {r["variant"]: r["num_params"] for r in results if "failed" not in r}
    if len(set(counts.values())) > 1:
        raise ValueError(f"all variants must have the same number of parameters, but got {counts}; compare like models")


def write_results(path: pathlib.Path, jobs: list[tuple[str, Job]], results: list[dict]) -> None:
    """`path` with `.md` and `.json` behind it, after each variant, so that an interrupted run keeps what it has."""
    measured = [r for r in results if "failed" not in r]
    sections = ["# One training step of a GPT"]
    if measured:
        sections.append(tables.environment_line(measured[0]["environment"]))
    sections.append(
        "One fresh process a variant, all in one run; random tokens, float32 parameters "
        "(bfloat16 with remainders are those in two halves) and AdamW, no remat but where a variant says so. "
        f"`ms a step` is the median of {jobs[0][1].steps} steps after {jobs[0][1].warmup} of warmup "
        "with a wait after each; `ms, not waiting` dispatches as many and waits once. `first step` holds compilation "
        "and the FP8 warm start."
    )
    for name in dict.fromkeys(name for name, _ in jobs):
        of_shape = [(job, r) for (job_name, job), r in zip(jobs, results, strict=False) if job_name == name]
        if of_shape:
            job = of_shape[0][0]
            check_same_work([r for _, r in of_shape])
            sections.append(markdown(name, job.shape, job.microbatches, [r for _, r in of_shape]))
    tables.write(path.with_name(f"{path.name}.md"), "\n\n".join(sections))
    rows = [
        {**{k: v for k, v in r.items() if k != "profile_markdown"}, "shape": name, "job": dataclasses.asdict(job)}
        for (name, job), r in zip(jobs, results, strict=False)
    ]
    profiles = {f"{row['shape']} {row['variant']}": row.pop("profile") for row in rows if "profile" in row}
    tables.write(path.with_name(f"{path.name}.json"), json.dumps(rows, indent=1))
    if profiles:
        tables.write(path.with_name(f"{path.name}_kernels.json"), json.dumps(profiles))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"{', '.join((*PLAIN, *RECIPES))}; the latter with any of {', '.join(OPTIONS)}, as in delayed_fast_head"
    parser.add_argument(
        "--variants", nargs="+", type=variant_name, metavar="VARIANT", default=COMMON_VARIANTS, help=names
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.3b", "4096"])
    parser.add_argument("--layers", type=int, help="override the number of layers of every shape")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, each with the shape's batch size")
    parser.add_argument("--steps", type=int, default=16, help="timed steps, at least 1")
    parser.add_argument("--warmup", type=int, default=WARMUP_STEPS, help="untimed steps, besides the first one")
    parser.add_argument(
        "--profile",
        nargs="*",
        type=variant_name,
        metavar="VARIANT",
        help="add a profile by kernel of these variants, or of all (GPU only)",
    )
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--name", default="gpt_step", help="of the files in --output, without extension")
    parser.add_argument("--self-test", action="store_true", help="tiny shapes and few steps, to run the whole file")
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="compile the steps of jax_fp8 first, at the same time, which shortens a run of many variants",
    )
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.warmup < 0:
        parser.error("--warmup must be at least 0")
    if options.steps < 1 or options.microbatches < 1 or (options.layers is not None and options.layers < 1):
        parser.error("--steps, --microbatches and --layers must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.job:
        fields = json.loads(options.job)
        job = Job(**{**fields, "shape": Shape(**fields["shape"])})
        if options.compile_only:
            with gemms_of(job.variant):
                compile_ahead(job.variant, job.shape, job.microbatches)
            return 0
        options.result.write_text(json.dumps(measure(job)))
        return 0
    shapes = ["tiny", "tiny_llama", "tiny_moe"] if options.self_test else options.shapes
    steps = 2 if options.self_test else options.steps
    profiled = () if options.profile is None else options.profile or options.variants
    override = {} if options.layers is None else {"num_layers": options.layers}
    jobs = [
        (
            name,
            Job(
                variant=variant,
                shape=dataclasses.replace(SHAPES[name], **override),
                microbatches=options.microbatches,
                steps=steps,
                profile=variant in profiled,
                warmup=options.warmup,
            ),
        )
        for name in shapes
        for variant in options.variants
    ]
    results = []
    with tempfile.TemporaryDirectory() as cache:
        # Not plain Flax, for which XLA times products, and wants the GPU alone; and no profile reads what was kept.
        ahead = [job for _, job in jobs if Variant.parse(job.variant).trainer in RECIPES and not job.profile]
        environment = compile_side_by_side(HERE, ahead, cache) if options.compile_ahead else {}
        for name, job in jobs:
            found, _ = measure_in_fresh_process(HERE, job, **environment)
            found = {"variant": job.variant, **found}
            summary = found.get("failed") or f"{found['step_ms']:.1f} ms a step, {found['tokens_per_s']:,.0f} tokens/s"
            print(f"{name} {job.variant}: {summary}", flush=True)
            results.append(found)
            write_results(options.output / options.name, jobs, results)
    print((options.output / f"{options.name}.md").read_text())
    print(f"written to {options.output}/{options.name}.md and {options.name}.json")
    return 1 if any("failed" in r or "profile_failed" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
