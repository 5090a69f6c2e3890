"""Compare two versions of jax_fp8 that train the same model on the same tokens: are all losses, params and FP8 states
the same bits, and does a step take the same time and memory, with as much of it in CUDA graphs?

    python -m pip install --no-deps --target before OLD.whl; python -m pip install --no-deps --target after NEW.whl
    PYTHONPATH=after python benchmarks/same_bits.py before after     # four models, 50 steps: about 12 minutes, one H100
    python benchmarks/same_bits.py before after --models 124m --attention cudnn   # fast, and not the same bits
    python benchmarks/same_bits.py . . --models tiny --steps 4       # in a checkout, on any machine

Each version runs twice, in processes of their own and in this order: before, before, after, after. The second run of
`before` is the control: if its bits differ from the first run's, the comparison with `after` has no verdict.

Three things make two runs of one version differ on a GPU, and are held fixed here:

- XLA sums the gradients of an embedding's rows in any order. So no token occurs twice in a batch.
- The backward of cuDNN's attention sums the gradients of queries in any order. So attention is XLA's.
- XLA times its own products, and may choose another one the next time. So the first run stores its choices.

So timings are of XLA's attention; `--attention cudnn` measures a step as users have it.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from fresh import measure_in_fresh_process
from tables import environment, environment_line, table

import jax_fp8 as fp8

HERE = pathlib.Path(__file__).resolve()
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "use_bias": False, "num_kv_heads": 4}
WIDE = {"vocab_size": 50_304, "num_heads": 16, "hidden_size": 2048, "max_seq_len": 2048}
EXPERTS = {"num_experts": 8, "experts_per_token": 2}
MODELS = {  # a config, sequences, tokens of each
    "124m": (fp8.GPTConfig.preset("gpt2-124m"), 16, 1024),
    "1.3b": (fp8.GPTConfig.preset("gpt3-1.3b"), 2, 2048),
    "llama": (fp8.GPTConfig(num_layers=8, mlp_hidden_size=5632, **WIDE, **LLAMA), 2, 2048),
    "moe": (fp8.GPTConfig(num_layers=4, mlp_hidden_size=2048, **WIDE, **LLAMA, **EXPERTS), 2, 2048),
    "tiny": (fp8.GPTConfig(num_layers=2, num_heads=2, hidden_size=64, vocab_size=512, max_seq_len=32), 2, 32),
}
RUNS = "before", "before", "after", "after"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one version.

    Args:
      model: one of MODELS.
      attention: "xla" or "cudnn".
      planted: change one weight by its last bit, as a control of the comparison.
      is_first: whether it is the first run of its version, which also makes the capture report by compiling again.
    """

    model: str
    steps: int
    attention: str
    planted: bool = False
    is_first: bool = True


def tokens_of(job: Job, step: int) -> jax.Array:
    """Tokens (batch, seq + 1): sequences that count up from different starts, so that no token occurs twice."""
    config, batch, seq = MODELS[job.model]
    starts = np.arange(batch)[:, None] * (config.vocab_size // batch) + 97 * step
    return jnp.asarray((starts + np.arange(seq + 1)) % config.vocab_size, jnp.int32)


def measure(job: Job) -> dict:
    """Train in this process, with the jax_fp8 that Python finds."""
    if job.attention == "xla":
        attend = jax.nn.dot_product_attention
        jax.nn.dot_product_attention = lambda *args, **options: attend(*args, **options | {"implementation": "xla"})
    recipe = fp8.DelayedScaling()
    model = fp8.GPT(MODELS[job.model][0], recipe=recipe)
    step = fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(6e-4, weight_decay=0.1), recipe)
    batch = tokens_of(job, 0)
    state = step.init_state(model.init, jax.random.key(0), batch[:, :-1])
    if job.planted:
        leaves, structure = jax.tree.flatten(state.params)
        largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
        first = leaves[largest].reshape(-1)[0]
        leaves[largest] = leaves[largest].at[(0,) * leaves[largest].ndim].set(jnp.nextafter(first, 2 * first + 1))
        state = state.replace(params=structure.unflatten(leaves))
    is_captured = job.is_first and jax.default_backend() == "gpu"
    report = str(fp8.capture_report(step.lower(state, batch))) if is_captured else ""
    losses, seconds = [], []
    for i in range(job.steps):
        started = time.perf_counter()
        state, metrics = step(state, tokens_of(job, i))
        losses.append(float(metrics["loss"]).hex())
        seconds.append(time.perf_counter() - started)
    return {
        "losses": losses,
        "state": _digest((state.params, state.fp8)),
        "milliseconds": 1e3 * statistics.median(seconds),
        "bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0),
        "capture": report,
        "environment": environment(),
    }


