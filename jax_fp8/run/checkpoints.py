"""Checkpoints of a run: what is in one, how it is written and read, and what may be another when a run goes on.

    runs/<name>/checkpoints/<step>/    params, opt_state, fp8    arrays, wherever they lie
                                       notes                     everything else, as JSON

Orbax copies the arrays to the host, and writes them beside training. A folder gets its name last, so one that is called
like a step is complete. Of every array the notes hold a sum, which tells whether what is read is what was saved.

The weights in FP8 are not saved; they follow from params and scales. The position in the data and the random state are
two numbers, step and seed, for batches are a function of both, and nothing is drawn while training.

Every complaint is a ValueError of one sentence: what must hold, what arrived, what to do.
"""

import contextlib
import errno
import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import SingleDeviceSharding

from jax_fp8.models.limits import config_of
from jax_fp8.report.run_format import NOTES, CannotResume, read_notes
from jax_fp8.run.orbax_errors import quietly, reason
from jax_fp8.run.settings import settings_from
from jax_fp8.state.train_state import TrainState

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element
SETTLED = 0.5  # seconds after which what was written beside an array that failed has failed too
UNFINISHED = "*.orbax-checkpoint-tmp*"


class CannotSave(OSError):
    """A checkpoint cannot be written."""


class Checkpoints:
    """Those of one training run. `last` has the notes of the last one, if the run is to go on from it.

    Args:
      folder: their own; it need not exist.
      every: steps between two; 0 saves none.
      keep: how many of them stay.
      resume: whether to look for the last one.
    """

    def __init__(self, folder: Path, every: int, keep: int, resume: bool):
        self.folder, self.every, self.keep = folder.absolute(), every, keep
        self.last = read_last(folder) if resume else None
        self._manager = self._unfinished = None  # the step that is being written
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.finish()

    def is_due(self, step: int, steps: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == steps)

    def check_room(self, state: TrainState) -> None:
        """Refuse before training what will not fit; the state, or its shapes."""
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(_items(state)))
        needed = size * (self.keep + 1 - len(steps_in(self.folder)))  # one is written before the oldest goes
        free = shutil.disk_usage(self.folder.parent).free
        if self.every and needed > free:
            raise CannotSave(
                f"--keep {self.keep} needs room for {needed / 2**20:,.1f} MiB of checkpoints, got "
                f"{free / 2**20:,.1f} MiB in {self.folder.parent}; free some space, or choose another --output"
            )

    def save(self, step: int, state: TrainState, notes: dict[str, Any]) -> None:
        """Begin to write; the state may be donated at once. The one before is finished first."""
        if not self.every or (self.last is not None and self.last["step"] == step):
            return
        items = _items(state)
        notes = notes | {"step": step, "arrays": {name: describe(tree) for name, tree in items.items()}}
        arguments = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        with self._writing():
            self._wait()
            self._check_folder()
            self._opened().save(step, args=ocp.args.Composite(notes=ocp.args.JsonSave(notes), **arguments))
        self.last, self._unfinished = notes, step

    def _check_folder(self):
        """Raise where Orbax would wait for minutes, or make a folder again that somebody took away."""
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(f"no folder {self.folder.parent}")
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(self.folder if self.folder.exists() else self.folder.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def finish(self) -> None:
        """Wait until the last one is written."""
        with self._writing():
            self._wait()
            if self._manager is not None:
                self._manager.close()
        self._close()

    def restore(self, like: TrainState, new_fp8: Callable[[], Any]) -> tuple[TrainState, bool]:
        """The state of the last one, and whether its FP8 state is new: that of another recipe is.

        Args:
          like: `step.state_shapes(...)`; what has no sharding is put on the first device.
          new_fp8: makes the FP8 state before the first step.
        """
        assert self.last is not None, "there is one"
        like = jax.tree.map(_with_place, like)
        wanted = _items(like)
        has_scales = _types(self.last["arrays"].get("fp8", {})) == describe(wanted.get("fp8", {}))
        if not has_scales:
            wanted.pop("fp8", None)
        items = self._read(wanted)
        is_new = not has_scales and bool(like.fp8)
        fp8_state = jax.tree.map(_put, new_fp8(), like.fp8) if is_new else items.get("fp8", {})
        step = _put(self.last["step"], like.step)
        return TrainState(step, items["params"], fp8_state, items["opt_state"]), is_new

    def restore_variables(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """Some of "params" and "fp8" of the last one, for a program that does not train; `like` as in `restore`."""
        return self._read({name: jax.tree.map(_with_place, tree) for name, tree in like.items()})

    def _read(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Some of the items, each in the places of its like, and as it was saved."""
        assert self.last is not None, "there is one"
        step, saved = self.last["step"], self.last["arrays"]
        for name, tree in wanted.items():
            _check_types(name, _types(saved.get(name, {})), describe(tree))
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        with self._writing():
            manager = self._opened()
        with _reading(self.folder, step):
            found = manager.restore(step, args=ocp.args.Composite(**arguments))
            for name in wanted:
                wrong = [path for path, array in describe(found[name]).items() if array != saved[name][path]]
                if wrong:
                    raise ValueError(f"other numbers in {name}{wrong[0]}")
            return {name: found[name] for name in wanted}

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            if self.every:
                options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True)
            else:  # another process may be writing the next one
                options = ocp.CheckpointManagerOptions(read_only=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
            self._quiet.enter_context(quietly())
        return self._manager

    def _close(self):
        self._manager = None
        self._quiet.close()

    def _wait(self):
        """For what is being written: it must be there then."""
        if self._unfinished is None:
            return
        step, self._unfinished = self._unfinished, None
        self._opened().wait_until_finished()
        if step not in steps_in(self.folder):
            raise FileNotFoundError(f"no folder {self.folder / str(step)}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """What went wrong, in one sentence; what is unfinished takes no room then."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._manager is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._manager.close()
                time.sleep(SETTLED)
            gc.collect()
            for path in self.folder.glob(UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            self._close()
            steps = steps_in(self.folder)
            remains = f"that of step {steps[-1]} is whole, --resume goes on from it" if steps else "there is none yet"
            raise CannotSave(f"a checkpoint must find room in {self.folder}, got {reason(error)}; {remains}") from error


@contextlib.contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    """What went wrong, in one sentence."""
    try:
        with quietly():
            yield
    except Exception as error:
        # Orbax raises Exception itself where an array cannot be read.
        if type(error) is not Exception and not isinstance(error, OSError | ValueError | KeyError):
            raise
        path, before = folder / str(step), [number for number in steps_in(folder) if number < step]
        remedy = f"remove it, and --resume goes on from step {before[-1]}" if before else "there is no other"
        raise CannotResume(f"the checkpoint {path} must be as it was saved, got {reason(error)}; {remedy}") from None


def steps_in(folder: Path) -> list[int]:
    """Of which steps there are checkpoints, in order."""
    found = (path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())
    return sorted(int(path.name) for path in found if path.name == str(int(path.name)))  # and not 007


def read_last(folder: Path, needed: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """The notes of the last checkpoint in a folder, which must have these entries. No more than a file is read: with
    Orbax, all processes would have to come.
    """
    steps = steps_in(folder)
    if not steps:
        return None
    with _reading(folder, steps[-1]):
        notes = read_notes(folder / str(steps[-1]) / NOTES, steps[-1], needed)
        if "settings" in notes:
            _check_settings(notes["settings"])
        if "model" in notes:
            config_of(notes["model"], "notes")
        return notes


def _check_settings(described: dict[str, Any]) -> None:
    """Raise unless settings are such as a command line gives. Older checkpoints have fewer of them."""
    for name in ("preset", "recipe", "tokenizer", "vocab_size"):
        if name not in described:
            raise ValueError(f"notes whose settings are without {name}")
    settings_from(described)


def describe(tree: Any) -> dict[str, list]:
    """Of every array its dtype and shape, and the sum of its bits, unless it is only a shape."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get([_sum_of_bits(leaf) for _, leaf in leaves if isinstance(leaf, jax.Array)])
    numbers = iter(sums)
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape)]
        + ([int(next(numbers))] if isinstance(leaf, jax.Array) else [])
        for path, leaf in leaves
    }


@jax.jit
def _sum_of_bits(array: jax.Array) -> jax.Array:
    """uint32[]: every element has an odd factor of its own, so that one that changes shows, and two that change places.
    The same wherever the array lies, for sums of integers have no order.
    """
    bits = lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(array.shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, array.shape, dim)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _items(state: TrainState) -> dict[str, Any]:
    """What is saved of a state; nothing of what is empty."""
    items = {"params": state.params, "opt_state": state.opt_state, "fp8": state.fp8}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}


def _types(arrays: dict[str, list]) -> dict[str, list]:
    return {path: array[:2] for path, array in arrays.items()}


def _check_types(name, saved, wanted) -> None:
    """Raise unless arrays are there, and are kept in the dtypes and shapes that this run has."""
    for path in [*wanted, *saved]:
        if saved.get(path) != wanted.get(path):
            one, other = (_written(arrays.get(path)) for arrays in (wanted, saved))
            raise CannotResume(
                f"{name}{path} must be {one} in this run, got {other} in the checkpoint; train with the options "
                "that it was saved with"
            )


def _written(array: list | None) -> str:
    return "absent" if array is None else f"{array[0]}{array[1]}"


def _with_place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    place = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _put(value: Any, like: Any) -> jax.Array:
    whole = np.asarray(value, like.dtype)
    return jax.make_array_from_callback(whole.shape, like.sharding, lambda index: whole[index])
