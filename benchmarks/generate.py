"""Tokens a second of `fp8.generate`: FP8 against bfloat16, and against a full pass over the window for every token.

    python benchmarks/generate.py                                   # 124M and 1.3B, batches of 1, 8 and 64 prompts
    python benchmarks/generate.py --presets gpt3-1.3b llama3.2-1b llama3-8b --no-window
    python benchmarks/generate.py --self-test                       # a tiny model anywhere; its times mean nothing

Prompts have 512 tokens, and the model generates 256 tokens after each, always the most likely one. Params are bfloat16.
"fp8 weights" have kernels frozen in FP8 and activations in bfloat16; with "fp8 cache" keys and values are in FP8, too.
The floor of a token is the time to read the weights, and the keys and values of the tokens so far (of half of the new
ones), at the rate of a copy, which is measured first.

The time to the first token is that of a call for one token, which casts the weights and reads the prompts. The time of
the other tokens is the rest of a call for all of them. "A full window" uses no cache: each token is computed by a pass
over prompt and new tokens. For four rows of the largest batch, every generated token is compared with the most likely
one of the full pass. In bfloat16 and FP8, two tokens can be so close that the order of sums decides; `shortfall` says
how close.

With --profile, generate.json also has the kernels of a token: a trace of the call for all tokens, less one of the call
for one token. Under the profiler XLA runs without CUDA graphs. A kernel that starts before the one before it has ended
counts its wait, too, so the sum can exceed `token ms`.
"""

import argparse
import dataclasses
import functools
import gc
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import kernel_profile
import numpy as np
import tables

import jax_fp8 as fp8

HERE = pathlib.Path(__file__).resolve()
RUNS = 5
LARGER = 2
WINDOW_TOKENS = 8  # written with full windows
CHECKED_ROWS = 4
CURRENT = fp8.CurrentScaling()
COPIED_BYTES, COPIES = 2**30, 20  # one after another, so that the wait for the last one hardly counts


@dataclasses.dataclass(frozen=True)
class Variant:
    recipe: fp8.DelayedScaling | fp8.CurrentScaling | fp8.BlockScaling | None = None
    head_recipe: fp8.CurrentScaling | None = None
    fp8_weights: bool = False  # frozen
    fp8_cache: bool = False