def _digest(tree) -> str:
    """A hash of the bits of all arrays, in order."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def compare(job: Job, versions: dict[str, pathlib.Path], report: Callable[[dict], None]) -> list[dict]:
    """Run both versions twice. Each result has the number of steps for which its losses are those of the first run."""
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = pathlib.Path(folder, "chosen.textproto")
        for name in RUNS:
            flag = "load_autotune_results_from" if chosen.exists() else "dump_autotune_results_to"
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_{flag}={chosen}".strip()
            own = {"PYTHONPATH": str(versions[name]), "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            is_first = name not in [run["version"] for run in found]
            this = dataclasses.replace(job, planted=job.planted and name == "after", is_first=is_first)
            result, _ = measure_in_fresh_process(HERE, this, **own)
            found.append({"model": job.model, "version": name, **result, **_against(found, result)})
            report(found[-1])
    return found


def _against(found: list[dict], result: dict) -> dict:
    if "failed" in result:
        return {}
    first = found[0] if found else result
    if "failed" in first:
        return {"equal_steps": 0, "same_state": False}
    pairs = list(zip(first["losses"], result["losses"], strict=True))
    equal = next((step for step, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {"equal_steps": equal, "same_state": first["state"] == result["state"]}


def failures(found: list[dict], steps: int) -> list[str]:
    """Sentences about all differences. If the control of `before` differs, nothing is said about `after`."""
    broken = [f"{run['model']}: {run['version']} failed: {run['failed']}" for run in found if "failed" in run]
    runs = [run for run in found if "failed" not in run]
    for model in dict.fromkeys(run["model"] for run in runs):
        first, *others = [run for run in runs if run["model"] == model]
        differ = [run for run in others if run["equal_steps"] < steps or not run["same_state"]]
        if any(run["version"] == first["version"] for run in differ):
            broken.append(f"{model}: two runs of one version differ, so nothing is said of the other")
        elif differ:
            broken.append(f"{model}: the versions differ after {min(run['equal_steps'] for run in differ)} steps")
        if len({run["capture"] for run in runs if run["model"] == model and run["capture"]}) > 1:
            broken.append(f"{model}: the capture reports differ")
    return broken


def rows_of(found: list[dict]) -> list[list]:
    return [
        [run["model"], run["version"], "failed", "-", "-", "-", "-"]
        if "failed" in run
        else [
            run["model"],
            run["version"],
            run["equal_steps"],
            "same" if run["same_state"] else "other",
            run["milliseconds"],
            run["bytes"] / 2**30,
            hashlib.sha256(run["capture"].encode()).hexdigest()[:8] if run["capture"] else "",
        ]
        for run in found
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=pathlib.Path, help="the folder that has the package jax_fp8")
    parser.add_argument("after", nargs="?", type=pathlib.Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["124m", "1.3b", "llama", "moe"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--attention", choices=["xla", "cudnn"], default="xla")
    parser.add_argument("--planted", action="store_true", help="a control: change one bit of a weight of `after`")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results/same_bits.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        options.result.write_text(json.dumps(measure(Job(**json.loads(options.job)))))
        return
    if options.before is None or options.after is None:
        parser.error("give two folders, before and after, in each of which the package jax_fp8 lies")
    versions = {"before": options.before.resolve(), "after": options.after.resolve()}

    def report(run):
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in rows_of([run])[0]), flush=True)

    found: list[dict] = []
    for model in options.models:
        found += compare(Job(model, options.steps, options.attention, options.planted), versions, report)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    measured = next((run["environment"] for run in found if "failed" not in run), environment())
    headings = ["model", "version", "steps with equal losses", "params and FP8 state", "ms", "GiB", "capture report"]
    print(f"\n{environment_line(measured)}\n\n{table(headings, rows_of(found))}\n")
    broken = failures(found, options.steps)
    print("\n".join(broken) or "the same bits")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
