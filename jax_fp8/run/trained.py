"""Models that are trained already: of a run's last checkpoint, of a Hugging Face folder, or of a file of params.

    path ─find→ folder or file ─load→ Trained: model, variables, tokenizer

The model must fit on one device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.files import Unreadable, read_json
from jax_fp8.core.formats import E4M3
from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.lora import Lora
from jax_fp8.core.paths import BESIDE
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.models.huggingface.frozen import frozen_variables
from jax_fp8.models.huggingface.weights import load_huggingface
from jax_fp8.models.limits import config_of
from jax_fp8.models.params_file import load_config, load_params
from jax_fp8.plan.choices import head_in, layers_in
from jax_fp8.report.run_format import CHECKPOINTS, CONFIG, OF_A_MODEL, TOKENIZER, JsonObject
from jax_fp8.run.checkpoints import Checkpoints, read_last
from jax_fp8.run.encoders import ByteEncoder, Encoder, LibraryEncoder, load_copy
from jax_fp8.run.settings import Settings, settings_from
from jax_fp8.state.frozen_kernels import freeze_kernels, merge_adapters

PARAMS = ".safetensors"


class Trained(NamedTuple):
    """A model that can generate; `origin` says where it is from, for a message."""

    model: GPT
    variables: Variables
    encoder: Encoder
    origin: str


def make_model(settings: Settings, config: GPTConfig, recipe: str) -> GPT:
    """The GPT with one recipe, and with the adapters of --lora; "bf16" has no FP8 anywhere."""
    lora = Lora(rank=settings.lora, alpha=settings.lora_alpha) if settings.lora else None
    plain = GPT(config, recipe=None, remat=settings.remat, param_dtype=jnp.dtype(settings.param_dtype), lora=lora)
    if recipe == "bf16":
        return plain
    return plain.clone(
        recipe=layers_in(recipe, settings.fast),
        head_recipe=head_in(recipe) if settings.fp8_head else None,
        fp8_attention=settings.fp8_attention,
    )


def make_init(model: GPT, params: PyTree = None, apart: bool = False) -> Callable[..., Variables]:
    """`model.init` with these params in place of its own. With adapters, the kernels are frozen, in FP8 if the model
    has a recipe; `apart` as in `freeze_kernels`.
    """

    def init(key: jax.Array, tokens: jax.Array) -> Variables:
        variables = model.init(key, tokens)
        if model.lora is not None:
            forward = lambda variables: model.apply(variables, tokens)  # noqa: E731
            return freeze_kernels(variables, model.recipe, params, forward=forward, apart=apart)
        return variables if params is None else {**variables, "params": params}

    return init


def whole_params(model: GPT, variables: Variables) -> PyTree:
    """The params of the model; adapters are merged into them."""
    if model.lora is None:
        return variables["params"]
    plain = model.clone(lora=None, recipe=None, head_recipe=None, fp8_attention=False)
    return merge_adapters(variables, model.lora, _shapes(plain.init)["params"])


def find(name: str, output: Path, what: str = "a run") -> Path:
    """The run's folder, or the model's folder or file."""
    paths = [Path(name), output / name]
    existing = next((path for path in paths if path.is_dir() or (path.suffix == PARAMS and path.is_file())), None)
    if existing is None:
        raise ValueError(f"{what} must be a folder, or the name of one in {output}, got {name!r}; name one that exists")
    return existing


def load(path: Path, weights: str = "bf16") -> Trained:
    """The model of a run, of a Hugging Face folder, or of a file of params; the last two with `weights` in "fp8" or
    "bf16".
    """
    if not is_run(path):
        return load_converted(path, weights)
    if weights != "bf16":
        raise ValueError(
            f"--weights fp8 is for models that are no runs, got the run {path}; leave it out: a run generates by the "
            "recipe that it was trained with"
        )
    return load_run(path)


def is_run(path: Path) -> bool:
    return not (path.is_file() or _is_of_huggingface(path))


def load_converted(path: Path, weights: str = "bf16") -> Trained:
    """The model of a Hugging Face folder, with its tokenizer, or of a file of params, whose tokenizer is beside it."""
    is_fp8 = weights == "fp8"
    tokenizer = path.with_name(TOKENIZER) if path.is_file() else path / TOKENIZER
    if not path.is_file():
        config, loaded = load_huggingface(path, dtype=E4M3 if is_fp8 else None)
    else:
        config, loaded = load_config(path), load_params(path)
        loaded = frozen_variables(config, loaded, CurrentScaling()) if is_fp8 else loaded
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer} must have the tokenizer of the model, got no such file; copy it there")
    variables = jax.device_put(loaded if is_fp8 else {"params": loaded})
    encoder = LibraryEncoder.load(tokenizer, "copy it again")
    return Trained(GPT(config, recipe=None), variables, encoder, f"{path}, {weights}")


def load_run(run: Path) -> Trained:
    """The model of a run, with the variables of its last checkpoint."""
    notes = notes_of(run)
    settings = settings_from(notes["settings"])
    model = make_model(settings, config_of(notes["model"], str(run)), settings.recipe)
    variables = restored(run, model)
    return Trained(model, variables, encoder_of(run, notes), f"{run} after step {notes['step']}, {settings.recipe}")


def notes_of(run: Path) -> JsonObject:
    """The notes of a run's last checkpoint, without which it has no model."""
    notes = read_last(run / CHECKPOINTS, OF_A_MODEL)
    if notes is None:
        raise ValueError(f"{run} must have a checkpoint, got none; train with --checkpoint-every")
    return notes


def encoder_of(run: Path, notes: JsonObject) -> Encoder:
    """The tokenizer of a run, which the notes of its checkpoint name."""
    return ByteEncoder() if notes["tokenizer"] == ByteEncoder.identity else load_copy(run, notes["tokenizer"])


def restored(run: Path, model: GPT, collections: tuple[str, ...] | None = None) -> Variables:
    """The variables of a run's last checkpoint, or these collections of them."""
    with Checkpoints(run / CHECKPOINTS, every=0, keep=1, resume=True) as checkpoints:
        assert checkpoints.last is not None, "the caller has read its notes"
        frozen = checkpoints.last["arrays"].get(FROZEN, {})
        shapes = _shapes(make_init(model, apart=not any(BESIDE in path for path in frozen)))
        wanted = {name: tree for name, tree in shapes.items() if collections is None or name in collections}
        return checkpoints.restore_variables(wanted)


def _shapes(init: Callable[..., Variables]) -> Variables:
    return jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct((1, 16), np.int32))


def _is_of_huggingface(folder: Path) -> bool:
    """Only Hugging Face's config.json has a "model_type"; runs have a config.json, too."""
    try:
        return "model_type" in read_json(folder / CONFIG, constant=float)
    except Unreadable:  # a run whose config.json is missing or damaged can generate all the same
        return False
