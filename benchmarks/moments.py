"""Do moments in bfloat16 learn like moments in float32? The same GPT on the same text; only the moments' dtypes differ.

    python benchmarks/moments.py --output FOLDER                      # a 124M GPT, six runs: some 6 minutes on one H200
    python benchmarks/moments.py --output FOLDER --variants float32/0.95 both/0.95
    python benchmarks/moments.py --output FOLDER --preset tiny --steps 5

All runs have the initial parameters and the batches of `convergence.py`. The name of a variant says which moments are
in bfloat16, and then b2:

    float32   neither, the baseline
    nu        the second
    both      the first and the second

`moments.md` and `moments.json` are written after each run.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tables
from text_data import Data, Reading, prepare

import jax_fp8 as fp8

MOMENTS = {"float32": {}, "nu": {"nu_dtype": jnp.bfloat16}}
MOMENTS["both"] = MOMENTS["nu"] | {"mu_dtype": jnp.bfloat16}
VARIANTS = [f"{moments}/{b2}" for b2 in ("0.95", "0.999") for moments in MOMENTS]
LAST = 50  # steps whose losses are averaged at the end


@dataclasses.dataclass(frozen=True)
class Settings(Reading):
    """One experiment; its runs differ in the optimizer alone."""

    preset: str = "gpt2-124m"
    learning_rate: float = 4e-4
    warmup_steps: int = 100


TINY = Settings(
    preset="tiny",
    vocab_size=512,
    seq_len=32,
    batch_size=8,
    steps=160,
    validation_tokens=2_048,
    learning_rate=1e-3,
    warmup_steps=2,
    max_bytes=3_000_000,
    tokenizer_bytes=200_000,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of one run."""

    variant: str
    losses: list[float]
    validation_loss: float
    seconds: float
    optimizer_bytes: int

    @property
    def last_loss(self) -> float:
        return float(np.mean(self.losses[-LAST:]))


def train(variant: str, settings: Settings, data: Data) -> Run:
    """One run from the seed to the last step; losses stay on the device until then."""
    moments, b2 = variant.split("/")
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, min(settings.warmup_steps, settings.steps - 1), settings.steps
    )
    tx = fp8.fused_adamw(schedule, b2=float(b2), weight_decay=0.1, max_grad_norm=1.0, **MOMENTS[moments])
    sizes = {"vocab_size": -(-settings.vocab_size // 128) * 128, "max_seq_len": settings.seq_len}
    recipe = fp8.DelayedScaling()
    model = fp8.GPT(fp8.GPTConfig.preset(settings.preset, **sizes), recipe=recipe)
    loss = fp8.next_token_loss(model)
    step = fp8.make_train_step(loss, tx, recipe)
    variables = jax.jit(model.init)(jax.random.key(settings.seed), data.batch(0, settings.seq_len)[:, :-1])
    state = fp8.TrainState.create(variables=variables, tx=tx)
    optimizer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    losses, started = [], time.perf_counter()
    for number in range(settings.steps):
        state, metrics = step(state, data.batch(number, settings.seq_len))
        losses.append(metrics["loss"])
    losses = np.asarray(jax.device_get(losses)).astype(float).tolist()
    seconds = time.perf_counter() - started
    validate = jax.jit(loss)
    validation_loss = np.mean([float(validate(state.variables, batch)) for batch in data.validation])
    return Run(variant, losses, float(validation_loss), seconds, optimizer_bytes)


def write_results(output: pathlib.Path, runs: list[Run], settings: Settings, description: str) -> None:
    """`moments.md` and `moments.json`, of the runs so far."""
    environment = tables.environment()
    of_float32 = {run.variant.split("/")[1]: run for run in runs if run.variant.startswith("float32/")}

    def beside_float32(run):
        base = of_float32.get(run.variant.split("/")[1])
        return (
            "-" if base is None or base is run else f"{100 * (run.validation_loss / base.validation_loss - 1):+.2f} %"
        )

    def size_and_time(run):
        return f"{run.optimizer_bytes / 1e9:.3f}", f"{run.seconds:.0f}"

    headings = [
        "bfloat16 moments / b2",
        "validation loss",
        "beside float32",
        f"loss of the last {LAST}",
        "optimizer GB",
    ]
    headings += ["seconds with compilation"]
    rows = [
        [run.variant, f"{run.validation_loss:.4f}", beside_float32(run), f"{run.last_loss:.4f}", *size_and_time(run)]
        for run in runs
    ]
    sections = [
        "# Moments in bfloat16",
        f"{settings.preset}, {settings.steps:,} steps of {settings.batch_size} x {settings.seq_len} tokens. "
        + tables.environment_line(environment),
        f"Text: {description}.",
        tables.table(headings, rows),
    ]
    tables.write(output / "moments.md", "\n\n".join(sections))
    found = {"environment": environment, "settings": dataclasses.asdict(settings), "text": description}
    tables.write(output / "moments.json", json.dumps(found | {"runs": [dataclasses.asdict(run) for run in runs]}))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder for the results")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--preset", default=Settings.preset, help='"tiny" has small batches and little text as well')
    parser.add_argument("--steps", type=int, help=f"default {Settings.steps}")
    parser.add_argument(
        "--data", type=pathlib.Path, help="file or folder of text instead of the interpreter's Python sources"
    )
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path.home() / ".cache" / "jax_fp8",
        help="for tokenizers",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    settings = TINY if options.preset == "tiny" else dataclasses.replace(Settings(), preset=options.preset)
    if options.steps is not None:
        settings = dataclasses.replace(settings, steps=options.steps)
    try:
        data = prepare(settings, options.data, options.cache)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = []
    for variant in options.variants:
        runs.append(train(variant, settings, data))
        print(f"{variant}: validation {runs[-1].validation_loss:.4f}, {runs[-1].seconds:.0f} s", flush=True)
        write_results(options.output, runs, settings, data.description)
    print((options.output / "moments.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
