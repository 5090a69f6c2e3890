"""Attention of padded sequences, of packed documents and to another sequence, by cuDNN on a GPU; and dropout's pass.

    python tests/gpu/attention_check.py --output attention_check.json
    python tests/gpu/attention_check.py --self-test                      # XLA's attention, on a CPU

Each sequence and each document is compared with itself alone in float32: results, and gradients of queries, keys and
values. Padding must give zeros, whatever it holds, and an empty sequence no NaN. The script times attention by lengths
next to attention over everything, and by the mask of documents; and the pass that drops and adds next to one that only
adds. Ends with one line per timing and per group of checks, and with exit code 1 if a check failed.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import reference
from gpu.kernel_check import seconds_per_call
from gpu.report import Report, Script, on_gpu, run_script

from jax_fp8.ops.attention import attention
from jax_fp8.ops.dropout import dropout

BATCH, HEADS, HEAD_DIM = 4, 4, 64
CLOSE = 8e-3  # relative, of results in bfloat16
CLOSE_GRADIENT = 1.6e-2  # cuDNN rounds weights and their gradients to bfloat16 on the way
WRONG = 5e-2  # what a control must exceed


def sizes() -> tuple[int, int]:
    """Queries, and keys of another sequence."""
    return (512, 328) if on_gpu() else (16, 24)


def implementation() -> str:
    return "cudnn" if on_gpu() else "xla"


def operands(kv_heads: int, seq: int, keys: int) -> tuple[jax.Array, ...]:
    """Query, key, value and the gradient of the result."""
    shapes = (seq, HEADS), (keys, kv_heads), (keys, kv_heads), (seq, HEADS)
    return tuple(
        jax.random.normal(jax.random.key(number), (BATCH, *shape, HEAD_DIM), jnp.bfloat16)
        for number, shape in enumerate(shapes)
    )


def lengths_of(longest: int) -> jax.Array:
    return jnp.int32([longest, longest // 2 + 1, 2, longest // 3])


def passes(arrays, **options):
    """The result and the gradients."""

    @jax.jit
    def run(query, key, value, gradient):
        attended, pull = jax.vjp(partial(attention, **options), query, key, value)
        return attended, *pull(gradient)

    return [np.asarray(x, np.float32) for x in run(*arrays)]


def alone(arrays, rows, queries, keys, causal):
    """The same in float32 of some queries and keys of one row."""
    query, key, value, gradient = (np.asarray(x, np.float32)[rows : rows + 1] for x in arrays)
    part = query[:, queries], key[:, keys], value[:, keys], gradient[:, queries]
    with jax.default_matmul_precision("highest"):
        return passes([jnp.asarray(x) for x in part], causal=causal, implementation="xla")


def compare(report: Report, group: str, found, wanted, row, places, what: str):
    """Result and gradients at the places of queries, keys, keys."""
    for name, got, expected, place in zip(("result", "dq", "dk", "dv"), found, wanted, places, strict=True):
        if not np.linalg.norm(expected):  # one key alone: its weight is 1, whatever the query
            report.expect(group, np.abs(got[row, place]).max() < CLOSE, f"{what}: {name} must be zeros")
            continue
        error = reference.relative_error(got[row, place], expected[0])
        limit = CLOSE if name == "result" else CLOSE_GRADIENT
        report.worst[f"{group}, {name}"] = max(error, report.worst.get(f"{group}, {name}", 0.0))
        report.expect(group, error <= limit, f"{what}, row {row}: {name} is off by {error:.1e}")


def check_padding(report: Report):
    seq, _ = sizes()
    lengths = lengths_of(seq)
    for causal in (True, False):
        for kv_heads in (HEADS, HEADS // 2):
            what, arrays = f"{causal=} {kv_heads=}", operands(kv_heads, seq, seq)
            options = {"causal": causal, "implementation": implementation()}
            found = passes(arrays, **options, lengths=lengths)
            for row, length in enumerate(lengths.tolist()):
                own = slice(length)
                compare(report, "padding", found, alone(arrays, row, own, own, causal), row, (own,) * 4, what)
                nothing = not any(array[row, length:].any() for array in found)
                report.expect("padding is zeros", nothing, f"{what}, row {row}")
            large = [x.at[0, -1].set(1e4) for x in arrays[:3]]  # large numbers in the padding
            shorter = lengths.at[0].set(seq - 1)
            same = [passes((*of, arrays[3]), **options, lengths=shorter)[0] for of in (arrays[:3], large)]
            report.expect("padding is read by nobody", bool((same[0] == same[1]).all()), what)  # -0 is 0 here
            longer = passes(arrays, **options, lengths=lengths.at[1].add(1))[0]
            off = reference.relative_error(longer[1], found[0][1])
            report.expect("controls", off > WRONG / 10, f"{what}: a token more moves results by {off:.1e}")
            empty = passes(arrays, **options, lengths=lengths.at[3].set(0))
            report.expect("an empty sequence", all(np.isfinite(array).all() for array in empty), f"{what}: NaN")


def check_another_sequence(report: Report):
    seq, keys = sizes()
    for told in ({}, {"key_lengths": lengths_of(keys)}, {"key_lengths": lengths_of(keys), "lengths": lengths_of(seq)}):
        arrays, group = operands(HEADS // 2, seq, keys), "keys of another sequence"
        options = {"causal": False, "implementation": implementation()}
        found = passes(arrays, **options, **told)
        for row in range(BATCH):
            own, of_keys = (
                slice(int(told[name][row]) if name in told else size)
                for name, size in (("lengths", seq), ("key_lengths", keys))
            )
            places = own, own, of_keys, of_keys
            compare(report, group, found, alone(arrays, row, own, of_keys, False), row, places, str([*told]))
        turned = passes((arrays[0], arrays[1][::-1], *arrays[2:]), **options, **told)[0]
        off = reference.relative_error(turned, found[0])
        report.expect("controls", off > WRONG, f"keys of another row move results by {off:.1e}")


def check_documents_of_another_sequence(report: Report):
    seq, keys = sizes()
    segment_ids = jnp.tile(
        jnp.repeat(jnp.int32([1, 2, 3]), jnp.array([seq // 2, seq // 4, seq - seq // 2 - seq // 4])), (BATCH, 1)
    )
    of_keys = jnp.tile(jnp.repeat(jnp.int32([2, 1]), jnp.array([keys // 4, keys - keys // 4])), (BATCH, 1))
    arrays = operands(HEADS, seq, keys)
    told = {"segment_ids": segment_ids, "key_segment_ids": of_keys}
    found = passes(arrays, causal=False, implementation=implementation(), **told)
    for row in range(BATCH):
        for number in (1, 2):
            own, others = (np.flatnonzero(np.asarray(numbers[row]) == number) for numbers in told.values())
            wanted = alone(arrays, row, own, others, False)
            compare(report, "documents", found, wanted, row, (own, own, others, others), f"document {number}")
        in_vain = np.flatnonzero(np.asarray(segment_ids[row]) == 3)
        nothing = not found[0][row, in_vain].any() and not found[1][row, in_vain].any()
        report.expect("a document without keys has zeros", nothing, f"row {row}")


def check_dropout(report: Report):
    """A GPU draws the same mask as a CPU, and the backward has the mask of the forward."""
    # The gradient that comes in is not the result: XLA would take that with more bits than it has.
    arrays = tuple(jax.random.normal(jax.random.key(0), (3, *sizes(), 64), jnp.bfloat16))
    key = jax.random.key(1)

    @jax.jit
    def run(x, residual, gradient, key):
        y, pull = jax.vjp(lambda x, residual: dropout(x, key, 0.1, residual), x, residual)
        return y, *pull(gradient)

    cpu = jax.devices("cpu")[0]
    found, expected = run(*arrays, key), run(*jax.device_put((*arrays, key), cpu))
    for name, got, wanted in zip(("result", "gradient", "residual's"), found, expected, strict=True):
        report.bits("dropout", got, wanted, name)
    other = run(*arrays, jax.random.key(2))[0]
    report.expect("controls", bool((other != found[0]).any()), "another key must draw another mask")


def time_attention(report: Report):
    seq, batches = 8192, []
    for number in range(4):
        keys = jax.random.split(jax.random.key(number), 4)
        batches.append(tuple(jax.random.normal(key, (2, seq, 16, 128), jnp.bfloat16) for key in keys))
    numbers = jnp.repeat(jnp.arange(4), seq // 4)
    told = {
        "all": {},
        "lengths, all": {"lengths": jnp.full(2, seq)},
        "lengths, half": {"lengths": jnp.full(2, seq // 2)},
        "4 documents": {"segment_ids": jnp.stack([numbers] * 2)},
    }
    for causal in (True, False):
        for what, of in told.items():
            options = {"causal": causal, "implementation": "cudnn", **of}

            def run(query, key, value, gradient, options=options):
                attended, pull = jax.vjp(partial(attention, **options), query, key, value)
                return attended, *pull(gradient)

            seconds = seconds_per_call(run, batches)
            report.timings.append({"what": f"attention, {causal=}, {what}", "shape": f"{seq}", "us": seconds * 1e6})


def time_dropout(report: Report):
    """Timed next to the addition alone, which moves the same 6 bytes per element."""
    shape, key = (8192, 4096), jax.random.key(0)
    xs = [jax.random.normal(jax.random.key(number), shape, jnp.bfloat16) for number in range(8)]
    pairs, moved = list(zip(xs, xs[1:] + xs[:1], strict=True)), 6 * shape[0] * shape[1]
    calls = {"drop and add": lambda x, y: dropout(x, key, 0.1, y), "add": lambda x, y: x + y}
    for what, call in calls.items():
        seconds = seconds_per_call(call, pairs)
        row = {"what": what, "shape": str(shape), "us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
        report.timings.append(row)


def check_dropped_weights(report: Report):
    """XLA's, also on a GPU: what a CPU drops, so much of it, and in the gradient what the result has dropped."""
    seq, rate = sizes()[0], 0.25
    arrays = [x.astype(jnp.float32) for x in operands(HEADS // 2, seq, seq)]

    def run(query, key, value, gradient, random=0):
        options = {"implementation": "xla", "dropout_rate": rate, "dropout_key": jax.random.key(random)}
        attended, pull = jax.vjp(partial(attention, causal=True, **options), query, key, value)
        return attended, *pull(gradient)

    with jax.default_matmul_precision("highest"):
        found, other = jax.jit(run)(*arrays), jax.jit(partial(run, random=1))(*arrays)
        expected = jax.jit(run)(*jax.device_put(arrays, jax.devices("cpu")[0]))
        ones = jnp.ones_like(arrays[2])
        kept = np.asarray(jax.jit(run)(jnp.zeros_like(arrays[0]), *arrays[1:2], ones, arrays[3])[0][:, -1])
    for name, got, wanted in zip(("result", "dq", "dk", "dv"), found, expected, strict=True):
        error = reference.relative_error(got, wanted)
        report.expect("dropped weights", error < 1e-4, f"{name} is not the CPU's, off by {error:.1e}")
    slope, value = (float(jnp.vdot(*of)) for of in ((found[3], arrays[2]), (found[0], arrays[3])))
    report.expect("dropped weights", abs(slope / value - 1) < 1e-3, f"the slope along values is {slope}, not {value}")
    apart = np.sqrt(rate / (1 - rate) / seq)
    report.expect("dropped weights", abs(kept.mean() - 1) < 5 * apart, f"what is kept has a mean of {kept.mean()}")
    off = reference.relative_error(other[0], found[0])
    report.expect("controls", off > WRONG, f"another key moves results by {off:.1e}")


CHECKS = [
    check_padding,
    check_another_sequence,
    check_documents_of_another_sequence,
    check_dropout,
    check_dropped_weights,
]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [time_attention, time_dropout], self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
