"""Costs of a run beside its steps: diagnostics, a limit of the loss, and checkpoints.

    python benchmarks/run_costs.py                        # GPT-3 1.3B, batches of 8 x 2,048 tokens
    python benchmarks/run_costs.py --no-checkpoints       # without Orbax, or without 50 GB of free disk
    python benchmarks/run_costs.py --self-test            # a tiny model anywhere; its times mean nothing

Variants of a step take turns, a few steps at a time, so that a GPU that slows down slows all of them. No variant may
change what is computed: after one step, checksums of params, optimizer state and FP8 state must agree; as a control,
those after one more step must differ. Checkpoints are saved as in a run (jax_fp8/run/checkpoints.py); steps continue
while one is written.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import tables

import jax_fp8 as fp8
from jax_fp8.train.cuda_graph import default_options

HERE = pathlib.Path(__file__).resolve()
ROUNDS, EVERY = 5, 10  # turns of each variant, and the steps of one
LONGEST_WRITE = 400  # steps that are timed while a checkpoint is written, at most


class Training:
    """A model, its step, and endless batches."""

    def __init__(self, preset: str, batch: int, seq: int, layers: int | None = None, ordered: bool = False):
        own = {} if layers is None else {"num_layers": layers}
        config = fp8.GPTConfig.preset(preset, max_seq_len=seq, **own)
        recipe = fp8.DelayedScaling(split_accumulator=())
        how = {"attention_implementation": "xla"} if ordered else {}
        self.model = fp8.GPT(config, recipe=recipe, head_recipe=fp8.CurrentScaling(), **how)
        loss, optimizer = fp8.next_token_loss(self.model), fp8.fused_adamw(1e-4)
        on_gpu = jax.default_backend() == "gpu"
        fixed = default_options(on_mesh=False) | {"xla_gpu_autotune_level": 0} if ordered and on_gpu else None
        self.step = fp8.make_train_step(loss, optimizer, recipe, compiler_options=fixed)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, batch, seq + 1), np.int32)
        self.batches = [jnp.asarray(one) for one in tokens]
        self.state = self.fresh()

    def fresh(self) -> fp8.TrainState:
        return self.step.init_state(self.model.init, jax.random.key(0), self.batches[0][:, :-1])

    def run(self, steps: int, options) -> float:
        """Seconds of each step, for steps that are dispatched without waiting; `options(number)` are the options of a
        step.
        """
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for number in range(steps):
            self.state, metrics = self.step(self.state, self.batches[number % 4], **options(number))
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - start) / steps


VARIANTS = {
    "plain": lambda number: {},
    f"diagnosed every {EVERY} steps": lambda number: {"diagnose": number % EVERY == 0},
    "diagnosed every step": lambda number: {"diagnose": True},
    "with a limit of the loss": lambda number: {"skip_above": math.inf},
}


def bits(state: fp8.TrainState) -> dict[str, int]:
    """The sum of the bits of every array, without the step count and the embedding's table, whose gradient a GPU sums
    in any order.
    """
    from jax_fp8.run.checkpoints import describe  # needs Orbax

    described = describe([state.params, state.opt_state, state.fp8])
    return {path: row[2] for path, row in described.items() if "embedding" not in path}


def compare(training: Training) -> dict[str, bool]:
    """Whether the variants leave the same bits after a step, and the control does not."""

    def after_one(options):
        training.state = training.fresh()
        training.run(1, options)
        return bits(training.state)

    plain = after_one(VARIANTS["plain"])
    found = {f"{name}: the same bits": after_one(options) == plain for name, options in VARIANTS.items()}
    before = bits(training.state)
    training.state, metrics = training.step(training.state, training.batches[3], skip_above=-1.0)
    found["a skipped step changes nothing"] = bits(training.state) == before and int(metrics["skipped"]) == 1
    training.state, _ = training.step(training.state, training.batches[3])
    return found | {"one more step changes bits": bits(training.state) != before}


def compared(options: argparse.Namespace) -> dict[str, bool]:
    """`compare` in a process of its own, for a model with few layers. It has XLA's attention, because cuDNN's sums
    gradients in any order, and its GEMMs are not chosen by timing. "plain" is also compared with itself, which shows
    whether anything else differs between runs.
    """
    sizes = [f"--{name}={getattr(options, name)}" for name in ("preset", "batch", "seq")]
    command = [sys.executable, str(HERE), "--compare", *sizes, f"--layers={options.compared_layers}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_steps(training: Training, rounds: int) -> list[dict]:
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for options in VARIANTS.values():
        training.run(3, options)  # compiled, and its CUDA graph recorded
    for _ in range(rounds):
        for name, options in VARIANTS.items():
            taken[name].append(1e3 * training.run(EVERY, options))
    plain = statistics.median(taken["plain"])
    return [
        {"variant": name, "step_ms": statistics.median(times), "cost": statistics.median(times) / plain - 1}
        for name, times in taken.items()
    ]


def measure_saving(training: Training, folder: pathlib.Path) -> dict:
    from jax_fp8.run.checkpoints import Checkpoints

    kept = Checkpoints(folder / "checkpoints", every=1, keep=1, resume=False)
    with kept:
        rows = []
        for number in (1, 2):  # the first one also makes what Orbax keeps
            plain = training.run(EVERY, VARIANTS["plain"])
            start = time.perf_counter()
            kept.save(number, training.state, {})
            blocked, steps = time.perf_counter() - start, []
            while kept._manager.is_saving_in_progress() and len(steps) < LONGEST_WRITE:
                steps.append(training.run(1, VARIANTS["plain"]))
            kept._wait()
            whole = time.perf_counter() - start
            meanwhile = statistics.mean(steps) if steps else math.nan
            rows.append({"blocked_s": blocked, "written_after_s": whole, "steps_meanwhile": len(steps)})
            rows[-1] |= {"plain_ms": 1e3 * plain, "meanwhile_ms": 1e3 * meanwhile}
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"gib": size / 2**30, "saves": rows}


def markdown(environment: dict, shape: str, found: dict) -> str:
    steps = [[row["variant"], row["step_ms"], f"{100 * row['cost']:+.2f} %"] for row in found["steps"]]
    parts = ["# What a run costs beside its steps", tables.environment_line(environment), shape]
    parts.append(tables.table(["step", "ms", "beside plain"], steps))
    parts += ["\n".join(f"- {name}: {'yes' if holds else 'NO'}" for name, holds in found.get("bits", {}).items())]
    if "saving" in found:
        rows = [
            [number, row["blocked_s"], row["written_after_s"], row["plain_ms"], row["meanwhile_ms"]]
            for number, row in enumerate(found["saving"]["saves"], 1)
        ]
        headings = ["save", "training waits s", "written after s", "step before ms", "step meanwhile ms"]
        parts += [f"A checkpoint has {found['saving']['gib']:.2f} GiB.", tables.table(headings, rows)]
    return "\n\n".join(part for part in parts if part)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt3-1.3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--compared-layers", type=int, default=4, help="layers of the model whose bits are compared")
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-checkpoints", action="store_true", help="measure without Orbax: no saving, no checksums")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--self-test", action="store_true", help="a tiny model, to run the whole file")
    options = parser.parse_args(arguments)
    if options.self_test:
        options.preset, options.batch, options.seq, options.rounds, options.compared_layers = "tiny", 2, 32, 1, 1
    shape = options.preset, options.batch, options.seq
    if options.compare:
        print(json.dumps(compare(Training(*shape, options.layers, ordered=True))))
        return 0
    found_bits = {} if options.no_checkpoints else compared(options)
    print(json.dumps(found_bits), flush=True)
    training = Training(*shape)
    found = {"steps": measure_steps(training, options.rounds)}
    print(json.dumps(found), flush=True)  # what follows needs more than a GPU
    if not options.no_checkpoints:
        found["bits"] = found_bits
        with tempfile.TemporaryDirectory() as folder:
            found["saving"] = measure_saving(training, pathlib.Path(folder))
    environment = tables.environment()
    shape = (
        f"{options.preset}, batches of {options.batch} x {options.seq} tokens; bits: {options.compared_layers} layers"
    )
    tables.write(options.output / "run_costs.md", markdown(environment, shape, found))
    tables.write(options.output / "run_costs.json", json.dumps({"environment": environment, "shape": shape, **found}))
    print((options.output / "run_costs.md").read_text())
    return 0 if all(found.get("bits", {}).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
