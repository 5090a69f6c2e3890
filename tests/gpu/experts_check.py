"""Experts that are split over all GPUs of a machine against one of them: rows that travel, and training steps.

    python tests/gpu/experts_check.py --output experts_check.json      # two minutes on two H200s
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python tests/gpu/experts_check.py --self-test

On GPUs rows travel by one ragged exchange, and elsewhere all of them are gathered: both must give the same bytes. A
small mixture of experts then takes three steps on a mesh `expert=n` and on one device, whose losses, gradients and
amaxes must be close. Negative controls: rows that come one place too late, and another batch. Then it times the
exchange. Ends with exit code 1 if a check failed.
"""

import functools
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))

import hybrid
from attention_apart import attention_apart
from gpu.kernel_check import twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.core.formats import E4M3
from jax_fp8.core.shards import ExpertParallel
from jax_fp8.ops import expert_travel
from jax_fp8.ops.expert_rows import rows_needed

EVERY = P("expert")
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=16),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
    "bf16": None,
}
LOSS, GRADIENT, AMAX, STEPS = 5e-3, 0.25, 0.05, 3  # relative: FP8 amplifies the last bits of an activation
TIMED_TOKENS, CHOICES, TIMED_EXPERTS, TIMED_FEATURES = 16_384, 8, 128, 2048  # of a device; experts of all


def too_late(axis, arriving, rows, slices):
    return jnp.roll(expert_travel._from_all(axis, arriving, rows, slices), 1, axis=0)


# How rows travel on GPUs.
WAYS = {"ragged": expert_travel._ragged, "gathered": expert_travel._from_all, "too late": too_late}


# ---- rows -----------------------------------------------------------------------------------------------------------


def counts_of(tokens: int, experts: int) -> dict[str, np.ndarray]:
    """Rows of each device to each expert; each token chooses two experts."""
    devices, rows, random = jax.device_count(), 2 * tokens, np.random.default_rng(0)
    one, one_sends = np.zeros((2, devices, experts), int)
    one[:, :2], one_sends[-1, 0] = tokens, 1
    return {
        "even": np.full((devices, experts), rows // experts),
        "uneven": random.multinomial(rows, np.arange(experts) / sum(range(experts)), devices),
        "two experts": one,
        "one row": one_sends,
        "nothing": np.zeros((devices, experts), int),
    }


@functools.cache
def travel_program(experts: int, tokens: int, choices: int, way: str):
    """`program(counts, rows)` → the rows of the groups of each device, and the same back where their tokens are."""
    devices = jax.device_count()
    own = experts // devices
    room = rows_needed(expert_travel.most_rows(tokens, choices, own, devices), own)

    def local(counts, rows):
        split = ExpertParallel("expert", devices)
        travel, _ = expert_travel.plan_travel(counts[0], rows.shape[1], room, split)
        groups = expert_travel.send_rows(rows[0], travel)
        return groups[None], expert_travel.return_rows(groups, travel)[None]

    mesh = jax.sharding.Mesh(jax.devices(), ("expert",))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EVERY, out_specs=EVERY, check_vma=False))


def travelled(counts: np.ndarray, rows: jax.Array, tokens: int, way: str = "ragged"):
    with mock.patch.object(expert_travel, "_ragged", WAYS[way]):
        return travel_program(counts.shape[1], tokens, 2, way)(jnp.asarray(counts, jnp.int32), rows)


def check_rows(report: Report):
    """The same bytes as by gathering, in two runs, and every row comes back."""
    tokens, experts, wide = (4096, 32, 512) if on_gpu() else (40, 8, 16)
    for dtype, features in ((jnp.bfloat16, wide), (E4M3, wide), (jnp.float32, 1)):  # the last are weights of rows
        values = jax.random.normal(jax.random.key(0), (jax.device_count(), 2 * tokens, features))
        for name, counts in counts_of(tokens, experts).items():
            is_there = np.arange(2 * tokens)[None, :, None] < counts.sum(1)[:, None, None]
            rows = jnp.where(is_there, values, 0).astype(dtype)
            label = f"{name}, {jnp.dtype(dtype).name}"
            first, second = twice_over_poison(functools.partial(travelled, counts, rows, tokens))
            wanted = travelled(counts, rows, tokens, "gathered")
            for what, got, again, expected in zip(("groups", "back"), first, second, wanted, strict=True):
                report.bits("two runs, the same bytes", got, again, f"{what}: {label}")
                report.bits("rows", got, expected, f"{what}: {label}")
            report.bits("every row comes back", first[1], rows, label)
            if name != "nothing":
                late = travelled(counts, rows, tokens, "too late")[0] if on_gpu() else jnp.roll(wanted[0], 1, axis=1)
                is_noticed = not np.array_equal(np.asarray(late, np.float32), np.asarray(wanted[0], np.float32))
                report.expect("controls", is_noticed, f"rows that come too late: {label}")


