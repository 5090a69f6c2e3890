"""Generate text from a run's last checkpoint, with the recipe and the tokenizer that it was trained with; or from a
model of Hugging Face, in bfloat16, or a file that `python -m jax_fp8 convert` made of one.

    python -m jax_fp8 train --name mine --checkpoint-every 100
    python -m jax_fp8 generate mine --prompt "def " --tokens 100 --temperature 0.8 --top-k 40
    python -m jax_fp8 generate path/to/Llama-3.2-1B --prompt "def " --temperature 0

notes of the checkpoint → model; its arrays → variables; prompt → tokens ─generate→ tokens → text

It writes no file: the run may continue meanwhile. The model must fit on one device.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro

from jax_fp8.core.files import Unreadable, read_json
from jax_fp8.models.generate import generate
from jax_fp8.models.gpt import GPT
from jax_fp8.models.huggingface.weights import load_huggingface
from jax_fp8.models.limits import config_of
from jax_fp8.models.params_file import load_config, load_params
from jax_fp8.report.run_format import CHECKPOINTS, CONFIG, OF_A_MODEL, TOKENIZER
from jax_fp8.run import command_line
from jax_fp8.run.checkpoints import Checkpoints, read_last
from jax_fp8.run.job import make_model
from jax_fp8.run.settings import settings_from
from jax_fp8.run.text import ByteEncoder, Encoder, PairEncoder

PARAMS = ".safetensors"
TEMPERATURE = 0.8  # of a run's sample: below 1 prefers likely tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """Generate text from a checkpoint of a run, or from a model of Hugging Face."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """A run's folder, or its name among those of --output; or a model's folder or file."""
    prompt: str = ""
    """The text that the model continues."""
    tokens: int = 100
    """How many it generates; with the prompt, no more than the model can read."""
    temperature: float = 0.8
    """Below 1 prefers likely tokens; 0 takes the most likely one."""
    top_k: int | None = None
    """Draw from so many most likely tokens."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens that have this probability together."""
    seed: int = 0
    """Of what is drawn."""
    output: Path = Path("runs")
    """Where run folders are."""


class Trained(NamedTuple):
    """A model that can generate."""

    model: GPT
    variables: dict[str, Any]
    encoder: Encoder
    origin: str


def read_request(argv: list[str]) -> Request:
    return command_line.read(Request, argv, "generate")


def check(request: Request) -> None:
    """Raise a ValueError of one sentence for what cannot be, whatever the run is."""
    if not request.run:
        raise ValueError(f"a run must be named, got none; say a folder, or the name of one in {request.output}")
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


def find(request: Request) -> Path:
    """The run's folder, or the model's folder or file."""
    places = [Path(request.run), request.output / request.run]
    found = next((path for path in places if path.is_dir() or (path.suffix == PARAMS and path.is_file())), None)
    if found is None:
        raise ValueError(
            f"a run must be a folder, or one of {request.output}, got {request.run!r}; name one that is there"
        )
    return found


def load(path: Path) -> Trained:
    """The model of a run, or one that was converted."""
    return load_converted(path) if path.is_file() or _is_of_huggingface(path) else load_run(path)


def load_converted(path: Path) -> Trained:
    """A model of Hugging Face, or a file of params with its shape; the tokenizer lies beside."""
    if path.is_file():
        config, params, beside = load_config(path), load_params(path), path.with_name(TOKENIZER)
    else:
        (config, params), beside = load_huggingface(path), path / TOKENIZER
    if not beside.is_file():
        raise ValueError(f"{beside} must have the tokenizer of the model, got no such file; copy it there")
    model = GPT(config, recipe=None)
    return Trained(
        model, {"params": jax.device_put(params)}, PairEncoder.load(beside, "copy it again"), f"{path}, bf16"
    )


def _is_of_huggingface(folder: Path) -> bool:
    """Runs have a config.json, too."""
    try:
        return "model_type" in read_json(folder / CONFIG, constant=float)
    except Unreadable:  # of a run that does not need it
        return False


def load_run(run: Path) -> Trained:
    """The model of a run as its last checkpoint has it."""
    notes = read_last(run / CHECKPOINTS, OF_A_MODEL)
    if notes is None:
        raise ValueError(f"{run} must have a checkpoint, got none; train with --checkpoint-every")
    settings = settings_from(notes["settings"])
    encoder = ByteEncoder() if settings.tokenizer == "bytes" else _pairs(run, notes["tokenizer"])
    model = make_model(settings, config_of(notes["model"], str(run)), settings.recipe)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), np.int32))
    with Checkpoints(run / CHECKPOINTS, every=0, keep=1, resume=True) as kept:
        variables = kept.restore_variables(shapes)
    return Trained(model, variables, encoder, f"{run} after step {notes['step']}, {settings.recipe}")


def _pairs(run: Path, identity: str) -> PairEncoder:
    path = run / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{path} must have the tokenizer of the run, got no such file; go on with the run to write it")
    encoder = PairEncoder.load(path, "remove it, and go on with the run to write it again")
    if encoder.identity != identity:
        raise ValueError(f"{path} must be the tokenizer of the checkpoint, got another one; put back that of the run")
    return encoder


def continued(trained: Trained, request: Request) -> str:
    """What the model generates after the prompt."""
    prompt = trained.encoder.encode(request.prompt.encode(errors="surrogateescape"))
    window = trained.model.config.max_seq_len
    room = window - len(prompt) + 1  # the last token that is generated is not read
    if request.tokens > room:
        remedy = f"ask for at most {room}" if room > 0 else "give a shorter prompt"
        raise ValueError(
            f"prompt and --tokens must fit into the {window} tokens that the model can read, got {len(prompt)} and "
            f"{request.tokens}; {remedy}"
        )
    generated = generate(
        trained.model,
        trained.variables,
        prompt[None].astype(np.int32),
        max_new_tokens=request.tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        key=jax.random.key(request.seed),
    )
    return trained.encoder.decode(np.asarray(generated)[0])


def sample(model: GPT, variables: Any, prompt: np.ndarray, count: int, seed: int) -> np.ndarray:
    """So many tokens after a prompt (tokens,), also more than the model can read: it generates half a window at a time,
    after the last half of what is there. On several devices all processes run it.
    """
    key, half = jax.random.key(seed), max(1, model.config.max_seq_len // 2)
    text, end = prompt, len(prompt) + count
    while len(text) < end:
        key, own = jax.random.split(key)
        settings: Any = {"max_new_tokens": min(half, count), "temperature": TEMPERATURE, "key": own}
        text = np.append(text, generate(model, variables, text[None, -half:], **settings))
    return text[len(prompt) : end]


def main(argv: list[str]) -> int:
    try:
        request = read_request(argv)
        check(request)
        trained = load(find(request))
        print(trained.origin, file=sys.stderr)
        print(continued(trained, request))
    except (ValueError, OSError) as error:
        return command_line.complain("generate", error)
    return 0
