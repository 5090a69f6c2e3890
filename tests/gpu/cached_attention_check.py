"""The attention of a new token to a cache, on a GPU: its result by float64 and what it writes bit for bit; then speed.

    python tests/gpu/cached_attention_check.py --output cached_attention_check.json      # two minutes on an H200
    python tests/gpu/cached_attention_check.py --self-test              # the reference in the kernel's place, on a CPU

Every program runs twice, each time over memory filled with another pattern, and must give the same bytes. Slots that
are not seen hold NaN. Ends with one line per timing and per group of checks, and with exit code 1 if a check failed.
"""

import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import IN_A_GRAPH, seconds_per_call, twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script
from new_tokens import E4M3, attend, error_of, make, make_haystack, written

from jax_fp8.core.scale import scale_from_amax
from jax_fp8.kernels.cached_attention import attend_to_cache
from jax_fp8.kernels.casting import quantize_reference

BFLOAT16 = ml_dtypes.bfloat16
SMALL = [
    {"group": 1, "head_dim": 64},
    {"group": 4, "head_dim": 128, "pairs": 64},
    {"group": 5, "head_dim": 80, "pairs": 10, "kv_heads": 3},
    {"group": 16, "head_dim": 256, "window": 9},
    {"group": 8, "head_dim": 16, "logit_cap": 2.0, "scale": 1.0},
    {"group": 2, "head_dim": 96, "step": 0, "lengths": [0, 24]},
]
LONG = {"slots": 2304, "prompt_slots": 2048, "step": 200}
LARGE = [
    {"batch": 1, "kv_heads": 16, "group": 1, "head_dim": 128, "slots": 768, "prompt_slots": 512, "lengths": [512]},
    {"batch": 1, "kv_heads": 8, "group": 4, "head_dim": 128, "pairs": 64, "lengths": [2048], **LONG},
    {"batch": 1, "kv_heads": 8, "group": 4, "head_dim": 64, "lengths": [1], **LONG},
    {"batch": 3, "kv_heads": 2, "group": 7, "head_dim": 128, "pairs": 64, "lengths": [2048, 0, 777], **LONG},
    {"batch": 3, "kv_heads": 8, "group": 2, "head_dim": 256, "window": 1024, "lengths": [2048, 3, 1500], **LONG},
    {"batch": 3, "kv_heads": 1, "group": 16, "head_dim": 96, "lengths": [2048, 2047, 64], **LONG},
    {"batch": 7, "kv_heads": 8, "group": 4, "head_dim": 64, "lengths": [2048, 0, 777, 1, 2047, 1024, 1500], **LONG}
    | {"pairs": 32},
    {"batch": 3, "kv_heads": 100, "group": 1, "head_dim": 80, "lengths": [200, 3, 77], "slots": 256}
    | {"prompt_slots": 200, "step": 55},
    {"batch": 3, "kv_heads": 140, "group": 2, "head_dim": 64, "lengths": [200, 3, 77], "slots": 256}
    | {"prompt_slots": 200, "step": 55},
]
KINDS = [(np.float32, None), (BFLOAT16, None), (np.float16, None), (BFLOAT16, E4M3), (np.float32, E4M3)]
REPEATS, STEPS = 5, 16  # samples of a timing; tokens of one program
CACHES_BYTES = 160 << 20  # of all layers together, more than the L2 cache holds
TIMED = [(1, 16, 16, 128, 768), (8, 16, 16, 128, 768), (64, 16, 16, 128, 768), (1, 32, 8, 64, 768)]
TIMED += [(1, 32, 8, 128, slots) for slots in (768, 2048, 8192, 32768)]
TIMED += [(8, 32, 8, 128, 8192), (64, 32, 8, 128, 768)]  # batch, heads, key heads, features, slots
TIMED += [(8, 32, 8, 64, slots) for slots in (2048, 8192, 32768)]


