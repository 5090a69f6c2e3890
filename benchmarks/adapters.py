"""Do adapters on kernels frozen in FP8 learn like adapters on kernels in bfloat16?

    python benchmarks/adapters.py                  # a 25M-parameter GPT, three seeds: about 4 minutes on an H200
    python benchmarks/adapters.py --self-test      # a tiny GPT and few steps, on any machine; it proves nothing

A GPT on bytes is trained in bfloat16 on one text, the sources of Python's standard library. Then adapters of rank 16
are trained on another text, the pages of this repository (`--data` names another one), from the same params:

    lora_bf16   on the kernels as they are, without FP8
    lora_fp8    on kernels frozen in FP8, with DelayedScaling
    full_bf16   no adapters: all params are trained, in bfloat16, at a tenth of the learning rate
    untuned     the control: adapters that are not trained

Each seed draws other adapters and another order of batches. The loss is that of a held-out tenth of the second text.
PASS means: for each seed, the last loss of lora_fp8 is within 1 % of that of lora_bf16, and that of untuned is more
than 5 % worse, which shows that the check can fail. The exit status is 0 for PASS, else 1.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import tables

import jax_fp8 as fp8
from jax_fp8.run import text

HERE = pathlib.Path(__file__).resolve()
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

CASES = ("lora_bf16", "lora_fp8", "full_bf16", "untuned")
COLORS = {"lora_bf16": "tab:blue", "lora_fp8": "tab:orange", "full_bf16": "tab:green", "untuned": "tab:gray"}
TOLERANCE, WORSE = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One experiment."""

    layers: int = 8
    width: int = 512
    seq_len: int = 512
    batch: int = 32
    pretrain_steps: int = 1500
    tune_steps: int = 300
    evaluate_every: int = 50
    rank: int = 16
    seeds: int = 3

    def config(self) -> fp8.GPTConfig:
        return fp8.GPTConfig.preset(
            "tiny-llama", num_layers=self.layers, num_heads=max(1, self.width // 64), num_kv_heads=None,
            hidden_size=self.width, mlp_hidden_size=3 * self.width, max_seq_len=self.seq_len,
        )  # fmt: skip


def windows(data: np.ndarray, count: int, seq_len: int, seed: int) -> np.ndarray:
    """(count, seq + 1) bytes, each from a random place."""
    starts = np.random.default_rng(seed).integers(0, len(data) - seq_len - 1, count)
    return data[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def read(files: list[pathlib.Path]) -> np.ndarray:
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def evaluate(loss, variables, batches: list[np.ndarray]) -> float:
    return statistics.fmean(float(loss(variables, batch)) for batch in batches)


def pretrain(sizes: Sizes, data: np.ndarray) -> dict:
    """Params in bfloat16, on the host."""
    model = fp8.GPT(sizes.config(), recipe=None)
    tx = fp8.fused_adamw(1e-3, weight_decay=0.1, max_grad_norm=1.0)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, None)
    state = step.init_state(model.init, jax.random.key(0), np.zeros((1, sizes.seq_len), np.int32))
    for number in range(sizes.pretrain_steps):
        state, metrics = step(state, windows(data, sizes.batch, sizes.seq_len, number))
        if number % 100 == 0 or number == sizes.pretrain_steps - 1:
            print(f"pretraining, step {number}: {float(metrics['loss']):.4f}", flush=True)
    return jax.tree.map(lambda param: np.asarray(param.astype(jnp.bfloat16)), state.params)


def tune(case: str, seed: int, sizes: Sizes, params: dict, data: np.ndarray, held_out: list[np.ndarray]) -> list:
    """The held-out loss before training, and after every `evaluate_every` steps: [[step, loss], ...]."""
    is_full = case == "full_bf16"
    recipe = fp8.DelayedScaling() if case == "lora_fp8" else None
    lora = None if is_full else fp8.Lora(rank=sizes.rank, alpha=2 * sizes.rank)
    model = fp8.GPT(sizes.config(), recipe=recipe, lora=lora, param_dtype=jnp.bfloat16)
    rate = {"full_bf16": 1e-4, "untuned": 0.0}.get(case, 1e-3)
    adam = fp8.fused_adamw(rate, max_grad_norm=1.0)
    tx = adam if is_full else fp8.freeze(adam, trained="lora_")
    loss = fp8.next_token_loss(model)
    step, evaluation = fp8.make_train_step(loss, tx, recipe), jax.jit(loss)

    def init(key: jax.Array, tokens: jax.Array) -> dict:
        return fp8.freeze_kernels(model.init(key, tokens), recipe, params)

    state = step.init_state(init, jax.random.key(1000 + seed), np.zeros((1, sizes.seq_len), np.int32))
    first = windows(data, sizes.batch, sizes.seq_len, 10**6 * seed)
    state = step.warm_start(state, first) if recipe is not None else state
    curve = [[0, evaluate(evaluation, state.variables, held_out)]]
    for number in range(sizes.tune_steps):
        state, _ = step(state, windows(data, sizes.batch, sizes.seq_len, 10**6 * seed + number))
        if (number + 1) % sizes.evaluate_every == 0:
            curve.append([number + 1, evaluate(evaluation, state.variables, held_out)])
    print(f"{case}, seed {seed}: {curve[0][1]:.4f} to {curve[-1][1]:.4f}", flush=True)
    return curve


def verdict(curves: dict[str, list]) -> tuple[bool, list[str]]:
    """Whether all seeds pass, and what was found."""
    last = {case: [curve[-1][1] for curve in of_seeds] for case, of_seeds in curves.items()}
    sentences, passed = [], True
    for seed, (bf16, in_fp8, control) in enumerate(
        zip(last["lora_bf16"], last["lora_fp8"], last["untuned"], strict=True)
    ):
        near, caught = abs(in_fp8 / bf16 - 1) <= TOLERANCE, control / bf16 - 1 > WORSE
        passed = passed and near and caught
        sentences.append(
            f"seed {seed}: FP8 ends {100 * (in_fp8 / bf16 - 1):+.2f} % from bfloat16, the control "
            f"{100 * (control / bf16 - 1):+.1f} %"
        )
    return passed, sentences


def markdown(sizes: Sizes, curves: dict[str, list], passed: bool, sentences: list[str], words: str) -> str:
    steps = [step for step, _ in curves["lora_bf16"][0]]
    rows = []
    for case, of_seeds in curves.items():
        means = [statistics.fmean(curve[i][1] for curve in of_seeds) for i in range(len(steps))]
        spread = [curve[-1][1] for curve in of_seeds]
        rows.append([case, *(f"{mean:.4f}" for mean in means), f"{min(spread):.4f} to {max(spread):.4f}"])
    config = sizes.config()
    return "\n\n".join(
        [
            "# Adapters on a base in FP8 and in bfloat16",
            tables.environment_line(tables.environment()),
            f"{config.num_layers} layers, {config.hidden_size} wide, on bytes; {words}. {sizes.batch} x "
            f"{sizes.seq_len} tokens a step, rank {sizes.rank}, {sizes.seeds} seeds. Held-out loss in nats, means over "
            "the seeds, by step:",
            tables.table(["case", *map(str, steps), "last, lowest to highest"], rows),
            f"{'PASS' if passed else 'FAIL'}. " + "; ".join(sentences) + ".",
        ]
    )


def draw(path: pathlib.Path, curves: dict[str, list]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for case, of_seeds in curves.items():
        for number, curve in enumerate(of_seeds):
            axes.plot(*zip(*curve, strict=True), color=COLORS[case], label=case if number == 0 else None, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="the second text, a file or a folder")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--self-test", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sizes = Sizes(seeds=options.seeds)
    if options.self_test:
        sizes = Sizes(2, 64, 32, 4, 6, 4, 2, 4, 1)
    root = HERE.parent.parent
    pages = text.user_files(options.data) if options.data else sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])
    first, second = read(text.standard_library()), read(pages)
    cut = len(second) * 9 // 10
    held_out = [windows(second[cut:], sizes.batch, sizes.seq_len, 77 + i) for i in range(4)]
    words = f"{len(first):,} bytes of Python sources, then {cut:,} bytes of pages"
    params = pretrain(sizes, first)
    curves = {
        case: [tune(case, seed, sizes, params, second[:cut], held_out) for seed in range(sizes.seeds)] for case in CASES
    }
    passed, sentences = verdict(curves)
    page = markdown(sizes, curves, passed, sentences, words)
    tables.write(options.output / "adapters.md", page)
    tables.write(options.output / "adapters.json", json.dumps({"sizes": dataclasses.asdict(sizes), "curves": curves}))
    draw(options.output / "adapters.png", curves)
    print(page)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
