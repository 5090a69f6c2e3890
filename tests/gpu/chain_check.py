"""Tokens of a GPT on a GPU: the same bits whether kernels are in chains or not, and how fast each is.

    python tests/gpu/chain_check.py --output chain_check.json
    python tests/gpu/chain_check.py --only time_tokens
    python tests/gpu/chain_check.py --self-test                         # the references, on a CPU

A kernel that begins too early gives other numbers only now and then. So every program runs several times, each time
over memory filled with another pattern.
"""

import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import twice_over_poison
from gpu.report import Report, Script, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.kernels import chain
from jax_fp8.kernels.chain import TARGET
from jax_fp8.models.reader import Reader

DELAYED = fp8.DelayedScaling(amax_history_len=2)
LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "num_kv_heads": 2, "use_bias": False}
# Fields of the model, recipe, prompts, and the dtype of the cache.
MODELS = {
    "gpt, 1 prompt": ({}, DELAYED, 1, None),
    "gpt, 3 prompts, cache in FP8": ({}, DELAYED, 3, fp8.E4M3),
    "llama, 8 prompts": (LLAMA, DELAYED, 8, None),
    "llama, 1 prompt, current scaling": (LLAMA, fp8.CurrentScaling(), 1, None),
    "gpt, 16 prompts": ({}, DELAYED, 16, None),
    "gpt, 2 prompts, block scaling": ({}, fp8.BlockScaling(), 2, None),
}
REPEATS, STEPS = 10, 32


def prepared(model: fp8.GPT, batch: int, slots: int, steps: int, dtype=None):
    """A reader of prompts of so many slots, caches with random keys and values, and a first token of each row."""
    init = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    lengths = jnp.full(batch, slots, jnp.int32)
    reader = jax.jit(lambda variables: Reader.for_prompts(model, variables, lengths, slots))(init)

    def filled(leaf):
        random = jax.random.normal(jax.random.key(leaf.size), leaf.shape, jnp.float32)
        return (jnp.abs(random) * 0.01 if leaf.ndim == 3 else random).astype(leaf.dtype)

    caches = jax.jit(lambda: jax.tree.map(filled, reader.empty_caches(steps, dtype)))()
    tokens = jax.random.randint(jax.random.key(2), (batch, 1), 0, model.config.vocab_size)
    return reader, caches, tokens


def read_tokens(reader: Reader, caches, tokens: jax.Array, steps: int):
    """The logits of the last token of each row, the sum of all, and the caches, after so many tokens."""

    def read(step, carry):
        tokens, caches, total, _ = carry
        logits, caches = reader.read(tokens, caches, step)
        return jnp.argmax(logits, -1)[:, None].astype(jnp.int32), caches, total + logits, logits

    logits = jnp.zeros((tokens.shape[0], reader.body.config.vocab_size), jnp.float32)
    _, caches, total, last = lax.fori_loop(0, steps, read, (tokens, caches, logits, logits))
    return last, total, caches


def check_tokens(report: Report):
    steps, repeats = (STEPS, REPEATS) if on_gpu() else (3, 1)
    for name, (fields, recipe, batch, dtype) in MODELS.items():
        config = fp8.GPTConfig(
            vocab_size=512, num_layers=4, num_heads=4, hidden_size=512, max_seq_len=512,
            **{"num_kv_heads": 4} | fields,
        )  # fmt: skip
        arrays = prepared(fp8.GPT(config, recipe=recipe), batch, 128, steps, dtype)
        with mock.patch.object(chain, "CHOSEN", False):
            expected = jax.tree.map(np.asarray, jax.jit(read_tokens, static_argnums=3)(*arrays, steps))
        run = jax.jit(lambda *arrays, steps=steps: read_tokens(*arrays, steps))
        for _ in range(repeats):
            with mock.patch.object(chain, "CHOSEN", True):
                runs = twice_over_poison(run, *arrays)
            for found in runs:
                for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                    report.bits("tokens", got, wanted, name)
        reader, caches, tokens = arrays
        other = jax.jit(lambda *arrays, steps=steps: read_tokens(*arrays, steps))(reader, caches, tokens ^ 1)
        report.expect("tokens: control", not np.array_equal(other[0], expected[0]), f"{name}: another token")


def time_tokens(report: Report):
    slots, steps = 512, 64
    for preset in ("gpt3-1.3b", "llama3.2-1b"):
        model = fp8.GPT(fp8.GPTConfig.preset(preset), recipe=DELAYED, param_dtype=jnp.bfloat16)
        for batch in (1, 8):
            arrays = prepared(model, batch, slots, steps)
            for chosen in (False, True):
                run = jax.jit(lambda *arrays: read_tokens(*arrays, steps)[0])
                with mock.patch.object(chain, "CHOSEN", chosen):
                    jax.block_until_ready(run(*arrays))
                samples = []
                for _ in range(5):
                    start = time.perf_counter()
                    jax.block_until_ready(run(*arrays))
                    samples.append(time.perf_counter() - start)
                us = 1e6 * statistics.median(samples) / steps
                what = "chains" if chosen else "calls"
                report.timings.append({"what": what, "shape": f"{preset}, {batch} rows", "us a token": us})
                print(report.timings[-1], flush=True)


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, [check_tokens], [time_tokens], target=TARGET, self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
