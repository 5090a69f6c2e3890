"""One optimizer step of a GPT, from gradients to FP8 weights: Optax and jax_fp8, against a copy of the same bytes.

    python benchmarks/optimizer_step.py                              # GPT 1.3b, all variants: about 90 s on one H200
    python benchmarks/optimizer_step.py --variants optax in_place
    python benchmarks/optimizer_step.py --self-test                  # a tiny model anywhere; its times mean nothing

A step reads bfloat16 gradients, updates parameters and optimizer state, which are donated, and casts every kernel to
E4M3 in both orientations. Memory bandwidth limits it, so the table also lists the bytes that it must read and write:
each array once for each pass that cannot be fused with another. Afterwards every parameter must have changed, be
finite, and agree with its cast.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tables
from jax.tree_util import tree_leaves_with_path
from optimizer_variants import VARIANTS, Variant
from variants import SHAPES, Shape

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels.adam import TARGET
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.optim.updates import NewParam
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

HERE = pathlib.Path(__file__).resolve()
RUNS = 5  # timed, each of so many programs in a row
PROGRAMS = 5  # of many steps each
SQUARES = fp8.BlockScaling().cast(KERNEL, None, lambda: jnp.float32(1))
COPIED_WORDS = 2**29


# --- a step ---------------------------------------------------------------------------------------------------------


def model_params(shape: Shape) -> Any:
    """The shapes of the parameters."""
    names = ("vocab_size", "num_layers", "num_heads", "hidden_size")
    config = fp8.GPTConfig(**{name: getattr(shape, name) for name in names}, max_seq_len=shape.seq_len)
    tokens = jax.ShapeDtypeStruct((1, shape.seq_len), jnp.int32)
    return jax.eval_shape(fp8.GPT(config, recipe=None).init, jax.random.key(0), tokens)["params"]


def random_tree(like: Any, size: float, dtype, seed: int) -> Any:
    """Normal numbers, one program for each shape."""
    normal = jax.jit(lambda key, shape: (size * jax.random.normal(key, shape)).astype(dtype), static_argnums=1)
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def gemm_kernels(params: Any) -> dict[LayerPath, jax.Array]:
    """The kernels that GEMMs read in FP8, by path."""
    leaves = {names_of(path): leaf for path, leaf in tree_leaves_with_path(params)}
    return {names: leaf for names, leaf in leaves.items() if names[-1] == "kernel" and leaf.ndim == 2}


@partial(jax.jit, static_argnums=1)
def first_cast(kernel: jax.Array, by_tile: bool = False) -> Fp8Pair:
    cast = SQUARES if by_tile else Cast.from_amax(fp8.E4M3, amax(kernel), ScaleFormula())
    return quantize_transpose(kernel, cast)


def casts_with(variant: Variant, paths: Iterable[LayerPath], scales: jax.Array) -> dict[LayerPath, Cast]:
    """How each weight is cast, by path."""
    rows = enumerate(sorted(paths))
    return {path: SQUARES if variant.by_tile else Cast.with_row(fp8.E4M3, scales, row) for row, path in rows}


def make_step(variant: Variant):
    """`(params, opt_state, casts), gradients, scales -> params, opt_state, casts`; `scales` f32[casts], one array."""
    tx = variant.optimizer()

    def step(state, gradients, scales):
        params, opt_state, casts = state
        how = casts_with(variant, casts, scales)
        if variant.settings is None:
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        requests = {path: (pair, how[path]) for path, pair in casts.items()}
        request = fp8.InPlace(requests if variant.casts_in_place else {})
        updates, opt_state = tx.update(gradients, opt_state, params, in_place=request)  # Optax's own ignores it
        params = fp8.apply_updates(params, updates)
        if variant.casts_in_place:
            updated = tree_leaves_with_path(updates, is_leaf=lambda node: isinstance(node, NewParam))
            casts = {names_of(path): new.cast for path, new in updated if new.cast is not None}
        else:
            kernels = gemm_kernels(params)
            casts = {path: quantize_transpose(kernel, how[path]) for path, kernel in kernels.items()}
        return params, opt_state, casts

    return step


def many_steps(variant: Variant, steps: int):
    """Several steps as one program: passing thousands of arrays to a program takes the host longer than a step takes
    the device.
    """
    step = make_step(variant)

    def run(state, gradients, scales):
        def body(i, state):
            fresh, _ = jax.lax.optimization_barrier((gradients, i))  # or casts of them would leave the loop
            return step(state, fresh, scales)

        return jax.lax.fori_loop(0, steps, body, state)

    return run


def bytes_moved(variant: Variant, state, gradients) -> int:
    """The bytes that a step must read and write."""
    params, opt_state, casts = state
    read = variant.gradient_passes * _bytes(gradients) + _bytes(opt_state) + _bytes(params)
    written = sum(_bytes((copies.rowwise.values, copies.columnwise.values)) for copies in casts.values()) + _bytes(
        opt_state
    )
    if not variant.casts_in_place:
        read += _bytes(gemm_kernels(params))
    return read + written + _bytes(params)


def _bytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# --- measuring ------------------------------------------------------------------------------------------------------


def milliseconds(run, state) -> tuple[Any, float]:
    """The last state, and the time of one program in a row of programs.

    Passing thousands of arrays takes the host milliseconds; for all programs but the first, the device is busy
    meanwhile.
    """
    _, state = _seconds(run, state, 2)
    times = []
    for _ in range(RUNS):
        one, state = _seconds(run, state, 1)
        several, state = _seconds(run, state, PROGRAMS)
        times.append((several - one) / (PROGRAMS - 1))
    return state, 1e3 * statistics.median(times)


def _seconds(run, state, programs: int) -> tuple[float, Any]:
    start = time.perf_counter()
    for _ in range(programs):
        state = run(state)
    jax.block_until_ready(state)
    return time.perf_counter() - start, state


def measure_copy(words: int, steps: int) -> float:
    """Bytes a second of the simplest kernel: every word read, changed and written back."""
    flips = jax.jit(lambda x: jax.lax.fori_loop(0, steps, lambda i, x: x ^ i.astype(jnp.uint32), x), donate_argnums=0)
    _, ms = milliseconds(flips, jnp.zeros((words,), jnp.uint32))
    return 8 * words * steps / ms * 1e3


def measure(name: str, shape: Shape, gradients: Any, steps: int) -> dict:
    """Run one variant, and free its arrays."""
    variant = VARIANTS[name]
    params = random_tree(gradients, 0.02, variant.param_dtype, seed=1)
    before = samples(params)
    casts = {path: first_cast(kernel, variant.by_tile) for path, kernel in gemm_kernels(params).items()}
    # One array, as update_state makes them; by tile nobody reads it.
    scales = jnp.stack([jnp.max(casts[path].rowwise.scale) for path in sorted(casts)])
    state = params, jax.jit(variant.optimizer().init)(params), casts
    del params, casts
    moved = bytes_moved(variant, state, gradients)
    options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    start = time.perf_counter()
    run = jax.jit(many_steps(variant, steps), donate_argnums=0, compiler_options=options)
    program = run.lower(state, gradients, scales).compile()
    compile_s = time.perf_counter() - start
    state, ms = milliseconds(lambda state: program(state, gradients, scales), state)
    ms /= steps
    check(variant, before, state, scales)
    memory = program.memory_analysis()
    allocated = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    num_params = sum(leaf.size for leaf in jax.tree.leaves(gradients))
    return {
        "variant": name,
        "num_params": num_params,
        "leaves": len(jax.tree.leaves(gradients)),
        "ms": ms,
        "bytes": moved,
        "bytes_a_param": moved / num_params,
        "bytes_a_second": moved / ms * 1e3,
        "launches": program.as_text().count(f'custom_call_target="{TARGET}"'),
        "program_gib": (allocated - memory.alias_size_in_bytes) / 2**30,
        "compile_s": compile_s,
    }


def samples(params: Any) -> list[np.ndarray]:
    """The first elements of every parameter, copied: the parameters are about to be overwritten."""
    return [np.array(leaf.reshape(-1)[:64], np.float32) for leaf in jax.tree.leaves(params)]


@jax.jit
def is_cast_of(copies: Fp8Pair, kernel: jax.Array, cast: Cast) -> jax.Array:
    fresh = quantize_transpose(kernel, cast)
    return jnp.all(jnp.stack([jnp.all(a == b) for a, b in zip(*map(jax.tree.leaves, (copies, fresh)), strict=True)]))


def check(variant: Variant, before: list[np.ndarray], state, scales: jax.Array) -> None:
    """Raise unless a step has computed something correct: a fast step that computes nothing is no step."""
    params, _, casts = state
    still = sum(np.array_equal(old, new) for old, new in zip(before, samples(params), strict=True))
    infinite = sum(not bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(params))
    kernels, expected = gemm_kernels(params), casts_with(variant, casts, scales)
    wrong = sum(not bool(is_cast_of(casts[path], kernels[path], cast)) for path, cast in expected.items())
    if still or infinite or wrong:
        raise ValueError(
            f"every parameter must have moved, be finite and be cast, but {still} stood still, {infinite} are not "
            f"finite and {wrong} have other FP8 values; run tests/gpu/adam_check.py"
        )


# --- the report -----------------------------------------------------------------------------------------------------


def markdown(environment: dict, copy: float, steps: int, results: list[dict]) -> str:
    headings = "variant", "ms a step", "bytes a param", "TB/s", "share of copy", "launches", "program GiB", "compile s"
    rows = [["copy", "-", "-", copy / 1e12, 1.0, "-", "-", "-"]]
    for r in results:
        label = VARIANTS[r["variant"]].label
        if "failed" in r:
            rows.append([label, f"failed: {r['failed']}", *["-"] * 6])
            continue
        rate = r["bytes_a_second"]
        figures = [f"{r['ms']:.2f}", f"{r['bytes_a_param']:.1f}", rate / 1e12, rate / copy]
        figures += [r[name] for name in ("launches", "program_gib", "compile_s")]
        rows.append([label, *figures])
    measured = next((r for r in results if "failed" not in r), None)
    model = f"{measured['num_params']:,} parameters in {measured['leaves']} arrays. " if measured else ""
    method = (
        f"{model}bfloat16 gradients; every step casts the kernels of the GEMMs to E4M3 in both orientations. `ms a "
        f"step` is what a program of {steps} steps adds to others in a row, divided by {steps}, the median of {RUNS}: "
        "device time, without the host's for a call. `bytes a param` counts what a step must read and write, "
        "`launches` the custom calls of the optimizer, `program GiB` arguments, results and scratch."
    )
    return "\n\n".join(
        ["# One optimizer step", tables.environment_line(environment), method, tables.table(headings, rows)]
    )


def write_results(directory: pathlib.Path, environment: dict, copy: float, steps: int, results: list[dict]) -> None:
    """`optimizer_step.md` and `.json`, rewritten after each variant so that an interrupted run keeps what it has."""
    tables.write(directory / "optimizer_step.md", markdown(environment, copy, steps, results))
    found = {"environment": environment, "copy_bytes_a_second": copy, "steps": steps, "results": results}
    tables.write(directory / "optimizer_step.json", json.dumps(found, indent=1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--shape", choices=SHAPES, default="1.3b")
    parser.add_argument("--steps", type=int, default=10, help="steps in a program, at least 1")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--self-test", action="store_true", help="a tiny shape and few steps, to run the whole file")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    shape = SHAPES["tiny" if options.self_test else options.shape]
    steps = 2 if options.self_test else options.steps
    environment = tables.environment()
    copy = measure_copy(2**16 if options.self_test else COPIED_WORDS, steps)
    gradients = random_tree(model_params(shape), 1e-3, jnp.bfloat16, seed=0)
    results = []
    for name in options.variants:
        try:
            found = measure(name, shape, gradients, steps)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the other rows are still worth having
            found = {"variant": name, "failed": str(error).splitlines()[0][:300]}
        gc.collect()
        print(f"{name}: {found.get('failed') or str(round(found['ms'], 2)) + ' ms a step'}", flush=True)
        results.append(found)
        write_results(options.output, environment, copy, steps, results)
    print((options.output / "optimizer_step.md").read_text())
    print(f"written to {options.output}/optimizer_step.md and optimizer_step.json")
    return 1 if any("failed" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
