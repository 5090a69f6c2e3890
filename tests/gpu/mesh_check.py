"""Training steps on a mesh of all GPUs of a machine against one of them: data, fsdp and tensor parallel, shard_map.

    python tests/gpu/mesh_check.py --output mesh_check.json      # two minutes on two H200s
    python tests/gpu/mesh_check.py --self-test                   # on the CPU's devices

A small GPT takes three steps with each placement. The maths is the same in another order, so losses, gradients and FP8
scales must be close; the script prints how close. Ends with exit code 1 if a check failed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.report import Report, Script, run_script

import jax_fp8 as fp8

CONFIG = fp8.GPTConfig(
    vocab_size=512, num_layers=2, num_heads=8, num_kv_heads=4, hidden_size=512, max_seq_len=256, use_bias=False
)
LOSS, GRADIENT, SCALE = 5e-3, 0.25, 0.05  # relative; FP8 amplifies the last bits of an activation, as attention does
DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=16), fp8.CurrentScaling()
COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
STEPS = 3


def batch() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 512, (2 * len(jax.devices()), 257)).astype(np.int32)


def whole(path, leaf) -> P:
    return P()


def fsdp(path, leaf) -> P:
    is_split = path[0].key == "params" and leaf.ndim and leaf.shape[0] % len(jax.devices()) == 0
    return P("all") if is_split else P()


def tensor(path, leaf) -> P:
    names = [key.key for key in path]
    if names[0] != "params" or names[-1] != "kernel":
        return P()
    return P(None, "all") if names[-2] in COLUMNS else P("all", None) if names[-2] in ROWS else P()


MODES = {  # the recipe, the mesh's axes, where variables lie, whether the batch is split
    "data, Explicit": (DELAYED, AxisType.Explicit, whole, True),
    "fsdp, Explicit": (DELAYED, AxisType.Explicit, fsdp, True),
    "data, Auto": (DELAYED, AxisType.Auto, whole, True),
    "tensor, Auto": (DELAYED, AxisType.Auto, tensor, False),
    "fsdp, Explicit, current scaling": (CURRENT, AxisType.Explicit, fsdp, True),
    "tensor, Auto, current scaling": (CURRENT, AxisType.Auto, tensor, False),
}


def train(model, variables, tokens):
    """Loss, gradients and FP8 state of a pass, as NumPy arrays, and the losses of some steps."""
    loss_fn, tx = fp8.next_token_loss(model), fp8.fused_adamw(1e-3)
    first = jax.device_get(jax.jit(fp8.value_and_grad(loss_fn))(variables, tokens))
    state, losses = fp8.TrainState.create(variables=variables, tx=tx), []
    step = fp8.make_train_step(loss_fn, tx, model.recipe, microbatches=2)
    for _ in range(STEPS):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return *first, np.array(losses)


def start(recipe):
    """The model, and its variables with suitable scales: at a scale of 1 gradients are hardly more than noise."""
    model = fp8.GPT(CONFIG, recipe=recipe)
    variables = jax.jit(model.init)(jax.random.key(0), batch()[:, :-1])
    state = jax.jit(fp8.warm_start(fp8.next_token_loss(model), recipe))(variables, jnp.asarray(batch()))
    return model, {**variables, "fp8": state} if state else variables


def compare(report: Report, group: str, got, wanted):
    (loss, grads, state, losses), (wanted_loss, wanted_grads, wanted_state, wanted_losses) = got, wanted
    worst = report.worst
    worst[f"loss, {group}"] = float(np.max(np.abs(losses / wanted_losses - 1)))
    report.expect(group, abs(loss / wanted_loss - 1) < LOSS, f"loss {loss} for {wanted_loss}")
    report.expect(group, worst[f"loss, {group}"] < LOSS, f"losses {losses} for {wanted_losses}")
    errors = jax.tree.map(reference.relative_error, grads, wanted_grads)
    worst[f"gradient, {group}"] = max(jax.tree.leaves(errors))
    report.expect(group, worst[f"gradient, {group}"] < GRADIENT, f"gradients: {errors}")
    if state:
        staged = [
            [np.max(leaf, axis=-1) for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
            for tree in (state, wanted_state)
        ]
        worst[f"amax, {group}"] = max(float(np.max(np.abs(a / b - 1))) for a, b in zip(*staged, strict=True))
        report.expect(group, worst[f"amax, {group}"] < SCALE, f"amaxes of {group}")


def check_modes(report: Report):
    alone = {}
    for mode, (recipe, axis_type, placement, splits_batch) in MODES.items():
        model, variables = start(recipe)
        if recipe not in alone:
            alone[recipe] = train(model, variables, jnp.asarray(batch()))
        mesh = jax.make_mesh((len(jax.devices()),), ("all",), axis_types=(axis_type,))
        shardings = jax.tree_util.tree_map_with_path(
            lambda path, leaf, mesh=mesh, placement=placement: NamedSharding(mesh, placement(path, leaf)), variables
        )
        tokens = jax.device_put(batch(), NamedSharding(mesh, P("all") if splits_batch else P()))
        compare(report, mode, train(model, jax.device_put(variables, shardings), tokens), alone[recipe])
        print(f"{mode}: {report.worst[f'loss, {mode}']:.1e} from the losses of one device", flush=True)


def check_shard_map(report: Report):
    """Data parallel by hand, in a `shard_map` with its defaults."""
    model, variables = start(DELAYED)
    loss_fn, devices = fp8.next_token_loss(model), len(jax.devices())
    mesh = jax.make_mesh((devices,), ("all",))

    def gradients(variables, tokens):
        share = lambda *given: loss_fn(*given) / devices  # noqa: E731
        loss, grads, state = fp8.value_and_grad(share)(variables, tokens)
        return lax.psum(loss, "all"), grads, lax.pmax(state, "all")

    split = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("all")), out_specs=P()))
    placed = jax.device_put(variables, NamedSharding(mesh, P()))
    got = jax.device_get(split(placed, jax.device_put(batch(), NamedSharding(mesh, P("all")))))
    wanted = jax.device_get(jax.jit(fp8.value_and_grad(loss_fn))(variables, jnp.asarray(batch())))
    compare(report, "shard_map", (*got, np.ones(1)), (*wanted, np.ones(1)))


def check_controls(report: Report):
    """Negative control: another batch fails."""
    model, variables = start(DELAYED)
    run = jax.jit(fp8.value_and_grad(fp8.next_token_loss(model)))
    one, other = (jax.device_get(run(variables, jnp.asarray(tokens))) for tokens in (batch(), batch()[:, ::-1]))
    control = Report()
    compare(control, "another batch", (*other, np.ones(1)), (*one, np.ones(1)))
    report.expect("controls", bool(control.failures), "another batch was not noticed")


CHECKS = [check_controls, check_shard_map, check_modes]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