DELAYED = fp8.DelayedScaling(amax_history_len=16)
RECIPES = {
    "bf16": Variant(),
    "delayed": Variant(DELAYED),
    "delayed, head": Variant(DELAYED, CURRENT),
    "current": Variant(CURRENT),
    "block": Variant(fp8.BlockScaling()),
    "fp8 weights": Variant(fp8_weights=True),
    "fp8 weights, fp8 cache": Variant(fp8_weights=True, fp8_cache=True),
    "bf16, fp8 cache": Variant(fp8_cache=True),
    "delayed, fp8 cache": Variant(DELAYED, fp8_cache=True),
    "delayed, head, fp8 cache": Variant(DELAYED, CURRENT, fp8_cache=True),
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


def frozen(model, variables):
    """The kernels in FP8 alone, each GEMM with one scale."""
    tokens, quantized = jnp.zeros((1, 16), jnp.int32), model.clone(recipe=CURRENT)
    return fp8.freeze_kernels(variables, CURRENT, forward=lambda variables: quantized.apply(variables, tokens))


@functools.cache
def bytes_a_second() -> float:
    """The rate of copies: bytes read and written."""
    copy = jax.jit(lambda x: jax.lax.fori_loop(0, COPIES, lambda _, x: x + 1, x))
    return 2 * COPIES * COPIED_BYTES / seconds(functools.partial(copy, jnp.zeros(COPIED_BYTES // 4, jnp.float32)))


def floor_bytes(config: fp8.GPTConfig, variant: Variant, variables, batch: int, tokens: int) -> int:
    """What a new token of each row reads: the kernels, the head, and keys and values of so many tokens."""
    kernels = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
        if getattr(path[-1], "key", "") == "kernel"
    )
    of_kernels = kernels * (1 if variant.recipe or variant.fp8_weights else 2)
    of_head = config.vocab_size * config.hidden_size * (1 if variant.head_recipe else 2)
    of_token = 2 * config.num_layers * config.kv_heads * config.features_of_head * (1 if variant.fp8_cache else 2)
    return of_kernels + of_head + batch * tokens * of_token


def seconds(run) -> float:
    """The median time of several calls of a function that is compiled already."""
    jax.block_until_ready(run())
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_cached(model, variables, prompt, new: int, check: bool, profile: bool, variant: Variant) -> dict:
    floor = floor_bytes(model.config, variant, variables, len(prompt), prompt.shape[1] + new // 2)
    variables = frozen(model, variables) if variant.fp8_weights else variables
    kv_cache_dtype = fp8.E4M3 if variant.fp8_cache else None
    write = functools.partial(fp8.generate, model, variables, prompt, kv_cache_dtype=kv_cache_dtype)
    start = time.perf_counter()
    written = jax.block_until_ready(write(max_new_tokens=new))
    compiled = time.perf_counter() - start
    first, whole = (seconds(lambda n=n: write(max_new_tokens=n)) for n in (1, new))
    row = rates(len(prompt), new - 1, whole - first)
    row |= {"first_ms": 1e3 * first, "compile_s": compiled}
    row |= {"floor_share": 1e3 * floor / bytes_a_second() / row["token_ms"]}
    row |= {"kernels": kernels_of_token(write, new)} if profile else {}
    return row | (compare(model, variables, prompt, written) if check else {})


def kernels_of_token(write, new: int) -> list[dict]:
    """Launches and microseconds that a token adds, of each kernel, the largest first."""

    def traced(tokens: int) -> dict[str, kernel_profile.Kernel]:
        events = kernel_profile.record(lambda: jax.block_until_ready(write(max_new_tokens=tokens)))
        return {kernel.name: kernel for kernel in kernel_profile.summarize(events, 1, {}).kernels}

    first, whole = traced(1), traced(new)
    none = kernel_profile.Kernel("", "")
    added = [
        {
            "name": name,
            "launches": (kernel.launches - first.get(name, none).launches) / (new - 1),
            "us": (kernel.microseconds - first.get(name, none).microseconds) / (new - 1),
        }
        for name, kernel in whole.items()
    ]
    return sorted((kernel for kernel in added if kernel["launches"] > 0), key=lambda kernel: -kernel["us"])


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


def measure(
    preset: str, recipe: str, batch: int, prompt_tokens: int, new: int, window: bool, check: bool, profile: bool
) -> dict:
    longest = -(-(prompt_tokens + new) // 16) * 16  # an FP8 head reads multiples of 16 tokens in a full pass
    config = fp8.GPTConfig.preset(preset, max_seq_len=longest)
    variant = RECIPES[recipe]
    recipes = {"recipe": variant.recipe, "head_recipe": variant.head_recipe}
    model = fp8.GPT(config, param_dtype=jnp.bfloat16, **recipes)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt_tokens), np.int32)
    given = model, variables_of(model), prompt, new
    found = measure_window(*given) if window else measure_cached(*given, check, profile, variant)
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
        "share of the floor",
        "most likely",
        "shortfall",
        "distinct",
    ]
    names = ("first_ms", "token_ms", "tokens_a_second", "floor_share", "most_likely", "shortfall", "distinct")
    body = [
        [*(row[name] for name in ("preset", "recipe")), row["batch"], row["reads"]]
        + ([f"failed: {row['failed']}", *"------"] if "failed" in row else [row.get(name, "-") for name in names])
        for row in rows
    ]
    method = (
        f"Prompts of {prompt_tokens} tokens, {new} new ones; medians of {RUNS}. `first token ms` is a call for one "
        "token, `token ms` what each other adds to a call for all, and the floor the time to read weights, keys and "
        "values at the rate of a copy. benchmarks/generate.py says more."
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
    parser.add_argument("--profile", action="store_true", help="also write the kernels of a token")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--self-test", action="store_true", help="a tiny model and few tokens, to run the whole file")
    options = parser.parse_args(arguments)
    if options.self_test:
        options.presets, options.batches, options.prompt_tokens, options.new_tokens = ["tiny"], [2], 16, 4
    if options.new_tokens < 2:
        parser.error("--new-tokens must be at least 2")
    if options.profile and jax.default_backend() != "gpu":
        parser.error(f"--profile needs a GPU, got {jax.default_backend()}; leave it out")
    shape = options.prompt_tokens, options.new_tokens
    environment, rows = tables.environment(), []
    cases = [
        (preset, recipe, batch) for preset in options.presets for recipe in options.recipes for batch in options.batches
    ]
    for case in cases:
        for window in (False,) if options.no_window or case[1] not in ("bf16", "delayed") else (False, True):
            try:
                row = measure(*case, *shape, window, case[2] == max(options.batches), options.profile)
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # the other rows are still worth having
                named = dict(zip(("preset", "recipe", "batch"), case, strict=True))
                row = named | {"reads": "window" if window else "cache", "failed": str(error).splitlines()[0][:200]}
            gc.collect()
            print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
            rows.append(row)
            tables.write(options.output / "generate.md", markdown(environment, *shape, rows))
            found = {"environment": environment, "prompt_tokens": shape[0], "new_tokens": shape[1], "rows": rows}
            tables.write(options.output / "generate.json", json.dumps(found, indent=1))
    print((options.output / "generate.md").read_text())
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
