"""Let the model of a run write, from its last checkpoint, with the recipe and the tokenizer that it was trained with;
or a model of Hugging Face, in bfloat16, or a file that `python -m jax_fp8 convert` made of one.

    python examples/train_gpt.py --name mine --checkpoint-every 100
    python examples/generate.py mine --prompt "def " --tokens 100 --temperature 0.8 --top-k 40
    python examples/generate.py path/to/Llama-3.2-1B --prompt "def " --temperature 0

notes of the checkpoint → model; its arrays → variables; prompt → tokens ─fp8.generate→ tokens → text

It reads, and writes nothing: the run may go on meanwhile. The model must fit on one device.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import command_line
import jax
import numpy as np
import tyro
from checkpoints import MAIN, Checkpoints, read_last
from job import make_model
from notes import OF_A_MODEL
from record import TOKENIZER
from settings import Settings
from text import ByteEncoder, Encoder, PairEncoder

import jax_fp8 as fp8
from jax_fp8.core.files import Unreadable, read_json
from jax_fp8.models.limits import config_of
from jax_fp8.streams import one_line, surviving

PARAMS = ".safetensors"


@dataclasses.dataclass(frozen=True)
class Wish:
    """What shall be written."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """A run's folder, or its name among those of --output; or a model's folder or file."""
    prompt: str = ""
    """The text that the model goes on from."""
    tokens: int = 100
    """How many it writes; with the prompt, no more than the model can read."""
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
    """A model that can write."""

    model: fp8.GPT
    variables: dict[str, Any]
    encoder: Encoder
    origin: str


def read_wish(argv: list[str]) -> Wish:
    return command_line.read(Wish, argv, "Let the model of a run write.")


def check(wish: Wish) -> None:
    """Raise a ValueError of one sentence for what cannot be, whatever the run is."""
    if not wish.run:
        raise ValueError(f"a run must be named, got none; say a folder, or the name of one in {wish.output}")
    if not wish.prompt:
        raise ValueError("--prompt must have some text to go on from, got none; give the first words")
    if wish.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {wish.tokens}")
    if not 0 <= wish.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 or a positive number, got {wish.temperature}")
    if wish.top_k is not None and wish.top_k < 1:
        raise ValueError(f"--top-k must be at least 1, got {wish.top_k}; leave it out to draw from all tokens")
    if wish.top_p is not None and not 0 < wish.top_p <= 1:
        raise ValueError(
            f"--top-p must be above 0 and at most 1, got {wish.top_p}; leave it out to draw from all tokens"
        )
    if not 0 <= wish.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {wish.seed}")


def find(wish: Wish) -> Path:
    """The run's folder, or the model's folder or file."""
    places = [Path(wish.run), wish.output / wish.run]
    found = next((path for path in places if path.is_dir() or (path.suffix == PARAMS and path.is_file())), None)
    if found is None:
        raise ValueError(f"a run must be a folder, or one of {wish.output}, got {wish.run!r}; name one that is there")
    return found


def load(path: Path) -> Trained:
    """The model of a run, or one that was converted."""
    return load_converted(path) if path.is_file() or _is_of_huggingface(path) else load_run(path)


def load_converted(path: Path) -> Trained:
    """A model of Hugging Face, or a file of params with its shape; the tokenizer lies beside."""
    if path.is_file():
        config, params, beside = fp8.load_config(path), fp8.load_params(path), path.with_name(TOKENIZER)
    else:
        (config, params), beside = fp8.load_huggingface(path), path / TOKENIZER
    if not beside.is_file():
        raise ValueError(f"{beside} must have the tokenizer of the model, got no such file; copy it there")
    model = fp8.GPT(config, recipe=None)
    return Trained(
        model, {"params": jax.device_put(params)}, PairEncoder.load(beside, "copy it again"), f"{path}, bf16"
    )


def _is_of_huggingface(folder: Path) -> bool:
    """Runs have a config.json, too."""
    try:
        return "model_type" in read_json(folder / "config.json", constant=float)
    except Unreadable:  # of a run that does not need it
        return False


def load_run(run: Path) -> Trained:
    """The model of a run as its last checkpoint has it."""
    notes = read_last(run / MAIN, OF_A_MODEL)
    if notes is None:
        raise ValueError(f"{run} must have a checkpoint, got none; train with --checkpoint-every")
    fields = {field.name for field in dataclasses.fields(Settings)} & set(notes["settings"])
    settings = Settings(**{name: notes["settings"][name] for name in fields})
    encoder = ByteEncoder() if settings.tokenizer == "bytes" else _pairs(run, notes["tokenizer"])
    model = make_model(settings, config_of(notes["model"], str(run)), settings.recipe)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), np.int32))
    with Checkpoints(run / MAIN, every=0, keep=1, resume=True) as kept:
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


def go_on(trained: Trained, wish: Wish) -> str:
    """What the model writes after the prompt."""
    prompt = trained.encoder.encode(wish.prompt.encode(errors="surrogateescape"))
    window = trained.model.config.max_seq_len
    room = window - len(prompt) + 1  # the last token that is written is not read
    if wish.tokens > room:
        remedy = f"ask for at most {room}" if room > 0 else "give a shorter prompt"
        raise ValueError(
            f"prompt and --tokens must fit into the {window} tokens that the model can read, got {len(prompt)} and "
            f"{wish.tokens}; {remedy}"
        )
    written = fp8.generate(
        trained.model,
        trained.variables,
        prompt[None].astype(np.int32),
        max_new_tokens=wish.tokens,
        temperature=wish.temperature,
        top_k=wish.top_k,
        top_p=wish.top_p,
        key=jax.random.key(wish.seed),
    )
    return trained.encoder.decode(np.asarray(written)[0])


def main(argv: list[str]) -> int:
    with surviving() as streams:
        return streams.status(_main(argv))


def _main(argv: list[str]) -> int:
    try:
        wish = read_wish(argv)
        check(wish)
        trained = load(find(wish))
        print(trained.origin, file=sys.stderr)
        print(go_on(trained, wish))
    except (ValueError, OSError) as error:
        print(f"generate.py: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
