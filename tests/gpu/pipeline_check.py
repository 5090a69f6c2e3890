"""Pipelines on two GPUs, or on as many as there are, against the same step on one.

    python tests/gpu/pipeline_check.py --output pipeline_check.json
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python tests/gpu/pipeline_check.py --self-test    # some minutes

For every schedule it compares the losses of three steps, the FP8 state after the first step to the bit, and all
gradients. All schedules must also have the same bits of losses and FP8 state as the first one. With four GPUs also
pipe=4, and pipe=2 with tensor=2 against tensor=2. Negative control: another microbatch. Ends with exit code 1 if a
check failed.

Attention is not fused with its surroundings (tests/attention_apart.py), so it has the same bits in all programs.
"""

import functools
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

import hybrid
from attention_apart import attention_apart
from gpu.report import Report, Script, as_bytes, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.parallel.schedules import SCHEDULES

RECIPE, STEPS, MICROBATCHES = fp8.DelayedScaling(amax_history_len=16), 3, 4
LOSS, GRADIENT = 1e-6, 1e-4  # of biases, whose terms nearly cancel; all others are far below
MESHES = [({"pipe": 2}, {}), ({"pipe": 4}, {}), ({"pipe": 2, "tensor": 2}, {})]


def sizes() -> dict:
    """Of the model and of the batch: (rows, seq + 1)."""
    if on_gpu():
        return {"vocab_size": 8192, "num_layers": 4, "num_heads": 16, "hidden_size": 1024, "max_seq_len": 512}
    return {
        "vocab_size": 128,
        "num_layers": 4 if jax.device_count() > 2 else 2,
        "num_heads": 4,
        "hidden_size": 64,
        "max_seq_len": 32,
    }


def batch() -> np.ndarray:
    """4 rows in each microbatch."""
    model = sizes()
    shape = 4 * MICROBATCHES, model["max_seq_len"] + 1
    return np.random.default_rng(0).integers(0, model["vocab_size"], shape).astype(np.int32)


def another_microbatch() -> np.ndarray:
    """The same batch except for one microbatch."""
    other = batch()
    other[1::MICROBATCHES] = np.random.default_rng(1).integers(0, sizes()["vocab_size"], other[1::MICROBATCHES].shape)
    return other


@mock.patch.object(jax.nn, "dot_product_attention", attention_apart)
def train(axes: dict[str, int], tokens: np.ndarray, **options):
    """The losses, and the state after the first step, on the host."""
    model = fp8.GPT(fp8.GPTConfig(**sizes()), recipe=RECIPE, attention_implementation="xla")
    tx = hybrid.showing(optax.sgd(0.01))
    options = hybrid.spread(hybrid.make_mesh(**axes), **options)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPE, MICROBATCHES, warm_start=False, **options)
    made = hybrid.first_state(model.init, jnp.asarray(tokens[:4, :-1]), tx)  # with scales: no gradient is zero
    state, losses, first = step.place(made, tokens), [], None
    for _ in range(STEPS):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
        first = first or jax.device_get(state)
    return losses, first


@functools.cache
def wanted(tensor: int):
    return train({"tensor": tensor} if tensor > 1 else {"data": 1}, batch())


def differences(got, expected) -> dict[str, float]:
    (losses, state), (wanted_losses, wanted_state) = got, expected
    pairs = zip(jax.tree.leaves(state.fp8), jax.tree.leaves(wanted_state.fp8), strict=True)
    gradients = [hybrid.significant(hybrid.gradients_of(each)) for each in (state, wanted_state)]
    return {
        "loss": float(np.max(np.abs(np.array(losses) / np.array(wanted_losses) - 1))),
        "fp8 bytes": float(sum(np.sum(as_bytes(ours) != as_bytes(theirs)) for ours, theirs in pairs)),
        "gradient": max(hybrid.errors(*gradients).values()),
    }


def check_pipelines(report: Report):
    if jax.device_count() < 2:
        raise ValueError("a pipeline needs two devices, got one; with --self-test set XLA_FLAGS as this file says")
    limits = {"loss": LOSS, "fp8 bytes": 0.0, "gradient": GRADIENT}
    for axes, options in MESHES:
        if np.prod(list(axes.values())) > jax.device_count():
            continue
        expected = wanted(axes.get("tensor", 1))
        has_chunks = sizes()["num_layers"] >= 2 * axes["pipe"]
        names = [name for name in SCHEDULES if has_chunks or name != "interleaved"]
        first = None
        for name in names:
            trained = train(axes, batch(), schedule=name, **options)
            first = first or trained
            for what, value in differences(trained, expected).items():
                report.worst[f"{what}, {name} on {axes}"] = value
                report.expect(f"{name} on {axes}", value <= limits[what], f"{what} differs by {value:.2e}")
            report.bits(f"schedules on {axes}", np.array(trained[0]), np.array(first[0]), f"losses, {name}")
            for got, like in zip(jax.tree.leaves(trained[1].fp8), jax.tree.leaves(first[1].fp8), strict=True):
                report.bits(f"schedules on {axes}", got, like, f"FP8 state, {name}")
        control = differences(train(axes, another_microbatch(), **options), expected)
        for what, value in control.items():
            report.worst[f"{what}, control: another microbatch on {axes}"] = value
            report.expect("controls", value > limits[what], f"another microbatch was not noticed by {what} on {axes}")


CHECKS = [check_pipelines]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
