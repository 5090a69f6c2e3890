"""What a run begins with, where --init-from names a model: its shape, its params, and its tokenizer.

    a Hugging Face folder, a file of params, or a run of ours ─begin_from→ Start
    the checkpoint of a run that is resumed ─────────────────────────────→ Start

A run that is resumed takes the shape from the notes of its checkpoint, and the tokenizer from its own folder. So it
no longer needs the model that it began with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.types import PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.weights import load_huggingface
from jax_fp8.models.limits import config_of
from jax_fp8.models.params_file import load_config, map_params
from jax_fp8.report.run_format import CHECKPOINTS, OF_A_RUN, TOKENIZER
from jax_fp8.run.checkpoints import read_last
from jax_fp8.run.encoders import Encoder, LibraryEncoder
from jax_fp8.run.settings import Settings, settings_from
from jax_fp8.run.trained import encoder_of, find, is_run, make_model, notes_of, restored, whole_params


class Start(NamedTuple):
    """A model to begin with.

    Args:
      model: its shape.
      encoder: its tokenizer; None where it has none.
      load: returns its params, NumPy arrays of the dtype that it is given.
    """

    model: GPTConfig
    encoder: Encoder | None
    load: Callable[[str], PyTree]


def begin_from(settings: Settings, run: Path | None) -> Start:
    """The model of --init-from, or that of the checkpoint of the run that is resumed.

    Args:
      run: the folder of the run to resume; None for a new run.
    """
    assert settings.init_from is not None
    notes = None if run is None else read_last(run / CHECKPOINTS, OF_A_RUN)
    if run is not None and notes is not None:
        return Start(
            config_of(notes["model"], str(run)), encoder_of(run, notes), lambda dtype: _of(settings).load(dtype)
        )
    return _of(settings)


def _of(settings: Settings) -> Start:
    path = find(str(settings.init_from), settings.output, "--init-from")
    if is_run(path):
        return _of_a_run(path)
    if path.is_file():
        return Start(load_config(path), _encoder_beside(path.parent), lambda dtype: _cast(map_params(path), dtype))
    config, _ = load_huggingface(path)
    return Start(config, _encoder_beside(path), lambda dtype: load_huggingface(path, dtype=jnp.dtype(dtype))[1])


def _of_a_run(run: Path) -> Start:
    if jax.process_count() > 1:
        raise ValueError(
            f"--init-from a run needs one process, which reads its checkpoint, got {jax.process_count()}; write "
            "the run to a file by `python -m jax_fp8 export`, and begin with that"
        )
    notes = notes_of(run)
    config = config_of(notes["model"], str(run))

    def load(dtype: str) -> PyTree:
        settings = settings_from(notes["settings"])
        model = make_model(settings, config, settings.recipe)
        collections = ("params",) if model.lora is None else ("params", FROZEN)
        return _cast(jax.device_get(whole_params(model, restored(run, model, collections))), dtype)

    return Start(config, encoder_of(run, notes), load)


def _encoder_beside(folder: Path) -> LibraryEncoder | None:
    file = folder / TOKENIZER
    return LibraryEncoder.load(file, "copy it again") if file.is_file() else None


def _cast(params: PyTree, dtype: str) -> PyTree:
    return jax.tree.map(lambda param: np.asarray(param).astype(jnp.dtype(dtype)), params)
