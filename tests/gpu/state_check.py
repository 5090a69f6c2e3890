"""The kernel that updates the state of delayed scaling, on a GPU: bit for bit against NumPy, and how fast it is.

    python tests/gpu/state_check.py --output state_check.json      # seconds on an H200
    python tests/gpu/state_check.py --self-test                    # the reference against NumPy, few rows, on a CPU

Steps follow each other on donated arrays, as in training, over memory filled with a pattern. Subnormal numbers, which
XLA's CPU compiler flushes to zero, are checked only on a GPU. Ends with one line per group of checks, and with exit
code 1 if a check failed.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.adam_check import poison
from gpu.kernel_check import E4M3
from gpu.report import Report, Script, as_bytes, on_gpu, run_script

from jax_fp8.core.formats import HYBRID, Format
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.core.state import gemm_states, map_gemms
from jax_fp8.kernels.update_state import TARGET, _reference, finish_step
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

LENGTHS = (1, 2, 3, 4, 16, 255, 256, 257, 1023, 1024, 1025, 2048, 4099)
STACKS = ((), (3,), (2, 2), (), (1,))  # leading dims of leaves
FORMATS = (HYBRID, Format(forward=E4M3, backward=E4M3))
RECIPES = [
    DelayedScaling(amax_history_len=5, margin=margin, amax_compute_algo=algorithm, fp8_format=fp8_format)
    for margin, algorithm, fp8_format in itertools.product((0, 3, -2, 120, -126), ("max", "most_recent"), FORMATS)
]
RECIPES += [DelayedScaling(amax_history_len=5, margin=margin, forget_outliers=True) for margin in (0, 3, -2)]
PLAIN = RECIPES[0]
SPECIAL = (0.0, 1.0, 448.0, 3.4e38, 2.0**-125, 1e-30, np.inf, np.nan)
TINY = (2.0**-149, 1e-40, 1.1754942e-38, 2.0**-126)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def oracle(state, recorded, recipe) -> tuple[dict, np.ndarray]:
    """Every GEMM of every leaf, and the counts of `reference.count_amaxes`."""
    dtypes = [recipe.fp8_format.forward] * 2 + [recipe.fp8_format.backward]
    remaining, counts = iter(np.asarray(recorded).reshape(-1, 3)), np.zeros(2, np.int32)

    def update(gemm):
        scale, history = np.array(gemm["scale"]), np.array(gemm["amax_history"])
        for index in np.ndindex(scale.shape[:-1]):
            history[index][:, 0] = np.maximum(history[index][:, 0], next(remaining))
            counts[:] += reference.count_amaxes(history[index][:, 0], scale[index], dtypes)
            settings = dtypes, recipe.margin, recipe.amax_compute_algo, recipe.forget_outliers
            scale[index], history[index] = reference.update_state(scale[index], history[index], *settings)
        return {"scale": scale, "amax_history": history}

    with np.errstate(all="ignore"):
        return map_gemms(update, state), counts


# ---- states ----------------------------------------------------------------------------------------------------------


def amaxes(random, *shape) -> np.ndarray:
    low, high = (-149, 127) if on_gpu() else (-60, 60)
    return np.exp2(random.uniform(low, high, shape)).astype(np.float32)


def seen(random, *shape) -> np.ndarray:
    """The recorded amaxes of a step: some tensors did not run, and some were not finite."""
    special = random.choice(np.float32([0, 0, 0, np.inf, np.nan]), shape)
    return np.where(random.random(shape) < 0.4, special, amaxes(random, *shape))


def state_of(random, stacks, length) -> dict:
    """One leaf for each of these leading dims, some of its amaxes staged."""

    def gemm(stack):
        history = amaxes(random, *stack, 3, length)
        history[..., 0] = seen(random, *stack, 3)
        return {"scale": amaxes(random, *stack, 3), "amax_history": history}

    return {f"{number:04}": gemm(stack) for number, stack in enumerate(stacks)}


def rows_of(state) -> int:
    return sum(gemm["scale"].size for gemm in gemm_states(state))


# ---- running and comparing -------------------------------------------------------------------------------------------

in_place = jax.jit(finish_step, static_argnums=2, donate_argnums=0)
apart = jax.jit(finish_step, static_argnums=2)


def on_device(state) -> dict:
    return jax.tree.map(jnp.array, state)


def compare(report: Report, group: str, got, wanted, label: str):
    arrays = jax.tree_util.tree_leaves_with_path(jax.device_get(got))
    for (path, array), expected in zip(arrays, jax.tree.leaves(wanted), strict=True):
        report.bits(group, array, expected, f"{label}: {jax.tree_util.keystr(path)}{list(np.shape(array))}")


def same_bytes(a, b) -> bool:
    return all(np.array_equal(*map(as_bytes, pair)) for pair in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def check_steps(report: Report, group: str, random, stacks, recipe, steps=4):
    """Some steps on donated arrays; each starts from the state of the one before, with new amaxes."""
    kept = on_device(state_of(random, stacks, recipe.amax_history_len))
    for step in range(steps):
        recorded = seen(random, rows_of(kept))
        wanted = oracle(jax.device_get(kept), recorded, recipe)
        poison(0xA5 if step % 2 else 0x5A)
        kept, counts = in_place(kept, jnp.asarray(recorded), recipe)
        compare(report, group, (kept, counts), wanted, f"step {step} of {recipe}")


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_controls(report: Report):
    """Negative controls: every number of an update, changed by little, must change the result."""
    random = np.random.default_rng(0)
    state = state_of(random, STACKS, 5)
    recorded = seen(random, rows_of(state))
    got = jax.device_get(apart(on_device(state), jnp.asarray(recorded), PLAIN))
    compare(report, "controls", got, oracle(state, recorded, PLAIN), "as it should be")

    def control(name, wrong):
        noticed = not same_bytes(got, wrong)
        report.expect("controls: a wrong number is noticed", noticed, f"{name} changes nothing")

    control("the margin", oracle(state, recorded, RECIPES[4]))
    control("the algorithm", oracle(state, recorded, RECIPES[2]))
    control("the format", oracle(state, recorded, RECIPES[1]))
    control("the order of the rows", oracle(state, recorded[::-1], PLAIN))
    control("what was recorded", oracle(state, np.zeros_like(recorded), PLAIN))
    off = np.where(np.isfinite(recorded) & (recorded > 0), np.nextafter(recorded, np.float32(np.inf)), recorded)
    control("the last bit of what was recorded", oracle(state, off, PLAIN))


def check_lengths(report: Report):
    random = np.random.default_rng(1)
    for length, algorithm in itertools.product(LENGTHS[:: 1 if on_gpu() else 4], ("max", "most_recent")):
        recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
        check_steps(report, "lengths of history", random, STACKS, recipe, steps=5 if on_gpu() else 2)


def check_recipes(report: Report):
    random = np.random.default_rng(2)
    for recipe in RECIPES[:: 1 if on_gpu() else 7]:
        check_steps(report, "recipes", random, STACKS * 3, recipe)


def check_many_leaves(report: Report):
    """More leaves than two launches hold, some of them stacked."""
    random, stacks = np.random.default_rng(3), STACKS * (260 if on_gpu() else 4)
    for length in (1, 5):
        check_steps(report, "many leaves", random, stacks, DelayedScaling(amax_history_len=length), steps=2)


def check_special_values(report: Report):
    """Every special number staged, recorded and in the history, each with every other, also where no step leaves it."""
    values = np.float32(SPECIAL + TINY if on_gpu() else SPECIAL)
    grids = np.meshgrid(values, values, np.append(values, np.float32([-1, -np.inf])))
    staged, recorded, old = (grid.reshape(-1) for grid in grids)
    rows = staged.size // 3 * 3
    for length, place in ((2, 1), (1500, 1), (1500, 1024), (1500, 1499))[: 4 if on_gpu() else 1]:
        history = np.full((rows, length), 0.5, np.float32)
        history[:, 0], history[:, place] = staged[:rows], old[:rows]
        state = {
            "gemm": {"scale": np.full((rows // 3, 3), 7, np.float32), "amax_history": history.reshape(-1, 3, length)}
        }
        recipe = DelayedScaling(amax_history_len=length)
        got = apart(on_device(state), jnp.asarray(recorded[:rows]), recipe)
        compare(report, "special values", got, oracle(state, recorded[:rows], recipe), f"{length=} {place=}")


def check_what_is_written(report: Report):
    """Donated arrays are updated in place, others stay unchanged, and both give the same result."""
    random, recipe = np.random.default_rng(4), DelayedScaling()
    state = state_of(random, STACKS, 1024)
    given, recorded = on_device(state), jnp.asarray(seen(random, rows_of(state)))
    kept = apart(given, recorded, recipe)
    compare(report, "not donated, not written", given, state, "the argument")
    report.expect("not donated, not written", not same_bytes(kept[0], state), "the result is the argument")
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(given)]
    updated = in_place(given, recorded, recipe)
    compare(report, "donated or not", updated, jax.device_get(kept), "donated")
    if on_gpu():
        moved = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updated[0])] != addresses
        report.expect("in place", not moved, "a donated array was copied")
    still, counts = in_place(on_device(state), jnp.full(recorded.shape, jnp.inf), recipe)
    for gemm in gemm_states(state):
        gemm["amax_history"][..., 0] = 0
    compare(report, "a step of infinities changes nothing", still, state, "the state")
    report.expect("a step of infinities changes nothing", list(counts) == [recorded.size, 0], f"{counts}")


def check_graphs(report: Report):
    """A CUDA graph, captured, replayed and updated, gives the same bytes as a run without one."""
    random = np.random.default_rng(5)
    start, recipe = state_of(random, STACKS * (20 if on_gpu() else 1), 1024), DelayedScaling()
    options = CUDA_GRAPH_OPTIONS if on_gpu() else {}, {"xla_gpu_enable_command_buffer": ""} if on_gpu() else {}
    programs = [jax.jit(finish_step, static_argnums=2, donate_argnums=0, compiler_options=each) for each in options]
    kept = [on_device(start) for _ in programs]
    for step in range(5):
        recorded = jnp.asarray(seen(random, rows_of(start)))
        results = [program(state, recorded, recipe) for program, state in zip(programs, kept, strict=True)]
        compare(report, "CUDA graph", results[0], jax.device_get(results[1]), f"step {step}")
        kept = [state for state, _ in results]


def check_refusals(report: Report):
    """Every call that breaks the contract raises, and the message names operation and argument."""
    if not on_gpu():
        return  # the reference takes anything
    scale, history = jnp.ones(3), jnp.ones((3, 8))
    names = {"forward": "float8_e4m3fn", "backward": "float8_e5m2"}
    switches = {"most_recent": False, "forget_outliers": False}

    def raw(*leaves, recorded=None, count=jnp.int32, aliased=True, **formats):
        recorded = jnp.zeros(3 * (len(leaves) // 2)) if recorded is None else recorded
        results = [jax.ShapeDtypeStruct((2,), count), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)]
        aliases = {number: number for number in range(1, len(results))} if aliased else None
        call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
        return lambda: call(recorded, *leaves, **names | formats, margin=np.int32(0), **switches)

    cases = [
        (raw(scale), "a scale and a history for each leaf"),
        (raw(scale.astype(jnp.bfloat16), history), "scale of leaf 0 must be float32"),
        (raw(scale, history.astype(jnp.bfloat16)), "history of leaf 0 must be float32"),
        (raw(jnp.ones(4), history), "scale of leaf 0 must end in a dim of 3"),
        (raw(scale, jnp.ones((2, 8))), "history of leaf 0 must have the shape of its scale"),
        (raw(scale, jnp.ones(3)), "history of leaf 0 must have the shape of its scale"),
        (raw(scale, jnp.ones((3, 0))), "history of leaf 0 must have the shape of its scale"),
        (raw(scale, history, jnp.ones((2, 3)), history), "history of leaf 1 must have the shape of its scale"),
        (raw(scale, history, aliased=False), "scale of leaf 0 must be updated in place"),
        (raw(scale, history, recorded=jnp.zeros(6)), "recorded must have shape [3]"),
        (raw(scale, history, recorded=jnp.zeros(3, jnp.bfloat16)), "recorded must be float32"),
        (raw(scale, history, count=jnp.float32), "counts must be int32"),
        (raw(scale, history, forward="bfloat16"), "forward must be float8_e4m3fn or float8_e5m2, got bfloat16"),
        (raw(scale, history, backward="float8"), "backward must be float8_e4m3fn or float8_e5m2, got float8"),
    ]
    for call, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(call)())
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            report.expect(
                "refusals", fragment in str(error) and TARGET in str(error), f"{fragment!r} is not in: {error}"
            )


# ---- speed -----------------------------------------------------------------------------------------------------------


def time_update(report: Report, updates=50):
    """The 96 GEMMs of 24 layers, as one kernel and as XLA's own: updates one after the other in one program."""
    random, recipe = np.random.default_rng(6), DelayedScaling()
    recorded = jnp.asarray(seen(random, 288))

    def by_xla(state):
        leaves = [gemm[name] for gemm in gemm_states(state) for name in ("scale", "amax_history")]
        updated = iter(_reference(recipe, recorded, *leaves, split={})[1:])
        return map_gemms(lambda _: {"scale": next(updated), "amax_history": next(updated)}, state)

    def by_kernel(state):
        return finish_step(state, recorded, recipe)[0]

    for what, update in (("kernel", by_kernel), ("XLA", by_xla)):

        def chain(state, update=update):
            for _ in range(updates):
                state = jax.lax.optimization_barrier(update(state))
            return state

        program = jax.jit(chain, donate_argnums=0, compiler_options=CUDA_GRAPH_OPTIONS)
        state, samples = on_device(state_of(random, [()] * 96, 1024)), []
        for _ in range(8):
            start = time.perf_counter()
            state = jax.block_until_ready(program(state))
            samples.append(time.perf_counter() - start)
        report.timings.append({"what": f"96 GEMMs, {what}", "us": statistics.median(samples) / updates * 1e6})


# ---- the report ------------------------------------------------------------------------------------------------------

CHECKS = [check_controls, check_lengths, check_recipes, check_many_leaves, check_special_values]
CHECKS += [check_what_is_written, check_graphs, check_refusals]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, [time_update], target=TARGET, self_test=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
