"""Does reading token by token from a cache say what the full pass says? A trained GPT, with keys and values in bfloat16
and in FP8.

    python benchmarks/decoding_quality.py               # trains a 124M GPT first; minutes on one H100
    python benchmarks/decoding_quality.py --self-test   # a tiny GPT on any machine, in a minute

The GPT learns Python source (text_data.py) in FP8 with delayed scaling. Every window has a needle: a mark and a few
random tokens at a random place, and the same again at its end. Who finds the needle knows the last tokens. Then the
same params read held-out windows in several ways:

    bf16               recipe=None
    bf16, fp8 cache    the same, with kv_cache_dtype=E4M3
    delayed            DelayedScaling
    delayed, fp8 cache
    control            delayed, with the cached values of the prompt negated: it must be noticed

Each way reads a prompt, and then one token at a time. The table has the loss behind the prompt, and how much the
perplexity differs from that of the full pass of the same recipe; the share of needle tokens that are the most likely
ones; and the share of tokens, generated greedily, that are those of `bf16`. PASS means: delayed scaling is within 0.1 %
of its full pass, and the control is not. The exit status is 0 for PASS, else 1.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tables
from convergence import MODELS, Program, Settings
from text_data import Data, prepare

import jax_fp8 as fp8
from jax_fp8.models.reader import Reader

HERE = pathlib.Path(__file__).resolve()
TOLERANCE = 0.001
NEEDLE = 8  # tokens, behind a mark of two
WAYS = {
    "bf16": ("bf16", None, 1.0),
    "bf16, fp8 cache": ("bf16", fp8.E4M3, 1.0),
    "delayed": ("delayed", None, 1.0),
    "delayed, fp8 cache": ("delayed", fp8.E4M3, 1.0),
    "control": ("delayed", None, -1.0),
}


@dataclasses.dataclass(frozen=True)
class Reads(Settings):
    """How windows are read: batches of `rows`, of which the first `prompt` tokens are the prompt."""

    rows: int = 8
    windows: int = 64
    prompt: int = 256
    new: int = 128  # tokens that are generated


SELF_TEST = Reads(
    preset="tiny",
    num_layers=1,
    vocab_size=512,
    seq_len=64,
    batch_size=8,
    steps=150,
    validation_tokens=1024,
    learning_rate=3e-3,
    warmup_steps=10,
    max_bytes=3_000_000,
    tokenizer_bytes=200_000,
    rows=4,
    windows=8,
    prompt=16,
    new=8,
)


def check(settings: Reads) -> None:
    """Raise a ValueError of one sentence for sizes that do not fit each other."""
    last = settings.prompt + max(settings.new, 2 * (NEEDLE + 2))
    if not 1 <= settings.prompt or last > settings.seq_len:
        raise ValueError(
            f"--prompt must be at least 1 and leave {last - settings.prompt} tokens of the {settings.seq_len} of a "
            f"window, got {settings.prompt}; give a shorter prompt or a larger --seq-len"
        )
    held_out = settings.validation_tokens // (settings.batch_size * settings.seq_len) * settings.batch_size
    if not 1 <= settings.windows <= held_out or settings.windows % settings.rows:
        raise ValueError(
            f"--windows must be a multiple of {settings.rows} up to the {held_out} held-out windows, "
            f"got {settings.windows}"
        )


@partial(jax.jit, static_argnames="vocab_size")
def with_needles(windows: jax.Array, key: jax.Array, vocab_size: int) -> jax.Array:
    """Windows (batch, seq + 1) with a needle at a random place and at the end."""
    batch, size = windows.shape
    of_place, of_needle = jax.random.split(key)
    needles = jax.random.randint(of_needle, (batch, NEEDLE), 0, vocab_size - 2)
    mark = jnp.broadcast_to(jnp.arange(vocab_size - 2, vocab_size), (batch, 2))
    needles = jnp.concatenate([mark, needles], axis=1).astype(windows.dtype)
    places = jax.random.randint(of_place, (batch,), 0, size - 2 * needles.shape[1])
    put = jax.vmap(lambda row, needle, at: jax.lax.dynamic_update_slice(row, needle, (at,)))
    return put(put(windows, needles, places), needles, jnp.full(batch, size - needles.shape[1]))


def train(program: Program, data: Data, settings: Reads) -> dict:
    """The variables after the last step."""
    config, keys = program.model.config, jax.random.key(settings.seed)
    state = program.initial_state(settings.seed, data.batch(0, settings.seq_len))
    for step in range(settings.steps):
        windows = data.batch(step, settings.seq_len)
        state, metrics = program.step(state, with_needles(windows, jax.random.fold_in(keys, step), config.vocab_size))
        if (step + 1) % max(1, settings.steps // 6) == 0:
            print(f"step {step + 1}: loss {metrics['loss']:.4f}", flush=True)
    return state.variables


def losses_of(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss of each token, and whether it is the most likely one."""
    logits = logits.astype(jnp.float32)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    return loss, jnp.argmax(logits, axis=-1) == tokens


@partial(jax.jit, static_argnums=0, static_argnames="prompt")
def full_pass(model: fp8.GPT, variables: dict, windows: jax.Array, prompt: int) -> tuple[jax.Array, jax.Array]:
    """What `from_cache` finds, by one pass over all tokens."""
    logits = model.apply(variables, windows[:, :-1])
    return losses_of(logits[:, prompt - 1 :], windows[:, prompt:])


