"""Fine-tuning with adapters (LoRA) on one GPU: kernels in bfloat16, kernels frozen in FP8, and full fine-tuning.

    python benchmarks/finetune.py                                   # Llama 3 8B, one sequence of 4,096 tokens
    python benchmarks/finetune.py --shape qwen3-14b --remat none full     # each case with each remat
    python benchmarks/finetune.py --mesh tensor=2                   # over two GPUs
    python benchmarks/finetune.py --self-test                       # a tiny model on any machine; no figures

Each case runs in a process of its own, with random weights in bfloat16 and random tokens. It times `--steps` steps with
a wait after each, and takes the median. The peak of the memory is that of the steps, without the initialization.
Adapters of `--rank` are on all linear layers; embeddings, head and norms are frozen.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import tables
from fresh import measure_in_fresh_process

import jax_fp8 as fp8
from jax_fp8.parallel.mesh import parse_axes

HERE = pathlib.Path(__file__).resolve()
# Name: recipe of the layers, recipe of the head, whether all params train.
CASES = {
    "lora_bf16": (None, None, False),
    "lora_fp8": (fp8.DelayedScaling(), None, False),
    "lora_fp8_head": (fp8.DelayedScaling(), fp8.CurrentScaling(), False),
    "full_bf16": (None, None, True),
    "full_fp8": (fp8.DelayedScaling(), None, True),
}


# Shapes that are no presets. Qwen3-14B as in the config.json of its weights.
SHAPES = {
    "qwen3-14b": dataclasses.replace(
        fp8.GPTConfig.preset("qwen3-8b"), num_layers=40, num_heads=40, hidden_size=5120, mlp_hidden_size=17_408
    )
}


@dataclasses.dataclass(frozen=True)
class Job:
    """All that a fresh process must know."""

    case: str
    shape: str
    batch: int
    seq_len: int
    rank: int
    remat: str
    steps: int
    warmup: int
    mesh: str = ""


def measure(job: Job) -> dict:
    """Run one case in this process."""
    recipe, head_recipe, trains_all = CASES[job.case]
    shape = SHAPES[job.shape] if job.shape in SHAPES else fp8.GPTConfig.preset(job.shape)
    config = dataclasses.replace(shape, max_seq_len=max(job.seq_len, 128))
    lora = None if trains_all else fp8.Lora(rank=job.rank, alpha=2 * job.rank)
    options = {"param_dtype": jnp.bfloat16, "remat": job.remat, "head_recipe": head_recipe, "lora": lora}
    model = fp8.GPT(config, recipe=recipe, **options)
    small = {"master_dtype": "remainder", "mu_dtype": jnp.bfloat16, "nu_dtype": jnp.bfloat16}
    adam = fp8.fused_adamw(1e-4, **small)
    tx = adam if trains_all else fp8.freeze(adam, trained="lora_")
    axes = parse_axes(job.mesh) if job.mesh else {}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes)) if axes else None
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, parallel=mesh)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (job.batch, job.seq_len + 1)).astype(np.int32)

    def init(key: jax.Array, tokens: jax.Array) -> dict:
        variables = model.init(key, tokens)
        return variables if trains_all else fp8.freeze_kernels(variables, recipe, apart=axes.get("tensor", 1) > 1)

    start = time.perf_counter()
    state = step.init_state(init, jax.random.key(0), tokens[:, :-1])
    jax.block_until_ready(state)
    init_s = time.perf_counter() - start
    trees = {"params": state.params, "opt_state": state.opt_state, "frozen": state.collections}
    sizes = {
        name: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        for name, tree in trees.items()
    }
    num_params = sum(
        int(np.prod(x.shape))
        for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])["params"])
    )

    losses, times = [], []
    for _ in range(1 + job.warmup + job.steps):
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1 + job.warmup :])
    memory = step.lower(state, tokens).compile().memory_analysis()
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "case": job.case,
        "remat": job.remat,
        "environment": tables.environment(),
        "num_params": num_params,
        "init_s": init_s,
        "step_ms": 1e3 * seconds,
        "spread_ms": [1e3 * min(times[1 + job.warmup :]), 1e3 * max(times[1 + job.warmup :])],
        "first_step_s": times[0],
        "tokens_per_s": job.batch * job.seq_len / seconds,
        "state_gib": {name: size / 2**30 for name, size in sizes.items()},
        "step_gib": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
        "peak_gib": None if peak is None else peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def markdown(jobs: list[Job], results: list[dict]) -> str:
    measured = {(r["case"], r["remat"]): r["step_ms"] for r in results if "failed" not in r}
    rows = []
    for r in results:
        if "failed" in r:
            rows.append([r["case"], r["remat"], f"failed: {r['failed']}", *["-"] * 7])
            continue
        gib, baseline = r["state_gib"], measured.get(("lora_bf16", r["remat"]))
        rows.append(
            [
                r["case"],
                r["remat"],
                f"{r['step_ms']:.1f}",
                baseline / r["step_ms"] if baseline else "-",
                round(r["tokens_per_s"]),
                f"{gib['params']:.2f} + {gib['frozen']:.2f} + {gib['opt_state']:.2f}",
                r["step_gib"],
                "-" if r["peak_gib"] is None else r["peak_gib"],
                f"{r['spread_ms'][0]:.1f} to {r['spread_ms'][1]:.1f}",
                f"{r['first_loss']:.4f} to {r['last_loss']:.4f}",
            ]
        )
    headings = ["case", "remat", "ms a step", "times bf16 adapters", "tokens/s", "GiB: params + frozen + optimizer"]
    headings += ["GiB of a step", "peak GiB of the process", "min to max ms", "loss, first to last"]
    job = jobs[0]
    parts = [f"# Fine-tuning on {f'a mesh of {job.mesh}; sizes are those of one GPU' if job.mesh else 'one GPU'}"]
    parts += [tables.environment_line(r["environment"]) for r in results if "failed" not in r][:1]
    parts.append(
        f"`{job.shape}` with random weights in bfloat16, {job.batch} x {job.seq_len} random tokens, adapters of rank "
        f"{job.rank} on all linear layers; one fresh process a case, all in one run. `ms a step` is "
        f"the median of {job.steps} steps with a wait after each. `GiB of a step` is what its program needs, arguments "
        "included, as the compiler says."
    )
    return "\n\n".join([*parts, tables.table(headings, rows)])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["lora_bf16", "lora_fp8", "lora_fp8_head"])
    parser.add_argument("--shape", default="llama3-8b", help=f"a preset, or {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", nargs="+", default=["full"])
    parser.add_argument("--mesh", default="", help="such as tensor=2; by default one GPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--name", default="finetune", help="of the files in --output, without extension")
    parser.add_argument("--self-test", action="store_true", help="a tiny model and few steps, to run the whole file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.job:
        options.result.write_text(json.dumps(measure(Job(**json.loads(options.job)))))
        return 0
    sizes = (options.shape, options.batch, options.seq_len, options.rank)
    sizes, times = (("tiny-llama", 2, 64, 4), (2, 1)) if options.self_test else (sizes, (options.steps, options.warmup))
    jobs = [Job(case, *sizes, remat, *times, options.mesh) for remat in options.remat for case in options.cases]
    results = []
    for job in jobs:
        found, _ = measure_in_fresh_process(HERE, job)
        results.append({"case": job.case, "remat": job.remat, **found})
        print(job.case, job.remat, found.get("failed") or f"{found['step_ms']:.1f} ms a step", flush=True)
        tables.write(options.output / f"{options.name}.md", markdown(jobs, results))
        tables.write(options.output / f"{options.name}.json", json.dumps(results, indent=1))
    print((options.output / f"{options.name}.md").read_text())
    return 1 if any("failed" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
