"""Does a mixture of experts learn in FP8 as in bfloat16? One model on one text in each, and controls that must fail.

    python benchmarks/mixture_curves.py                # 8 layers of 16 experts, 15 runs on one H200
    python benchmarks/mixture_curves.py --recipes bf16 delayed --balances aux    # some of the runs
    python benchmarks/mixture_curves.py --data FILE_OR_DIR
    python benchmarks/mixture_curves.py --self-test    # a tiny mixture on any machine, in two minutes

The text, its tokens and their order are made as in `convergence.py`. A run is a recipe, a way to balance the load of
the experts, and a seed of the initial parameters. All runs read the same batches in the same order.

    bf16     recipe=None, the baseline           aux    softmax scores, and the auxiliary load-balancing loss
    delayed  DelayedScaling                      bias   sigmoid scores, no such loss, and correction biases that the
    block    BlockScaling                               optimizer moves (`balance_experts`)

Two controls are runs of the first seed alone:

    frozen   DelayedScaling whose scales are overwritten with one wrong constant after every step, in `--control-steps`
    none     DelayedScaling with softmax scores and nothing that balances

The validation loss is the cross-entropy alone; the training loss, which only the `.json` has, includes the auxiliary
loss. The load of a layer is the share of its busiest expert divided by the mean share, over all validation tokens. It
is 1 if experts are used evenly, and `num_experts / experts_per_token` if all tokens have the same experts.

The bound says how far losses may be apart. It is twice the difference of bf16's two seeds, but at least 0.5 %:
differences below that say nothing, for one bfloat16 program ended as far apart in four processes (log.md, "Losses").
And it is at most the 1 % of `convergence.py`, so that no noise excuses more. PASS means, for each balance:

- The mean of the last validation losses of `delayed`, and that of `block`, differs from bf16's by at most the bound.
- `frozen` is worse than bf16 at the same step by more than the bound, which shows that the check can fail.
- At the end the load of `none`, the mean over its layers, is above that of `delayed`. So the balance has an effect.

Without a control, or without an FP8 recipe, the verdict is INCOMPLETE. The exit status is 0 for PASS, else 1.
"""

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import TOLERANCE, freeze
from mixture_results import CONTROLLED, Point, Run, write_results
from text_data import Data, Reading, prepare

import jax_fp8 as fp8

HERE = pathlib.Path(__file__).resolve()
RECIPES = {"bf16": None, "delayed": fp8.DelayedScaling(), "block": fp8.BlockScaling()}
BALANCES = ("aux", "bias")


@dataclasses.dataclass(frozen=True)
class Settings(Reading):
    """One experiment; its runs differ in recipe, balance and initial parameters."""

    seq_len: int = 512
    steps: int = 1000
    validation_tokens: int = 65_536
    max_bytes: int = 40_000_000
    num_layers: int = 8
    num_heads: int = 8
    hidden_size: int = 512
    num_experts: int = 16
    expert_features: int = 512
    experts_per_token: int = 2
    aux_loss: float = 0.01
    update_rate: float = 5e-3  # of correction biases; with the usual 1e-3 they lag for half of so short a run
    seeds: int = 2
    evaluate_every: int = 50
    control_steps: int = 300  # of frozen
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    frozen_scale: float = 64.0
    least_bound: float = 0.005
    most_bound: float = TOLERANCE

    @property
    def title(self) -> str:
        return (
            f"{self.num_layers} layers, {self.hidden_size} wide, {self.experts_per_token} of {self.num_experts} "
            f"experts of {self.expert_features}, {self.steps:,} steps of {self.batch_size} x {self.seq_len} tokens"
        )


SELF_TEST = Settings(
    vocab_size=300,
    seq_len=32,
    batch_size=8,
    steps=240,
    validation_tokens=4_096,
    max_bytes=3_000_000,
    tokenizer_bytes=200_000,
    num_layers=1,
    num_heads=2,
    hidden_size=128,
    num_experts=4,
    expert_features=128,
    aux_loss=0.1,
    update_rate=1e-2,
    evaluate_every=80,
    control_steps=240,
    learning_rate=2e-3,
    warmup_steps=10,
    least_bound=0.03,  # so small a model differs by 2 to 5 % from seed to seed
    most_bound=0.03,
)