@partial(jax.jit, static_argnums=(0, 1), static_argnames="prompt")
def from_cache(
    model: fp8.GPT, kept: object, variables: dict, windows: jax.Array, share: jax.Array, prompt: int
) -> tuple[jax.Array, jax.Array]:
    """Of each token behind the prompt its loss, and whether it is the most likely one. (batch, tokens)

    `share` multiplies the cached values of the prompt, where these are not in FP8.
    """
    reader = Reader.for_prompts(model, variables, jnp.full(len(windows), prompt, jnp.int32), prompt)
    logits, caches = reader.read(windows[:, :prompt], reader.empty_caches(windows.shape[1] - prompt, kept), None)
    caches = caches if kept else {name: (k, (v * share).astype(v.dtype)) for name, (k, v) in caches.items()}
    behind = windows[:, prompt:].T

    def read(caches: dict, token: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[dict, tuple]:
        step, given, following = token
        logits, caches = reader.read(given[:, None], caches, step)
        return caches, losses_of(logits, following)

    steps = jnp.arange(len(behind) - 1)
    _, found = jax.lax.scan(read, caches, (steps, behind[:-1], behind[1:]))
    first = losses_of(logits, behind[0])
    return tuple(jnp.concatenate([one[None], others]).T for one, others in zip(first, found, strict=True))


def measure(variables: dict, models: dict[str, fp8.GPT], data: Data, settings: Reads) -> list[dict]:
    vocab_size = models["bf16"].config.vocab_size
    held_out = jnp.concatenate(data.validation)[: settings.windows]
    windows = with_needles(held_out, jax.random.key(settings.seed + 1), vocab_size)
    batches = [windows[at : at + settings.rows] for at in range(0, len(windows), settings.rows)]
    prompts = [np.asarray(batch[:, : settings.prompt]) for batch in batches[:2]]
    rows, whole, greedy = [], {}, None
    for name, (recipe, kept, share) in WAYS.items():
        model, start = models[recipe], time.perf_counter()
        read = [from_cache(model, kept, variables, batch, share, prompt=settings.prompt) for batch in batches]
        loss, likely = (np.concatenate(part) for part in zip(*read, strict=True))
        if recipe not in whole:
            passes = [full_pass(model, variables, batch, prompt=settings.prompt) for batch in batches]
            whole[recipe] = [np.concatenate(part) for part in zip(*passes, strict=True)]
        text = slice(None, -NEEDLE - 2)
        row = {"way": name, "loss": float(loss[:, text].mean())}
        row |= {"perplexity": math.exp(row["loss"] - whole[recipe][0][:, text].mean()) - 1}
        row |= {"needle": float(likely[:, -NEEDLE:].mean()), "needle_full": float(whole[recipe][1][:, -NEEDLE:].mean())}
        if name != "control":
            write = partial(fp8.generate, model, variables, max_new_tokens=settings.new, kv_cache_dtype=kept)
            tokens = np.concatenate([np.asarray(write(prompt)) for prompt in prompts])
            greedy = tokens if greedy is None else greedy
            row |= {"greedy": float((tokens == greedy).mean())}
        rows.append(row | {"seconds": time.perf_counter() - start})
        print(row, flush=True)
    return rows


def verdict(rows: list[dict]) -> str:
    by_name = {row["way"]: abs(row["perplexity"]) for row in rows}
    return "PASS" if by_name["delayed"] <= TOLERANCE < by_name["control"] else "FAIL"


def markdown(settings: Reads, description: str, rows: list[dict]) -> str:
    headings = ["way", "loss", "perplexity beside the full pass", "needle found", "by the full pass", "greedy as bf16"]
    lines = [
        [
            row["way"],
            f"{row['loss']:.4f}",
            f"{100 * row['perplexity']:+.4f} %",
            f"{100 * row['needle']:.1f} %",
            f"{100 * row['needle_full']:.1f} %",
            f"{100 * row['greedy']:.1f} %" if "greedy" in row else "-",
        ]
        for row in rows
    ]
    sections = [
        f"# Reading from a cache: {verdict(rows)}",
        f"{settings.preset}, {settings.steps:,} steps of {settings.batch_size} x {settings.seq_len} tokens in FP8 with "
        f"delayed scaling; {settings.windows} windows with prompts of {settings.prompt} tokens, {settings.rows} at a "
        f"time. {tables.environment_line(tables.environment())}",
        f"Text: {description}.",
        tables.table(headings, lines),
        f"The needle is {NEEDLE} random tokens; chance finds none. `control` has the values of the prompt negated.",
    ]
    return "\n\n".join(sections)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="a tiny GPT and few steps")
    parser.add_argument("--data", type=pathlib.Path, help="file or folder of text instead of Python sources")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "jax_fp8")
    parser.add_argument("--preset", help="the GPT that is trained, gpt2-124m if not given")
    sizes = ("num_layers", "steps", "seq_len", "batch_size", "windows", "prompt")
    for name in sizes:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in ("preset", *sizes)}
    settings = SELF_TEST if options.self_test else Reads()
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    try:
        check(settings)
        data = prepare(settings, options.data, options.cache)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    program = Program(MODELS["delayed"], settings)
    variables = train(program, data, settings)
    rows = measure(variables, {"delayed": program.model, "bf16": program.model.clone(recipe=None)}, data, settings)
    tables.write(options.output / "decoding_quality.md", markdown(settings, data.description, rows))
    found = {"environment": tables.environment(), "settings": dataclasses.asdict(settings), "rows": rows}
    tables.write(options.output / "decoding_quality.json", json.dumps({"verdict": verdict(rows)} | found, indent=1))
    print((options.output / "decoding_quality.md").read_text())
    return 0 if verdict(rows) == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
