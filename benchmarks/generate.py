"""Tokens a second of `fp8.generate`: FP8 against bfloat16, and against a full pass over the window for every token.

    python benchmarks/generate.py                                   # 124M and 1.3B, batches of 1, 8 and 64 prompts
    python benchmarks/generate.py --presets gpt3-1.3b --batches 8 --no-window
    python benchmarks/generate.py --self-test                       # a tiny model anywhere; its times mean nothing

Prompts have 512 tokens, and the model generates 256 tokens after each, always the most likely one. The time to the
first
token is that of a call for one token, which casts the weights and reads the prompts. The time of the other tokens is
the rest of a call for all of them. "A full window" uses no cache: each token is computed by a pass over prompt and new
tokens. For four rows of the largest batch, every generated token is compared with the most likely one of the full pass.
In bfloat16 and FP8, two tokens can be so close that the order of sums decides; `shortfall` says how close.
"""

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import tables

import jax_fp8 as fp8

HERE = pathlib.Path(__file__).resolve()
RUNS = 5
LARGER = 2
WINDOW_TOKENS = 8  # written with full windows
CHECKED_ROWS = 4
CURRENT = fp8.CurrentScaling()
RECIPES = {
    "bf16": {"recipe": None},
    "delayed": {"recipe": fp8.DelayedScaling(amax_history_len=16)},
    "delayed, head": {"recipe": fp8.DelayedScaling(amax_history_len=16), "head_recipe": CURRENT},
    "current": {"recipe": CURRENT},
}


@functools.lru_cache(maxsize=1)
def variables_of(model: fp8.GPT):
    """Params with larger matrices than after initialization, so that the layers decide which tokens are generated, and
    FP8 scales that fit them.
    """
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    larger = jnp.float32([1 / 4, LARGER, 1])  # scales of inputs, which are 1; of kernels; of output gradients
    params = jax.tree.map(lambda x: LARGER * x if x.ndim > 1 else x, variables["params"])
    state = jax.tree.map(lambda x: larger * x if x.shape == (3,) else x, variables.get("fp8", {}))
    return {"params": params, **({"fp8": state} if state else {})}


def seconds(run) -> float:
    """The median time of several calls of a function that is compiled already."""
    jax.block_until_ready(run())
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_cached(model, variables, prompt, new: int, check: bool) -> dict:
    write = functools.partial(fp8.generate, model, variables, prompt)
    start = time.perf_counter()
    written = jax.block_until_ready(write(max_new_tokens=new))
    compiled = time.perf_counter() - start
    first, whole = (seconds(lambda n=n: write(max_new_tokens=n)) for n in (1, new))
    row = rates(len(prompt), new - 1, whole - first)
    row |= {"first_ms": 1e3 * first, "compile_s": compiled}
    return row | (compare(model, variables, prompt, written) if check else {})


def rates(batch: int, tokens: int, taken: float) -> dict:
    return {"token_ms": 1e3 * taken / tokens, "tokens_a_second": batch * tokens / taken}


def compare(model, variables, prompt, written) -> dict:
    """The share of generated tokens that are the most likely ones of the full pass; and how much less likely the others
    are at most, in standard deviations of the logits.
    """
    rows, seq = slice(0, CHECKED_ROWS), prompt.shape[1]
    text = jnp.concatenate([jnp.asarray(prompt)[rows], written[rows]], axis=1)
    apply = jax.jit(lambda variables, text: model.apply(variables, text)[:, seq - 1 : -1].astype(jnp.float32))
    logits = apply(variables, jnp.pad(text, ((0, 0), (0, model.config.max_seq_len - text.shape[1]))))
    logits = logits[:, : written.shape[1]]
    of_written = jnp.take_along_axis(logits, written[rows][..., None], axis=-1)[..., 0]
    short = (logits.max(-1) - of_written) / logits.std()
    distinct = len(np.unique(written[rows]))
    return {"most_likely": float(jnp.mean(short == 0)), "shortfall": float(short.max()), "distinct": distinct}


