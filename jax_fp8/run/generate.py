"""Generate text from a run's last checkpoint, with the recipe and the tokenizer of the run; or in bfloat16 from a
Hugging Face model, or from a file that `python -m jax_fp8 convert` made of one.

    python -m jax_fp8 train --name mine --checkpoint-every 100
    python -m jax_fp8 generate mine --prompt "def " --tokens 100 --temperature 0.8 --top-k 40
    python -m jax_fp8 generate path/to/Llama-3.2-1B --prompt "def " --temperature 0 --weights fp8 --kv-cache fp8

notes of the checkpoint → model; its arrays → variables; prompt → tokens ─generate→ tokens → text

Text is printed as its tokens come, and then how fast they came. Generating writes no file, so the run may train at the
same time. The model must fit on one device.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from jax_fp8.core.formats import E4M3
from jax_fp8.core.types import PyTree
from jax_fp8.models.generate import generate
from jax_fp8.models.gpt import GPT
from jax_fp8.run import command_line
from jax_fp8.run.encoders import Encoder
from jax_fp8.run.trained import Trained, find, load

UNFINISHED = "\ufffd"  # what decoders make of the first bytes of a character
TEMPERATURE = 0.8  # of the sample that a run ends with; below 1 prefers likely tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """Generate text from a checkpoint of a run, or from a Hugging Face model."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """A run's folder, or the name of a run in --output; or a model's folder or *.safetensors file."""
    prompt: str = ""
    """The text that the model continues."""
    tokens: int = 100
    """Number of tokens to generate; prompt and new tokens must fit into the model's --seq-len."""
    temperature: float = 0.8
    """Divides the logits: below 1 prefers likely tokens; 0 always takes the most likely token."""
    top_k: int | None = None
    """Sample only from the K most likely tokens; by default from all."""
    top_p: float | None = None
    """Sample only from the fewest most likely tokens whose probabilities sum to P; by default from all."""
    seed: int = 0
    """Random seed of the sampling."""
    weights: Literal["bf16", "fp8"] = "bf16"
    """Of a model that is no run: fp8 keeps the kernels of its layers in FP8, in half the memory."""
    kv_cache: Literal["model", "fp8"] = "model"
    """fp8 keeps keys and values of earlier tokens in FP8, in half the memory; model: in the dtype of the model."""
    output: Path = Path("runs")
    """The folder that has the run folders."""


def read_request(argv: list[str]) -> Request:
    return command_line.read(Request, argv, "generate")


def check(request: Request) -> None:
    """Raise a ValueError of one sentence for options that are wrong for every run."""
    if not request.run:
        raise ValueError(f"a run must be named, got none; give its folder, or its name in {request.output}")
    if not request.prompt:
        raise ValueError("--prompt must have some text to continue, got none; give the first words")
    if request.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {request.tokens}")
    if not 0 <= request.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 or a positive number, got {request.temperature}")
    if request.top_k is not None and request.top_k < 1:
        raise ValueError(f"--top-k must be at least 1, got {request.top_k}; leave it out to draw from all tokens")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise ValueError(
            f"--top-p must be above 0 and at most 1, got {request.top_p}; leave it out to draw from all tokens"
        )
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {request.seed}")


def continued(trained: Trained, request: Request, tick: Callable[[], None]) -> Iterator[str]:
    """The text that the model generates after the prompt, piece by piece; calls `tick` at each token."""
    prompt = trained.encoder.encode(request.prompt.encode(errors="surrogateescape"))
    window = trained.model.config.max_seq_len
    room = window - len(prompt) + 1  # the model never reads the last token that it generates
    if request.tokens > room:
        remedy = f"ask for at most {room}" if room > 0 else "give a shorter prompt"
        raise ValueError(
            f"prompt and --tokens must fit into the {window} tokens that the model can read, got {len(prompt)} and "
            f"{request.tokens}; {remedy}"
        )
    tokens = generate(
        trained.model,
        trained.variables,
        prompt[None].astype(np.int32),
        max_new_tokens=request.tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        key=jax.random.key(request.seed),
        kv_cache_dtype=E4M3 if request.kv_cache == "fp8" else None,
        stream=True,
    )

    def ticked() -> Iterator[int]:
        for token in tokens:
            tick()
            yield int(token[0])

    return decoded(trained.encoder, ticked())


def decoded(encoder: Encoder, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens, a piece for each. A character of several tokens comes whole, with the last of them."""
    ids: list[int] = []
    given = ""
    for token in tokens:
        ids.append(token)
        text = encoder.decode(np.asarray(ids))
        whole = text.rstrip(UNFINISHED)
        piece = whole[len(given) :] if whole.startswith(given) else ""
        given += piece
        yield piece
    text = encoder.decode(np.asarray(ids))
    yield text[len(given) :] if text.startswith(given) else "\n" + text


class Clock:
    """How long a request took: until its first token, and how many came in a second after that."""

    def __init__(self) -> None:
        self.start, self.first, self.last, self.tokens = time.perf_counter(), 0.0, 0.0, 0

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first if self.tokens else self.last
        self.tokens += 1

    def __str__(self) -> str:
        first = f"first token after {self.first - self.start:.1f} s"
        if self.tokens < 2 or self.last <= self.first:
            return first
        return f"{first}, then {(self.tokens - 1) / (self.last - self.first):,.1f} tokens/s"


def sample(model: GPT, variables: PyTree, prompt: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` tokens after a prompt (tokens,). `count` may exceed the model's window: the model generates half a window
    at a time, after the last half window of the tokens so far. With several processes, all of them must call it.
    """
    key, half = jax.random.key(seed), max(1, model.config.max_seq_len // 2)
    tokens, end = prompt, len(prompt) + count
    while len(tokens) < end:
        key, own = jax.random.split(key)
        new = generate(
            model, variables, tokens[None, -half:], max_new_tokens=min(half, count), temperature=TEMPERATURE, key=own
        )
        tokens = np.append(tokens, new)
    return tokens[len(prompt) : end]


def main(argv: list[str]) -> int:
    try:
        request = read_request(argv)
        check(request)
        trained = load(find(request.run, request.output), request.weights)
        print(trained.origin, file=sys.stderr)
        clock = Clock()
        for piece in continued(trained, request, clock.tick):
            print(piece, end="", flush=True)
        print()
        print(clock, file=sys.stderr)
    except (ValueError, OSError) as error:
        return command_line.complain("generate", error)
    return 0
