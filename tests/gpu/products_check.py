"""Products with a carried state on a GPU: `dot_general`, `einsum`, Flax's convention, and layers under `jax.vmap`.

    python tests/gpu/products_check.py --output products_check.json      # a minute on an H200
    python tests/gpu/products_check.py --self-test                       # smaller arrays, on a CPU

Steps whose state is its own gradient must have the bits of `value_and_grad` and `update_state` of our own layers, also
in a loop over layers with remat, where XLA fuses slices of the state with custom calls. Grouped products are compared
with products of their groups. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.adam_check import poison
from gpu.report import Report, Script, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.integrations.vmapped import CarriedState
from jax_fp8.integrations.vmapped import product as vmapped_product

RECIPE = fp8.DelayedScaling(amax_history_len=8)
LAYERS, STEPS = 3, 6


def width() -> int:
    return 1024 if on_gpu() else 64


def batch(number: int) -> jax.Array:
    rows = 2048 if on_gpu() else 64
    return jax.random.normal(jax.random.key(number), (rows, width()), jnp.bfloat16) * 1.5**number


def kernels() -> jax.Array:
    return jax.random.normal(jax.random.key(99), (LAYERS, width(), width())) / np.sqrt(width())


def layer(x, kernel, state):
    y = fp8.einsum("TD,DM->TM", x, kernel, recipe=RECIPE, state=state, preferred_element_type=jnp.bfloat16)
    return jax.nn.silu(y)


def mean_of_squares(y):
    return jnp.mean(y.astype(jnp.float32) ** 2) / 64


def relative(found, expected):
    difference, expected = (array.astype(jnp.float32).ravel() for array in (found - expected, expected))
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(expected))


def unrolled(kernels, states, x):
    for i in range(LAYERS):
        x = layer(x, kernels[i], jax.tree.map(lambda leaf, i=i: leaf[i], states))
    return mean_of_squares(x)


def scanned(kernels, states, x):
    return mean_of_squares(jax.lax.scan(jax.checkpoint(lambda x, of: (layer(x, *of), None)), x, (kernels, states))[0])


def first_states():
    return jax.vmap(lambda kernel: fp8.init_state(RECIPE, kernel))(kernels())


def check_steps(report: Report):
    """Of one layer, beside our own Dense."""
    dense = fp8.Dense(width(), recipe=RECIPE, use_bias=False)
    kernel = kernels()[0]
    state = fp8.init_state(RECIPE, kernel)

    def carried_loss(kernel, state, x):
        y = fp8.einsum("TD,DM->TM", x, kernel, recipe=RECIPE, state=state, preferred_element_type=jnp.bfloat16)
        return mean_of_squares(y)

    own = {"params": {"kernel": kernel}, "fp8": state}
    step = jax.jit(jax.value_and_grad(carried_loss, (0, 1)))
    own_step = jax.jit(fp8.value_and_grad(lambda variables, x: mean_of_squares(dense.apply(variables, x))))
    for number in range(STEPS):
        poison(0x5A)
        loss, (grad, state) = step(kernel, state, batch(number))
        expected, grads, fp8_state = own_step(own, batch(number))
        own["fp8"] = fp8.update_state(fp8_state, RECIPE)
        for name, found, wanted in (("loss", loss, expected), ("gradient", grad, grads["kernel"])):
            if on_gpu():
                report.bits(name, found, wanted, f"step {number}")
        jax.tree.map(lambda a, b, n=number: report.bits("state", a, b, f"step {n}"), state, own["fp8"])
    history = np.asarray(state["amax_history"])
    report.expect("controls", len(np.unique(history[0, -STEPS:])) == STEPS, f"amaxes of steps: {history[0]}")


def check_loops(report: Report):
    """A loop over layers with remat, beside the layers one after the other."""
    states = {"scanned": first_states(), "unrolled": first_states()}
    steps = {"scanned": scanned, "unrolled": unrolled}
    steps = {name: jax.jit(jax.value_and_grad(loss, (0, 1))) for name, loss in steps.items()}
    for number in range(STEPS):
        found = {}
        for name, step in steps.items():
            poison(0x5A)
            found[name] = step(kernels(), states[name], batch(number))
            states[name] = found[name][1][1]
        (loss, (grads, _)), (wanted, (expected, _)) = found["scanned"], found["unrolled"]
        report.expect("losses of a loop", abs(float(loss) / float(wanted) - 1) < 1e-3, f"{number}: {loss}, {wanted}")
        off = relative(grads, expected)
        report.worst["of gradients, a loop beside layers one by one"] = off
        report.expect("gradients of a loop", off < 0.02, f"step {number}: off by {off}")
    for name, state in states.items():
        history = np.asarray(state["amax_history"])
        report.expect("histories are filled", bool((history[:, :, -STEPS:] > 0).all()), f"{name}: {history[:, :, -3:]}")
        wanted = history.max(-1) / np.array([448, 448, 57344], np.float32)
        report.expect("scales", np.allclose(state["scale"], wanted, rtol=1e-6), name)


def check_groups(report: Report):
    experts, rows = 4, 144  # rows that no 128 divides
    x = jax.random.normal(jax.random.key(1), (experts, rows, width()), jnp.bfloat16)
    own = jax.random.normal(jax.random.key(2), (experts, width(), 2 * width()), jnp.bfloat16) / np.sqrt(width())
    recipes = {"delayed": RECIPE, "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}
    recipes = recipes if on_gpu() else {name: recipes[name] for name in ("delayed", "current")}
    for name, recipe in recipes.items():
        state = fp8.init_state(recipe, own)

        def loss(x, own, state, multiply):
            return jnp.sum(jnp.sin(multiply(x, own, state).astype(jnp.float32))) / 4096

        def grouped(x, own, state, recipe=recipe):
            return fp8.einsum("ECD,EDH->ECH", x, own, recipe=recipe, state=state)

        def plain(x, own, state):
            return jnp.einsum("ECD,EDH->ECH", x, own)

        poison(0x5A)
        found, expected = (
            jax.jit(jax.value_and_grad(lambda x, own, state, f=f: loss(x, own, state, f), (0, 1, 2)))(x, own, state)
            for f in (grouped, plain)
        )
        for part, a, b in zip(("input", "kernels"), found[1], expected[1], strict=False):
            off, wrong = relative(a, b), relative(a, jnp.roll(b, 1, axis=0))
            report.worst[f"of the gradient of {part}, {name}"] = off
            report.expect("grouped gradients", 0 < off < 0.12, f"{name}, {part}: off by {off}")
            report.expect("controls", wrong > 0.5, f"{name}, {part}: off by {wrong} from those of other groups")
        if recipe.has_state:
            largest = [float(jnp.max(jnp.abs(each))) for each in (x, own)]
            history = np.asarray(found[1][2]["amax_history"])[:, -1]
            report.expect("state of groups", history[:2].tolist() == largest and history[2] > 0, f"{history} {largest}")


def check_examples(report: Report):
    """Layers under `jax.vmap` have the bits of a call with the whole batch."""
    kernel, x = kernels()[0], batch(0).reshape(-1, 16, width())
    state = CarriedState.first(RECIPE, kernel)

    def one(x, kernel, state):
        numbers = ((x.ndim - 1,), (0,)), ((), ())
        return vmapped_product("layer", RECIPE, x, kernel, numbers, state, None, jnp.bfloat16)

    by_example = jax.vmap(jax.vmap(one, (0, None, None)), (0, None, None))
    results = []
    for multiply in (by_example, one):
        poison(0x5A)
        step = jax.jit(jax.value_and_grad(lambda k, s, x, f=multiply: mean_of_squares(f(x, k, s)), (0, 1)))
        results.append(step(kernel, state, x))
    jax.tree.map(lambda a, b: report.bits("by example", a, b, "loss, gradient, state"), *results)
    report.expect("controls", float(results[0][1][1].amax_history[0, -1]) == float(jnp.max(jnp.abs(x))), "amax")


CHECKS = [check_steps, check_loops, check_groups, check_examples]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