def measure_window(model, variables, prompt, new: int) -> dict:
    """Measure a program that reads the full window for every token."""
    window = np.pad(prompt, ((0, 0), (model.config.max_seq_len - prompt.shape[1], 0)))  # as full, whatever is in it
    tokens = min(new, WINDOW_TOKENS)

    @jax.jit
    def write(variables, window):
        def write_one(window, _):
            token = jnp.argmax(model.apply(variables, window)[:, -1], axis=-1).astype(jnp.int32)
            return jnp.concatenate([window[:, 1:], token[:, None]], axis=1), token

        return jax.lax.scan(write_one, window, length=tokens)[1]

    return rates(len(prompt), tokens, seconds(lambda: write(variables, window)))


def measure(preset: str, recipe: str, batch: int, prompt_tokens: int, new: int, window: bool, check: bool) -> dict:
    longest = -(-(prompt_tokens + new) // 16) * 16  # an FP8 head reads multiples of 16 tokens in a full pass
    config = fp8.GPTConfig.preset(preset, max_seq_len=longest)
    model = fp8.GPT(config, **RECIPES[recipe])
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt_tokens), np.int32)
    given = model, variables_of(model), prompt, new
    found = measure_window(*given) if window else measure_cached(*given, check)
    return {"preset": preset, "recipe": recipe, "batch": batch, "reads": "window" if window else "cache"} | found


def markdown(environment: dict, prompt_tokens: int, new: int, rows: list[dict]) -> str:
    headings = [
        "model",
        "recipe",
        "prompts",
        "reads",
        "first token ms",
        "token ms",
        "tokens/s",
        "most likely",
        "shortfall",
        "distinct",
    ]
    names = ("first_ms", "token_ms", "tokens_a_second", "most_likely", "shortfall", "distinct")
    body = [
        [*(row[name] for name in ("preset", "recipe")), row["batch"], row["reads"]]
        + ([f"failed: {row['failed']}", *"-----"] if "failed" in row else [row.get(name, "-") for name in names])
        for row in rows
    ]
    method = (
        f"Prompts of {prompt_tokens} tokens, {new} new ones; medians of {RUNS}. `first token ms` is a call for one "
        "token, `token ms` what each other adds to a call for all. benchmarks/generate.py says more."
    )
    return "\n\n".join(["# Writing text", tables.environment_line(environment), method, tables.table(headings, body)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["gpt2-124m", "gpt3-1.3b"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "delayed", "delayed, head"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to generate, at least 2")
    parser.add_argument("--no-window", action="store_true", help="do not measure full windows")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--self-test", action="store_true", help="a tiny model and few tokens, to run the whole file")
    options = parser.parse_args(arguments)
    if options.self_test:
        options.presets, options.batches, options.prompt_tokens, options.new_tokens = ["tiny"], [2], 16, 4
    if options.new_tokens < 2:
        parser.error("--new-tokens must be at least 2")
    shape = options.prompt_tokens, options.new_tokens
    environment, rows = tables.environment(), []
    cases = [
        (preset, recipe, batch) for preset in options.presets for recipe in options.recipes for batch in options.batches
    ]
    for case in cases:
        for window in (False,) if options.no_window or case[1] == "delayed, head" else (False, True):
            try:
                row = measure(*case, *shape, window, check=case[2] == max(options.batches))
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # the other rows are still worth having
                named = dict(zip(("preset", "recipe", "batch"), case, strict=True))
                row = named | {"reads": "window" if window else "cache", "failed": str(error).splitlines()[0][:200]}
            gc.collect()
            print(json.dumps(row), flush=True)
            rows.append(row)
            tables.write(options.output / "generate.md", markdown(environment, *shape, rows))
            found = {"environment": environment, "prompt_tokens": shape[0], "new_tokens": shape[1], "rows": rows}
            tables.write(options.output / "generate.json", json.dumps(found, indent=1))
    print((options.output / "generate.md").read_text())
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