# ---- steps ----------------------------------------------------------------------------------------------------------


def model_of(recipe) -> fp8.GPT:
    sizes = {"vocab_size": 128, "num_layers": 1, "num_heads": 4, "hidden_size": 128, "max_seq_len": 32}
    if on_gpu():
        sizes = {"vocab_size": 2048, "num_layers": 2, "num_heads": 8, "hidden_size": 512, "max_seq_len": 256}
    experts = {"num_experts": 8, "experts_per_token": 2, "activation": "swiglu", "use_bias": False}
    return fp8.GPT(fp8.GPTConfig(**sizes, **experts), recipe=recipe, attention_implementation="xla")


def batch(config, seed: int = 0) -> np.ndarray:
    shape = 4 * jax.device_count(), config.max_seq_len + 1
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


@mock.patch.object(jax.nn, "dot_product_attention", attention_apart)
def train(recipe, axes: dict[str, int], seed: int = 0):
    """The losses, and the state after the first step, on the host."""
    model, tx = model_of(recipe), hybrid.showing(optax.sgd(0.01))
    tokens = batch(model.config, seed)
    options = hybrid.spread(hybrid.make_mesh(**axes))
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, warm_start=False, **options)
    made = hybrid.first_state(model.init, jnp.asarray(tokens[:4, :-1]), tx)
    states, losses = hybrid.run(step, step.place(made, tokens), tokens, STEPS)
    return losses, states[0]


def differences(got, expected) -> dict[str, float]:
    (losses, state), (wanted_losses, wanted_state) = got, expected
    gradients = [hybrid.significant(hybrid.gradients_of(each)) for each in (state, wanted_state)]
    amaxes = [
        [np.max(leaf, axis=-1) for leaf in jax.tree.leaves(each.fp8) if leaf.ndim > 1] for each in (state, wanted_state)
    ]
    found = {
        "loss": float(np.max(np.abs(np.array(losses) / np.array(wanted_losses) - 1))),
        "gradient": max(hybrid.errors(*gradients).values()),
    }
    if amaxes[0]:
        ratios = [np.abs(ours / theirs - 1) for ours, theirs in zip(*amaxes, strict=True)]
        found["amax"] = float(max(np.max(ratio) for ratio in ratios))
    return found


def check_steps(report: Report):
    limits = {"loss": LOSS, "gradient": GRADIENT, "amax": AMAX}
    for name, recipe in RECIPES.items():
        wanted = train(recipe, {"data": 1})
        for what, value in differences(train(recipe, {"expert": jax.device_count()}), wanted).items():
            report.worst[f"{what}, {name}"] = value
            report.expect(name, value <= limits[what], f"{what} differs by {value:.2e}")
        if name == "delayed":
            control = differences(train(recipe, {"expert": jax.device_count()}, seed=1), wanted)
            report.worst |= {f"{what}, control: another batch": value for what, value in control.items()}
            report.expect("controls", control["gradient"] > GRADIENT, "another batch was not noticed")


# ---- speed ----------------------------------------------------------------------------------------------------------


def time_exchange(report: Report):
    """A way there and a way back, of tokens that choose 8 of 128 experts at random; bytes that leave a device."""
    devices, rows = jax.device_count(), TIMED_TOKENS * CHOICES
    random = np.random.default_rng(0)
    counts = jnp.asarray(random.multinomial(rows, np.full(TIMED_EXPERTS, 1 / TIMED_EXPERTS), devices), jnp.int32)
    program = travel_program(TIMED_EXPERTS, TIMED_TOKENS, CHOICES, "ragged")
    for dtype, features in ((E4M3, TIMED_FEATURES), (jnp.bfloat16, TIMED_FEATURES), (jnp.float32, 1)):
        values = jax.random.normal(jax.random.key(0), (devices, rows, features), jnp.bfloat16).astype(dtype)
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready(program(counts, values))
            samples.append((time.perf_counter() - start) / 2)
        seconds = statistics.median(samples[2:])
        leaves = values.nbytes / devices * (1 - 1 / devices)
        row = {"what": f"exchange, {jnp.dtype(dtype).name}", "shape": f"{rows} x {features}"}
        report.timings.append(row | {"ms": 1e3 * seconds, "GB/s": leaves / seconds / 1e9})


CHECKS = [check_rows, check_steps]


def main(arguments: list[str] | None = None) -> int:
    if jax.device_count() < 2:
        print("experts are split over two devices or more, got one; with --self-test set XLA_FLAGS as this file says")
        return 2
    return run_script(Script(__file__, __doc__, CHECKS, [time_exchange], self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