@partial(jax.jit, static_argnames=("prompt_slots", "scale", "window", "logit_cap"), donate_argnums=0)
def run(caches, query, key, value, lengths, step, rotary, **how):
    keys, values, *scales = caches
    how |= dict(zip(("key_scales", "value_scales"), scales, strict=False))
    return tuple(
        array
        for array in attend_to_cache(query, key, value, keys, values, lengths, step, rotary=rotary, **how)
        if array is not None
    )


def call(problem, program=run):
    """Attended (batch, kv_heads, group, features), keys, values and scales."""
    batch, kv_heads, group, features = problem.query.shape
    caches = tuple(jnp.array(array) for array in (problem.keys, problem.values, *(problem.scales or ())))
    query = problem.query.reshape(batch, kv_heads * group, features)
    how = {"prompt_slots": problem.prompt_slots, "scale": problem.scale}
    how |= {"window": problem.window or None, "logit_cap": problem.logit_cap or None}
    step, rotary = jnp.int32(problem.step), problem.rotary
    attended, *others = program(caches, query, problem.key, problem.value, problem.lengths, step, rotary, **how)
    return attended.reshape(problem.query.shape), *others


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_numbers(report: Report):
    for number, shape in enumerate(SMALL + (LARGE if on_gpu() else [])):
        for dtype, cache in KINDS if on_gpu() else [KINDS[number % len(KINDS)], KINDS[(number + 3) % len(KINDS)]]:
            problem = make(dtype=dtype, cache=cache, **shape)
            label = f"{np.dtype(dtype).name}, {np.dtype(cache or dtype).name}, {shape}"
            first, second = twice_over_poison(partial(call, problem))
            expected = written(problem)
            for name, got, again in zip(("attended", "keys", "values", *("scales",) * 2), first, second, strict=False):
                report.bits("two runs, the same bytes", got, again, f"{name}: {label}")
            for name, got, wanted in zip(("keys", "values", *("scales",) * 2), first[1:], expected, strict=False):
                report.bits("what is written", got, wanted, f"{name}: {label}")
            error = error_of(problem, expected, first[0])
            report.worst["attention, of what is allowed"] = max(
                error, report.worst.get("attention, of what is allowed", 0)
            )
            report.expect("attention", error <= 1, f"off by {error:.2f} times what is allowed: {label}")


def check_controls(report: Report):
    """Negative controls: another window, cap, scale or step, or the result of another row, is noticed."""
    problem = make(group=4, head_dim=64, pairs=8, window=9, logit_cap=2.0, scale=1.0, lengths=[20, 24])
    (attended, *caches), _ = twice_over_poison(partial(call, problem))
    report.expect("controls", error_of(problem, caches, attended) <= 1, "the right one")
    for wrong in ({"window": 8}, {"window": 10}, {"logit_cap": 2.1}, {"scale": 1.02}, {"rotary": None}, {"step": 4}):
        error = error_of(replace(problem, **wrong), caches, attended)
        report.expect("controls", error > 1, f"{[*wrong]} is not noticed")
    report.expect("controls", error_of(problem, caches, attended[::-1]) > 1, "another row is not noticed")


def check_large_logits(report: Report):
    """Maxima that rise and fall from slot to slot, at which an exponential overflows in float32."""
    for cache in (None, E4M3):
        shape = LONG if on_gpu() else {"slots": 300, "prompt_slots": 280}
        problem = make(cache=cache, group=4, head_dim=64, scale=1.0, lengths=[shape["prompt_slots"]] * 2, **shape)
        slopes = np.linspace(0, 8, problem.prompt_slots), np.linspace(8, 0, problem.prompt_slots)
        for row, slope in enumerate(slopes):
            rows = problem.keys[row, :, : problem.prompt_slots]
            rows[:] = (rows.astype(np.float32) * slope[:, None]).astype(rows.dtype)
        problem = replace(problem, query=(problem.query.astype(np.float32) * 10).astype(BFLOAT16))
        first, _ = twice_over_poison(partial(call, problem))
        wanted, _ = attend(problem, written(problem))
        right = np.allclose(first[0].astype(np.float64), wanted, rtol=2**-7, atol=4e-3)
        report.expect("large logits", bool(right), f"a cache in {np.dtype(cache or BFLOAT16).name}")


