"""Does FP8 learn like bfloat16? The same GPT on the same text in each recipe, and a control that must fail.

    python benchmarks/convergence.py                  # a 124M-class GPT, ten runs: some 10 minutes on one H200
    python benchmarks/convergence.py --runs bf16 fast # some of the runs
    python benchmarks/convergence.py --data FILE_OR_DIR
    python benchmarks/convergence.py --self-test      # a tiny GPT on any machine, in two minutes

The text is Python source: the standard library and the installed packages of the running interpreter (or `--data`),
without duplicates, tokenized by byte-level BPE that is trained on it. All runs start from the same parameters, read the
same batches in the same order, and use the same optimizer:

    bf16      recipe=None, the baseline
    delayed   DelayedScaling
    current   CurrentScaling
    block     BlockScaling
    fast      DelayedScaling with fast accumulation in all GEMMs
    fp8_head  DelayedScaling, and the head in FP8 by CurrentScaling
    fastest   fast accumulation in the layers' GEMMs, and that head
    bf16_params  the same, and params in bfloat16; the optimizer keeps the other 16 bits of their float32 masters
    attention DelayedScaling, and attention in FP8, where heads have 128 features: --runs bf16 attention --num-heads 6
    frozen    the control: DelayedScaling whose scales are overwritten with one wrong constant after every step
    reseeded  recipe=None from other initial parameters: how much two runs of one recipe differ; not judged

PASS means: after the last step, the validation losses of the FP8 runs are within 1 % of bf16's, and that of frozen is
more than 1 % worse, which shows that the check can fail. Without frozen, or without an FP8 run, the verdict is
INCOMPLETE. The control stops after `--control-steps` and is compared with bf16 at that step. The exit status is 0 for
PASS, else 1.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tables
from text_data import Data, Reading, prepare

import jax_fp8 as fp8

HERE = pathlib.Path(__file__).resolve()
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

FAST = fp8.DelayedScaling(split_accumulator=())
MODELS = {
    "bf16": {"recipe": None},
    "delayed": {"recipe": fp8.DelayedScaling()},
    "current": {"recipe": fp8.CurrentScaling()},
    "block": {"recipe": fp8.BlockScaling()},
    "fast": {"recipe": FAST},
    "fp8_head": {"recipe": fp8.DelayedScaling(), "head_recipe": fp8.CurrentScaling()},
    "fastest": {"recipe": FAST, "head_recipe": fp8.CurrentScaling()},
    "bf16_params": {"recipe": FAST, "head_recipe": fp8.CurrentScaling(), "param_dtype": jnp.bfloat16},
    "attention": {"recipe": fp8.DelayedScaling(), "fp8_attention": True},
    "frozen": {"recipe": fp8.DelayedScaling()},
    "reseeded": {"recipe": None},
}
USUAL_RUNS = [name for name in MODELS if name != "attention"]
REQUIREMENTS = {"frozen": "more than 1 % worse", "reseeded": "none"}
TOLERANCE = 0.01
LOG_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Settings(Reading):
    """One experiment; its runs differ in the recipe alone."""

    preset: str = "gpt2-124m"
    num_layers: int = 0  # 0 keeps the preset's
    num_heads: int = 0  # likewise
    evaluate_every: int = 250
    control_steps: int = 500  # of the control, a multiple of evaluate_every
    learning_rate: float = 4e-4
    warmup_steps: int = 100
    frozen_scale: float = 64.0


SELF_TEST = Settings(
    preset="tiny",
    num_layers=1,
    vocab_size=512,
    seq_len=32,
    batch_size=8,
    steps=160,
    evaluate_every=80,
    control_steps=160,
    validation_tokens=2_048,
    learning_rate=1e-3,
    warmup_steps=10,
    max_bytes=3_000_000,
    tokenizer_bytes=200_000,
)


@dataclasses.dataclass
class Run:
    """The result of one run: its training loss at each step, and pairs (step, validation loss)."""

    name: str
    losses: np.ndarray
    validation: list[tuple[int, float]]
    seconds: float

    @property
    def final(self) -> float:
        return self.validation[-1][1]


@jax.jit(donate_argnums=0, static_argnames="scale")
def freeze(fp8_state, scale: float):
    """The collection with every scale overwritten, as the control does it after each step."""
    return jax.tree.map_with_path(
        lambda path, leaf: jnp.full_like(leaf, scale) if path[-1].key == "scale" else leaf, fp8_state
    )


class Program:
    """The compiled functions of one model; `frozen` shares those of `delayed`, `reseeded` those of `bf16`."""

    def __init__(self, recipes: dict, settings: Settings):
        vocab_size = -(-settings.vocab_size // 128) * 128
        sizes = {"vocab_size": vocab_size, "max_seq_len": settings.seq_len}
        sizes |= {name: getattr(settings, name) for name in ("num_layers", "num_heads") if getattr(settings, name)}
        config = fp8.GPTConfig.preset(settings.preset, **sizes)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.learning_rate, settings.warmup_steps, settings.steps
        )
        # Of bfloat16 params the 16 bits that they lack are kept; of float32 params nothing is.
        adam = fp8.fused_adamw(schedule, b2=0.95, weight_decay=0.1, master_dtype="remainder")
        self.tx = optax.chain(optax.clip_by_global_norm(1.0), adam)
        self.model = fp8.GPT(config, **recipes)
        loss = fp8.next_token_loss(self.model)
        self.step = fp8.make_train_step(loss, self.tx, recipes["recipe"])
        self.loss = jax.jit(loss)

    def initial_state(self, seed: int, tokens: jax.Array):
        in_float32 = self.model.clone(param_dtype=jnp.float32)  # the same random numbers for all
        variables = jax.jit(in_float32.init)(jax.random.key(seed), tokens[:, :-1])
        params = jax.tree.map(lambda param: param.astype(self.model.param_dtype), variables["params"])
        variables = variables | {"params": params}
        return fp8.TrainState.create(variables=variables, tx=self.tx)

    def validate(self, state, batches: list[jax.Array]) -> float:
        return float(jnp.mean(jnp.stack([self.loss(state.variables, batch) for batch in batches])))


def train(name: str, program: Program, data: Data, settings: Settings) -> Run:
    """One run from the seed to the last step; losses stay on the device until validation asks for them."""
    state = program.initial_state(settings.seed + (name == "reseeded"), data.batch(0, settings.seq_len))
    losses, validation = [], []
    started = time.perf_counter()
    steps = min(settings.control_steps, settings.steps) if name == "frozen" else settings.steps
    for step in range(steps):
        state, metrics = program.step(state, data.batch(step, settings.seq_len))
        losses.append(metrics["loss"])
        if name == "frozen":
            state = dataclasses.replace(state, fp8=freeze(state.fp8, settings.frozen_scale))
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == steps:
            validation.append((step + 1, program.validate(state, data.validation)))
            print(
                f"{name:>8} step {step + 1:>5}: loss {losses[-1]:.4f}, validation {validation[-1][1]:.4f}", flush=True
            )
    return Run(name, np.asarray(jax.device_get(losses)), validation, time.perf_counter() - started)


def judge(runs: dict[str, Run]) -> tuple[str, list[dict]]:
    """The verdict, and for each run its loss, its difference from bf16, and whether that is as required."""
    reference = dict(runs["bf16"].validation)
    rows = []
    for name, run in runs.items():
        step, loss = run.validation[-1]
        difference = loss / reference[step] - 1
        if name == "frozen":
            as_required = not difference <= TOLERANCE  # worse, or not a number
        else:
            as_required = abs(difference) <= TOLERANCE or name == "reseeded"
        rows.append(
            {"run": name, "step": step, "validation_loss": loss, "difference": difference, "as_required": as_required}
        )
    if not all(row["as_required"] for row in rows):
        return "FAIL", rows
    in_fp8 = runs.keys() - {"bf16", "frozen", "reseeded"}
    return ("PASS" if in_fp8 and "frozen" in runs else "INCOMPLETE"), rows


def plot(runs: dict[str, Run], path: pathlib.Path, title: str) -> None:
    """Plot training loss (faint, mean of `LOG_EVERY` steps) and validation loss: whole, and the second half alone."""
    figure, (whole, half) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    middle = len(runs["bf16"].losses) // 2
    for name, run in runs.items():
        draw(whole, run, first=0)
        if name != "frozen":
            draw(half, run, first=middle)
    whole.set_title(title)
    half.set_title("second half, without the control")
    whole.legend(title="validation loss at the end")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(axes, run: Run, first: int) -> None:
    """Draw both curves of one run from step `first` on."""
    training = [point for point in zip(*smoothed(run.losses), strict=True) if point[0] >= first]
    validation = [point for point in run.validation if point[0] >= first]
    color = f"C{list(MODELS).index(run.name)}"  # of matplotlib's cycle
    axes.plot(*zip(*training, strict=True), color=color, alpha=0.4, linewidth=1)
    axes.plot(*zip(*validation, strict=True), "o-", color=color, markersize=4, label=f"{run.name}: {run.final:.4f}")
    axes.set(xlabel="step", ylabel="cross entropy, nats per token")
    axes.grid(alpha=0.3)


def smoothed(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over `LOG_EVERY` steps, and the last step of each mean."""
    count = len(losses) // LOG_EVERY
    means = losses[: count * LOG_EVERY].reshape(count, LOG_EVERY).mean(axis=1)
    return LOG_EVERY * np.arange(1, count + 1), means


