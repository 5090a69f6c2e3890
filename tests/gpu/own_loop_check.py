"""The parts of a custom training loop on two GPUs, against `step(state, batch)` on the same; one check takes one GPU.

    python tests/gpu/own_loop_check.py --output own_loop_check.json
    python tests/gpu/own_loop_check.py --self-test                   # on the CPU's devices

    check_loops      value_and_grad and warm_start on a mesh, in a user's own jit: losses and FP8 state to the bit
    check_pieces     start, accumulate_step, apply_step: float32 sums in another order
    check_delayed    value_and_grad(delay_wgrad_compute=True), backward_dw: the ordinary gradients

The checks use XLA's attention, with which a GPU repeats its losses to the bit, and gradients nearly. One run uses
cuDNN's, whose backward does not repeat bits: there a second run of the step gives the tolerance. Ends with exit code 1
if a check failed.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

import delayed
import hybrid
from gpu.report import Report, Script, as_bytes, on_gpu, run_script

import jax_fp8 as fp8

RECIPE, STEPS = fp8.DelayedScaling(amax_history_len=16), 2
SEQUENCE = {"sequence_parallel": True}
WAYS = {
    "data=2": ({"data": 2}, {}), "fsdp=2": ({"fsdp": 2}, {}), "tensor=2": ({"tensor": 2}, {}),
    "tensor=2, sequence": ({"tensor": 2}, SEQUENCE),
}  # fmt: skip
SAME = {"loss": 0.0, "fp8 bytes": 0.0, "gradient": 1e-7, "params": 1e-6}  # an ordinary pass, run again: 3e-9
ANOTHER_ORDER = {"loss": 1e-6, "fp8 bytes": 0.0, "gradient": 1e-5, "params": 1e-5}
AS_OFTEN = 3  # with cuDNN's attention: so many times what the step, run again, differs from itself
LATER_LOSS = 1e-3  # of the second step in pieces: params that differ by 1e-7 are other values in FP8 here and there


def sizes() -> dict:
    """Of the model and of the batch: (rows, seq + 1)."""
    if on_gpu():
        return {"vocab_size": 8192, "num_layers": 2, "num_heads": 16, "hidden_size": 1024, "max_seq_len": 1024}
    return {"vocab_size": 128, "num_layers": 1, "num_heads": 4, "hidden_size": 64, "max_seq_len": 32}


def batch() -> np.ndarray:
    """8 rows: on each device of `data` and `fsdp` 4, in two microbatches 2."""
    model = sizes()
    shape = 8, model["max_seq_len"] + 1
    return np.random.default_rng(0).integers(0, model["vocab_size"], shape).astype(np.int32)


def another_token() -> np.ndarray:
    other = batch()
    other[5, 7] = (other[5, 7] + 1) % sizes()["vocab_size"]
    return other


@functools.cache
def start(attention):
    """Model, loss and initial variables, on the host."""
    model = fp8.GPT(fp8.GPTConfig(**sizes()), recipe=RECIPE, attention_implementation=attention)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.asarray(batch()[:, :-1]))
    return model, fp8.next_token_loss(model), jax.tree.map(np.asarray, variables)


def differences(got, wanted) -> dict[str, float]:
    """Of two pairs of a state and losses: how many bytes of the FP8 state, and how much of all else, relatively."""
    (state, losses), (expected, expected_losses) = got, wanted
    pairs = zip(jax.tree.leaves(state.fp8), jax.tree.leaves(expected.fp8), strict=True)
    params = zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True)
    gradients = hybrid.significant(hybrid.gradients_of(state)), hybrid.significant(hybrid.gradients_of(expected))
    return {
        "loss": float(np.max(np.abs(np.array(losses) / np.array(expected_losses) - 1))),
        "fp8 bytes": float(sum(np.sum(as_bytes(ours) != as_bytes(theirs)) for ours, theirs in pairs)),
        "gradient": max(hybrid.errors(*gradients).values()),
        "params": max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in params),
    }


def expect_within(report: Report, group: str, found: dict[str, float], limits: dict[str, float]):
    for what, value in found.items():
        report.worst[f"{what}, {group}"] = value
        report.expect(group, value <= limits[what], f"{what} differs by {value:.2e}, more than {limits[what]:.2e}")


def expect_beyond(report: Report, group: str, found: dict[str, float], limits: dict[str, float]):
    """Negative control: losses, gradients and FP8 state must all be too far off."""
    for what in ("loss", "fp8 bytes", "gradient"):
        report.worst[f"{what}, control: {group}"] = found[what]
        report.expect("controls", found[what] > limits[what], f"{group} was not noticed by {what}")


def parallelism(way) -> fp8.Parallelism:
    axes, options = WAYS[way]
    return fp8.Parallelism(hybrid.make_mesh(**axes), **options)


def make_step(attention, tx, way, microbatches, **settings):
    return fp8.make_train_step(start(attention)[1], tx, RECIPE, microbatches, parallel=parallelism(way), **settings)


def run_step(step, tx, variables, tokens, steps=STEPS):
    """The last state and the losses."""
    state, losses = step.place(fp8.TrainState.create(variables=variables, tx=tx), tokens), []
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return state, losses


def compare_loop(report: Report, way: str, attention: str | None):
    """A step with a warm start, and the same by hand, without microbatches."""
    parallel, (model, loss_fn, variables) = parallelism(way), start(attention)
    tx = hybrid.showing(optax.adamw(1e-3))
    gradient = fp8.value_and_grad(loss_fn, parallel=parallel)
    first_scales = jax.jit(fp8.warm_start(loss_fn, RECIPE, parallel=parallel))
    shardings = fp8.shardings(model.init, jax.random.key(0), jnp.asarray(batch()[:, :-1]), parallel=parallel)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def own_step(variables, opt_state, tokens):
        loss, grads, fp8_state = gradient(variables, tokens)
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, "fp8": fp8.update_state(fp8_state, RECIPE)}, opt_state, loss

    def train(tokens, warm=True):
        placed, losses = jax.device_put(variables, shardings), []
        opt_state = tx.init(placed["params"])
        if warm:
            placed = {**placed, "fp8": first_scales(placed, tokens)}
        for _ in range(STEPS):
            placed, opt_state, loss = own_step(placed, opt_state, tokens)
            losses.append(float(loss))
        return fp8.TrainState(jnp.int32(STEPS), placed["params"], placed["fp8"], opt_state), losses

    step = make_step(attention, tx, way, 1)
    wanted = run_step(step, tx, variables, batch())
    limits = SAME if attention == "xla" or not on_gpu() else repeated(run_step(step, tx, variables, batch()), wanted)
    group = f"loop, {way}, {attention or 'default'}"
    expect_within(report, group, differences(train(batch()), wanted), limits)
    expect_beyond(report, f"another token, {group}", differences(train(another_token()), wanted), limits)
    expect_beyond(report, f"no warm start, {group}", differences(train(batch(), warm=False), wanted), limits)


def repeated(again, wanted) -> dict[str, float]:
    """How much the step differs from itself over some runs, and the least tolerance."""
    found = differences(again, wanted)
    print("the step, run again:", found, flush=True)
    return {what: max(AS_OFTEN * value, ANOTHER_ORDER[what]) for what, value in found.items()}


def compare_pieces(report: Report, way: str, attention: str | None, cache_weights: bool = True):
    """Two microbatches in a custom loop, and as one step, both from suitable scales."""
    _, loss_fn, variables = start(attention)
    scales = jax.jit(fp8.warm_start(loss_fn, RECIPE))(variables, jnp.asarray(batch()))
    variables = {**variables, "fp8": jax.tree.map(np.asarray, scales)}
    tx = hybrid.showing(fp8.fused_adamw(1e-3))
    step = make_step(attention, tx, way, 2, cache_weights=cache_weights, warm_start=False)

    def drive(rows, steps):
        state, losses = step.place(fp8.TrainState.create(variables=variables, tx=tx), batch()), []
        pending = step.start(state)
        for _ in range(steps):
            for i in range(2):
                pending = step.accumulate_step(state, pending, batch()[rows(i) :: 2], i == 0)
            state, pending, metrics = step.apply_step(state, pending)
            losses.append(float(metrics["loss"]))
        return state, losses

    wanted = run_step(step, tx, variables, batch(), 1)
    limits = ANOTHER_ORDER
    if attention != "xla" and on_gpu():
        limits = repeated(run_step(step, tx, variables, batch(), 1), wanted)
    group = f"pieces, {way}, {'kept' if cache_weights else 'not kept'}, {attention or 'default'}"
    expect_within(report, group, differences(drive(lambda i: i, 1), wanted), limits)
    expect_beyond(report, f"one twice, {group}", differences(drive(lambda i: 0, 1), wanted), limits)
    later = drive(lambda i: i, STEPS)[1][-1] / run_step(step, tx, variables, batch())[1][-1] - 1
    report.worst[f"loss of step {STEPS}, {group}"] = abs(later)
    report.expect(group, abs(later) < LATER_LOSS, f"the loss of step {STEPS} differs by {later:.1e}")


def compare_delayed(report: Report, attention: str | None):
    """Of one pass on one GPU. Negative control: the product of one GEMM left out."""
    _, loss_fn, variables = start(attention)
    tokens, group = jnp.asarray(batch()), f"delayed, {attention or 'default'}"
    scales = jax.jit(fp8.warm_start(loss_fn, RECIPE))(variables, tokens)
    variables = {**jax.tree.map(jnp.asarray, variables), "fp8": scales}
    ordinary = jax.jit(fp8.value_and_grad(loss_fn))
    run = jax.jit(fp8.value_and_grad(loss_fn, delay_wgrad_compute=True))
    loss, wanted, state = ordinary(variables, tokens)
    again = hybrid.errors(hybrid.significant(ordinary(variables, tokens)[1]), hybrid.significant(wanted))
    delayed_loss, grads, delayed_state, deferred = run(variables, tokens)
    add = jax.jit(delayed.add)

    def worst(deferred):
        found = hybrid.errors(hybrid.significant(add(grads, deferred)), hybrid.significant(wanted))
        return max(found.values())

    limit = max(AS_OFTEN * max(again.values()), ANOTHER_ORDER["gradient"])
    found = {"gradient": worst(deferred), "loss": abs(float(delayed_loss) / float(loss) - 1)}
    states = zip(jax.tree.leaves(delayed_state), jax.tree.leaves(state), strict=True)
    found["fp8 bytes"] = float(sum(np.sum(as_bytes(ours) != as_bytes(theirs)) for ours, theirs in states))
    report.worst[f"gradient, {group}, the ordinary ones again"] = max(again.values())
    exact = attention == "xla" or not on_gpu()
    expect_within(report, group, found, {"gradient": limit, "loss": 0.0, "fp8 bytes": 0.0 if exact else np.inf})
    left_out = min(worst(delayed.without_one(deferred, i)) for i in range(len(deferred.operands)))
    report.worst[f"gradient, control: one product left out, {group}"] = left_out
    report.expect("controls", left_out > 0.5, f"a product left out changes gradients by {left_out:.1e} only")


def check_loops(report: Report):
    for way in WAYS:
        compare_loop(report, way, "xla")
    compare_loop(report, "fsdp=2", None)


def check_pieces(report: Report):
    for way in WAYS:
        compare_pieces(report, way, "xla")
    compare_pieces(report, "fsdp=2", "xla", cache_weights=False)
    compare_pieces(report, "fsdp=2", None)


def check_delayed(report: Report):
    compare_delayed(report, "xla")
    compare_delayed(report, None)


CHECKS = [check_delayed, check_loops, check_pieces]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