def check_needles(report: Report):
    """In a long prompt one slot decides, wherever it lies."""
    slots = 32768 if on_gpu() else 512
    for cache in (None, E4M3):
        for slot in (0, slots // 3, slots - 200):
            shape = {"slots": slots, "prompt_slots": slots - 128, "step": 100, "batch": 2, "kv_heads": 4, "group": 4}
            problem = make_haystack(slot, cache=cache, head_dim=64, **shape)
            label = f"slot {slot} of {slots}, {np.dtype(cache or BFLOAT16).name}"
            first, second = twice_over_poison(partial(call, problem))
            report.bits("needles: two runs", first[0], second[0], label)
            report.expect("needles", error_of(problem, written(problem), first[0]) <= 1, label)
            value = problem.values[:, :, None, slot].astype(np.float32)
            if problem.scales is not None:
                value = value * problem.scales[1][:, :, None, slot, None]
            found = np.abs(first[0].astype(np.float32) - value).max() < 0.2 * np.abs(value).max()
            report.expect("needles", bool(found), f"{label}: its value")
            value = np.roll(value, 1, axis=-1)
            other = np.abs(first[0].astype(np.float32) - value).max() < 0.2 * np.abs(value).max()
            report.expect("needles: control", not other, f"{label}: features in another order")


def check_in_place(report: Report):
    """Donated caches keep their addresses, so nothing was copied; a graph gives the same bytes as a plain program."""
    if not on_gpu():
        return
    for cache in (None, E4M3):
        problem = make(cache=cache, group=4, head_dim=128, batch=3, kv_heads=8, lengths=[2048, 5, 700], **LONG)
        caches = tuple(jnp.array(array) for array in (problem.keys, problem.values, *(problem.scales or ())))
        addresses = [array.unsafe_buffer_pointer() for array in caches]
        query = problem.query.reshape(3, 32, 128)
        tokens = query, problem.key, problem.value, problem.lengths, jnp.int32(problem.step), None
        _, *updated = run(caches, *tokens, prompt_slots=problem.prompt_slots, scale=problem.scale)
        report.expect("in place", [array.unsafe_buffer_pointer() for array in updated] == addresses, str(cache))
        captured = partial(jax.jit, static_argnames=("prompt_slots", "scale", "window", "logit_cap"))
        programs = [captured(run.__wrapped__, compiler_options=how) for how in (IN_A_GRAPH, NO_GRAPH)]
        for number in range(4):
            moved = replace(problem, step=problem.step + number)
            for got, wanted in zip(*(call(moved, program) for program in programs), strict=True):
                report.bits("CUDA graph", got, wanted, f"step {number}")


NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}


# ---- speed -----------------------------------------------------------------------------------------------------------


def fused(query, key, value, caches, lengths, step, rotary, prompt_slots):
    scales = dict(zip(("key_scales", "value_scales"), caches[2:], strict=False))
    how = {"prompt_slots": prompt_slots, "scale": query.shape[-1] ** -0.5, "rotary": rotary}
    attended, *updated = attend_to_cache(query, key, value, *caches[:2], lengths, step, **how, **scales)
    return attended, tuple(updated[: len(caches)])


def by_xla(query, key, value, caches, lengths, step, rotary, prompt_slots):
    """The same as XLA's kernels: how a new token was attended before there was one for all of it."""
    query, key = (_rotated(x, *rotary) for x in (query, key))
    caches = list(caches)
    for at, new in enumerate((key, value)):
        rows = new
        if len(caches) == 4:
            scale = scale_from_amax(
                jnp.max(jnp.abs(new.astype(jnp.float32)), axis=-1, keepdims=True), jnp.float8_e4m3fn
            )
            rows = quantize_reference(new, jnp.float8_e4m3fn, scale)
            caches[2 + at] = lax.dynamic_update_slice_in_dim(caches[2 + at], scale, prompt_slots + step, axis=2)
        caches[at] = lax.dynamic_update_slice_in_dim(caches[at], rows[:, :, None], prompt_slots + step, axis=2)
    keys, values, *scales = caches
    batch, kv_heads, slots, features = keys.shape
    grouped = query.reshape(batch, kv_heads, -1, features)
    into_float32 = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, keys.astype(query.dtype), **into_float32)
    logits = (logits * scales[0][:, :, None] if scales else logits) * features**-0.5
    slot = jnp.arange(slots)[None]
    seen = jnp.where(slot < prompt_slots, slot < lengths[:, None], slot - prompt_slots <= step)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
    weights = (weights * scales[1][:, :, None] if scales else weights).astype(query.dtype)
    attended = jnp.einsum("bkgs,bksd->bkgd", weights, values.astype(query.dtype), **into_float32)
    return attended.astype(query.dtype).reshape(query.shape), tuple(caches)