def write_results(output: pathlib.Path, runs: dict[str, Run], settings: Settings, description: str) -> str:
    """`convergence.md`, `.json`, `.jsonl` (curves) and `.png`, from the runs so far; returns the verdict."""
    verdict, rows = judge(runs)
    found = tables.environment()
    title = f"{settings.preset}, {settings.steps:,} steps of {settings.batch_size} x {settings.seq_len} tokens"
    lines = [
        [
            row["run"],
            f"{row['step']:,}",
            f"{row['validation_loss']:.4f}",
            f"{100 * row['difference']:+.3f} %",
            REQUIREMENTS.get(row["run"], "within 1 %"),
            "yes" if row["as_required"] else "NO",
            f"{runs[row['run']].seconds:.0f} s",
        ]
        for row in rows
    ]
    headings = ["run", "steps", "validation loss", "difference to bf16", "requirement", "met"]
    headings += ["duration with compilation"]
    sections = [
        f"# FP8 learns like bfloat16: {verdict}",
        f"{title}. {tables.environment_line(found)}",
        f"Text: {description}.",
        tables.table(headings, lines),
        f"`frozen` is delayed scaling with every scale set to {settings.frozen_scale:g} after each step; "
        "`reseeded` is bf16 from other initial parameters, and shows how far runs of one recipe are apart.",
        "![loss curves](convergence.png)",
    ]
    tables.write(output / "convergence.md", "\n\n".join(sections))
    summary = {
        "verdict": verdict,
        "environment": found,
        "settings": dataclasses.asdict(settings),
        "text": description,
        "runs": rows,
    }
    tables.write(output / "convergence.json", json.dumps(summary, indent=1))
    curves = [
        {"run": r.name, "step": int(s), "loss": float(v)}
        for r in runs.values()
        for s, v in zip(*smoothed(r.losses), strict=True)
    ]
    curves += [{"run": r.name, "step": s, "validation_loss": v} for r in runs.values() for s, v in r.validation]
    tables.write(output / "convergence.jsonl", "\n".join(json.dumps(row) for row in curves))
    plot(runs, output / "convergence.png", title)
    return verdict


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--self-test", action="store_true", help="a tiny GPT and few steps, which replace the defaults below"
    )
    parser.add_argument(
        "--data", type=pathlib.Path, help="file or folder of text instead of the interpreter's Python sources"
    )
    parser.add_argument("--runs", nargs="+", choices=MODELS, default=USUAL_RUNS, help="bf16 must be among them")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument(
        "--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "jax_fp8", help="for tokenizers"
    )
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=field.type, default=None, help=f"default {field.default}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    given = {f.name: value for f in dataclasses.fields(Settings) if (value := getattr(options, f.name)) is not None}
    settings = dataclasses.replace(SELF_TEST if options.self_test else Settings(), **given)
    try:
        if "bf16" not in options.runs:
            raise ValueError(
                f"--runs must include bf16, which the others are compared with, got {' '.join(options.runs)}"
            )
        if settings.control_steps % settings.evaluate_every:
            raise ValueError(
                f"--control-steps must be a multiple of --evaluate-every {settings.evaluate_every}, "
                f"got {settings.control_steps}"
            )
        data = prepare(settings, options.data, options.cache)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    programs: dict[tuple, Program] = {}
    runs = {}
    for name in sorted(options.runs, key=list(MODELS).index):
        recipes = MODELS[name]
        key = tuple(recipes.items())
        if key not in programs:
            programs[key] = Program(recipes, settings)
        runs[name] = train(name, programs[key], data, settings)
        verdict = write_results(
            options.output, runs, settings, data.description
        )  # each time: an interrupted run keeps what it has
    print((options.output / "convergence.md").read_text())
    print(f"written to {options.output}/convergence.md, .json, .jsonl and .png")
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
