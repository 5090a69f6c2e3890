"""When FP8 is faster: layers of several widths with several numbers of tokens a step, in FP8 and in bfloat16.

    python benchmarks/scaling.py                  # every width and batch; about 11 s a cell and variant on one H200
    python benchmarks/scaling.py --widths 2048 4096 --tokens 8192
    python benchmarks/scaling.py --self-test      # tiny sizes on any machine; its times mean nothing

A step trains a GPT with few layers and a small vocabulary, so that its time is that of the layers. It is the median of
steps with a wait after each. A cell of the table is the speed of a variant, relative to plain Flax in bfloat16 at that
width and number of tokens.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import tables
from variants import Shape, Variant, build, gemms_of, variant_name

HERE = pathlib.Path(__file__).resolve()
BASELINE = "bf16"
WARMUP_STEPS = 3
HEAD_DIM = 128
VOCABULARY = 1024
PARAMS = 500e6  # at most, in the layers of one model


def shape_of(width: int, tokens: int, sequence: int) -> Shape:
    """A shape with as many layers as fit into `PARAMS`, at most two."""
    layers = max(1, min(2, int(PARAMS / (12 * width**2))))
    batch = max(1, tokens // sequence)
    return Shape(layers, width, max(1, width // HEAD_DIM), batch, min(sequence, tokens), VOCABULARY)


def time_step(variant: str, shape: Shape, steps: int) -> float:
    """Milliseconds of a step, the median of `steps` with a wait after each."""
    tokens = jax.random.randint(jax.random.key(0), (shape.batch_size, shape.seq_len + 1), 0, shape.vocab_size)
    step, state, _ = build(variant, shape, 1, tokens)
    times = []
    for _ in range(WARMUP_STEPS + steps):
        start = time.perf_counter()
        state, metrics = step(state, tokens)
        jax.block_until_ready((state, metrics))
        times.append(1e3 * (time.perf_counter() - start))
    if not jnp.isfinite(metrics["loss"]):
        raise ArithmeticError(f"the loss of {variant} at {shape} must be finite, got {metrics['loss']}")
    return statistics.median(times[WARMUP_STEPS:])


def markdown(rows: list[dict]) -> str:
    """One table for each variant, with a row for each width and a column for each number of tokens."""
    tokens = sorted({row["tokens"] for row in rows})
    widths = sorted({row["width"] for row in rows})
    times = {(row["variant"], row["width"], row["tokens"]): row["step_ms"] for row in rows}
    parts = ["# Where FP8 pays", tables.environment_line(tables.environment())]
    parts += [
        "Times faster than plain Flax in bfloat16, and milliseconds a step. "
        "Below 1, train these layers with `recipe=None`."
    ]
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != BASELINE):
        lines = []
        for width in widths:
            cells = []
            for count in tokens:
                ours, plain = times.get((variant, width, count)), times.get((BASELINE, width, count))
                cells.append("-" if ours is None or plain is None else f"{plain / ours:.2f} ({ours:.2f})")
            lines.append([f"{width:,}", *cells])
        parts += [
            f"## {Variant.parse(variant)}",
            tables.table(["width", *(f"{count:,} tokens" for count in tokens)], lines),
        ]
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", type=variant_name, metavar="VARIANT", default=["delayed", "current"])
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 12288])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args(arguments)
    if options.self_test:
        options.widths, options.tokens, options.sequence, options.steps = [64], [32], 32, 1
    rows = []
    for width in options.widths:
        for count in options.tokens:
            for variant in dict.fromkeys([BASELINE, *options.variants]):
                with gemms_of(variant):
                    step_ms = time_step(variant, shape_of(width, count, options.sequence), options.steps)
                rows.append({"variant": variant, "width": width, "tokens": count, "step_ms": step_ms})
                print(f"{width:>6} {count:>6} {variant:<18} {step_ms:9.3f} ms", flush=True)
                jax.clear_caches()
            found = {"environment": tables.environment(), "rows": rows}
            tables.write(options.output / "scaling.json", json.dumps(found, indent=1))
            tables.write(options.output / "scaling.md", markdown(rows))
    print((options.output / "scaling.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