class Program:
    """The compiled functions of one recipe and balance, for all seeds; `frozen` shares those of `delayed`."""

    def __init__(self, recipe: str, balance: str, settings: Settings):
        routers = {
            "aux": {"router_aux_loss": settings.aux_loss},
            "bias": {"router_aux_loss": 0.0, "router_scores": "sigmoid", "router_correction_bias": True},
            "none": {"router_aux_loss": 0.0},
        }
        config = fp8.GPTConfig.preset(
            "tiny-moe",
            vocab_size=-(-settings.vocab_size // 128) * 128,
            max_seq_len=settings.seq_len,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            num_kv_heads=None,
            hidden_size=settings.hidden_size,
            mlp_hidden_size=settings.expert_features,
            num_experts=settings.num_experts,
            experts_per_token=settings.experts_per_token,
            tie_embeddings=True,
            **routers[balance],
        )
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.learning_rate, settings.warmup_steps, settings.steps
        )
        adam = fp8.fused_adamw(schedule, b2=0.95, weight_decay=0.1, max_grad_norm=1.0)
        self.tx = fp8.balance_experts(adam, settings.update_rate) if balance == "bias" else adam
        self.model = fp8.GPT(config, recipe=RECIPES[recipe])
        self.step = fp8.make_train_step(fp8.next_token_loss(self.model), self.tx, RECIPES[recipe])
        self.init, self.evaluate = jax.jit(self.model.init), jax.jit(self._evaluate)

    def initial_state(self, seed: int, tokens: jax.Array) -> fp8.TrainState:
        return fp8.TrainState.create(variables=self.init(jax.random.key(seed), tokens[:, :-1]), tx=self.tx)

    def _evaluate(self, variables, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cross-entropy f32[], and the share of tokens of each expert f32[layers, experts]."""
        # Routers sow their losses into "losses", which is not mutable here: the loss is the cross-entropy alone.
        loss, seen = self.model.apply(variables, tokens[:, :-1], tokens[:, 1:], mutable=["intermediates"])
        layers = [seen["intermediates"][f"layer_{index}"]["mlp"] for index in range(self.model.config.num_layers)]
        return jnp.asarray(loss), jnp.stack([jnp.asarray(layer["expert_fractions"][0]) for layer in layers])

    def validate(self, state: fp8.TrainState, batches: list[jax.Array]) -> tuple[float, list[float]]:
        """The mean loss, and the load of each layer over all batches."""
        losses, shares = zip(*(self.evaluate(state.variables, batch) for batch in batches), strict=True)
        share = np.mean(jax.device_get(shares), axis=0)  # (layers, experts)
        return float(np.mean(jax.device_get(losses))), (share.max(axis=1) / share.mean(axis=1)).tolist()


def train(recipe: str, balance: str, seed: int, program: Program, data: Data, settings: Settings) -> Run:
    """One run. Its losses are summed on the device, and fetched only where it is evaluated."""
    state = program.initial_state(settings.seed + seed, data.batch(0, settings.seq_len))
    points, total, started = [], jnp.float32(0), time.perf_counter()
    for step in range(1, 1 + (settings.control_steps if recipe == "frozen" else settings.steps)):
        state, metrics = program.step(state, data.batch(step - 1, settings.seq_len))
        total += metrics["loss"]
        if recipe == "frozen":
            state = dataclasses.replace(state, fp8=freeze(state.fp8, settings.frozen_scale))
        if step % settings.evaluate_every == 0:
            loss, loads = program.validate(state, data.validation)
            points.append(Point(step, float(total) / settings.evaluate_every, loss, loads))
            total = jnp.float32(0)
    run = Run(recipe, balance, seed, points, time.perf_counter() - started)
    print(
        f"{recipe:>8} {balance:>4} seed {seed}: validation {points[-1].validation_loss:.4f} after {points[-1].step:,} "
        f"steps, load {statistics.fmean(points[-1].loads):.2f}, {run.seconds:.0f} s",
        flush=True,
    )
    return run


def check(options: argparse.Namespace, settings: Settings) -> None:
    if "bf16" not in options.recipes:
        raise ValueError(
            f"--recipes must include bf16, which the others are compared with, got {' '.join(options.recipes)}"
        )
    if settings.seeds < 2:
        raise ValueError(f"--seeds must be at least 2, because their difference is the noise, got {settings.seeds}")
    for name in ("steps", "control_steps"):
        count, every = getattr(settings, name), settings.evaluate_every
        if count % every or not 0 < count <= settings.steps:
            raise ValueError(
                f"--{name.replace('_', '-')} must be a multiple of --evaluate-every {every}, and from 1 to --steps "
                f"{settings.steps}, got {count}"
            )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--self-test", action="store_true", help="a tiny mixture and few steps, which replace the defaults below"
    )
    parser.add_argument("--data", type=pathlib.Path, help="text instead of the interpreter's Python sources")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], help="bf16 must be among them")
    parser.add_argument("--balances", nargs="+", choices=BALANCES, default=BALANCES)
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--name", default="mixture_curves", help="of the files in --output, without extension")
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
        check(options, settings)
        data = prepare(settings, options.data, options.cache)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recipes = [name for name in RECIPES if name in options.recipes]
    cases = [*itertools.product(recipes, options.balances)]
    cases += [(CONTROLLED, "none")] if CONTROLLED in recipes else []
    runs, verdict = [], ""
    for recipe, balance in cases:
        program = Program(recipe, balance, settings)
        wanted = [(recipe, seed) for seed in range(1 if balance == "none" else settings.seeds)]
        wanted += [("frozen", 0)] if recipe == CONTROLLED and balance != "none" else []
        runs += [train(name, balance, seed, program, data, settings) for name, seed in wanted]
        # Each time: an interrupted run keeps what it has.
        verdict = write_results(
            options.output / options.name, runs, settings.title, data.description, dataclasses.asdict(settings)
        )
    print((options.output / f"{options.name}.md").read_text())
    print(f"written to {options.output / options.name}.md, .json and .png")
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