def _rotated(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def seconds_of(attention, shape, is_fp8) -> tuple[float, int]:
    """Of one layer and token, and the bytes that it reads: all layers of some tokens are one program, in which the
    attention of a layer is the next one's query.
    """
    batch, heads, kv_heads, features, slots = shape
    rows, dtype = (batch, kv_heads, slots, features), jnp.float8_e4m3fn if is_fp8 else jnp.bfloat16
    bytes_read = 2 * batch * kv_heads * slots * (features * jnp.dtype(dtype).itemsize + 4 * is_fp8)
    layers = int(np.clip(CACHES_BYTES // bytes_read, 2, 24))
    prompt_slots = slots - STEPS
    lengths, angles = jnp.full(batch, prompt_slots, jnp.int32), jnp.ones((batch, features // 2))
    rotary = jnp.cos(angles), jnp.sin(angles)
    tokens = jax.random.normal(jax.random.key(0), (batch, kv_heads, features), jnp.bfloat16)

    def layer(query, caches, step):
        return attention(query, tokens, tokens, caches, lengths, step, rotary, prompt_slots)

    def token(step, carry):
        query, every = carry
        updated = []
        for caches in every:
            query, caches = layer(query, caches, step)
            updated.append(caches)
        return query, updated

    program = jax.jit(lambda query, every: lax.fori_loop(0, STEPS, token, (query, every)), donate_argnums=(0, 1))
    query = jax.random.normal(jax.random.key(1), (batch, heads, features), jnp.bfloat16)
    every = []
    for number in range(layers):
        keys, values = (
            jax.random.normal(jax.random.key(2 * number + at), rows, jnp.bfloat16).astype(dtype) for at in range(2)
        )
        every.append((keys, values, *(jnp.ones(rows[:3]) for _ in range(2 * is_fp8))))
    samples = []
    for number in range(2 + REPEATS):
        start = time.perf_counter()
        for _ in range(2):
            query, every = program(query, every)
        jax.block_until_ready(query)
        if number >= 2:
            samples.append(time.perf_counter() - start)
    return statistics.median(samples) / (2 * STEPS * layers), bytes_read


def time_attention(report: Report):
    """Microseconds of a layer and token, and the rate at which the cache is read beside that of a copy."""
    copied = [(jax.random.bits(jax.random.key(number), (256 << 20,), jnp.uint32),) for number in range(2)]
    copy = 2 * copied[0][0].nbytes / seconds_per_call(lambda x: x ^ jnp.uint32(1), copied)
    report.timings.append({"what": "copy (x ^ 1)", "shape": "u32[268435456]", "TB/s": copy / 1e12})
    del copied
    for shape in TIMED:
        for is_fp8 in (False, True):
            for name, attention in (("kernel", fused), ("XLA", by_xla)):
                seconds, bytes_read = seconds_of(attention, shape, is_fp8)
                row = {"what": f"{name}, {'E4M3' if is_fp8 else 'bfloat16'}", "shape": str(list(shape))}
                share = bytes_read / seconds / copy
                report.timings.append(row | {"us": seconds * 1e6, "share of copy": share})


CHECKS = [check_numbers, check_controls, check_large_logits, check_needles, check_in_place]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [time_attention], target="jax_fp8_cached_attention", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
