"""Checkpoints of a run: what one contains, how it is written and read, and what may differ when a run is resumed.

    runs/<name>/checkpoints/<step>/    params, opt_state, fp8    arrays, sharded or not
                                       fp8_frozen                the same, with --lora: kernels that are frozen in FP8
                                       notes                     everything else, as JSON

Orbax copies the arrays to the host and writes them while training continues. It renames the folder to the step's number
only when all files are written, so a folder with such a name is complete. The notes hold a checksum of every array: an
array that was damaged on the disk is detected when it is read.

The FP8 copies of the weights are not saved; params and scales determine them. A batch is a function of step and seed,
and so are the keys of dropout, so these two numbers replace a position in the data and a random state.

Every error is one sentence: what must hold, what arrived, what to do.
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

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike

from jax_fp8.core.types import PyTree, Variables
from jax_fp8.models.limits import config_of
from jax_fp8.report.run_format import NOTES, CannotResume, JsonObject, read_notes
from jax_fp8.run.orbax_errors import quietly, reason
from jax_fp8.run.settings import settings_from
from jax_fp8.state.train_state import TrainState

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element
SETTLED = 0.5  # seconds in which Orbax's other threads fail too, once the write of one array has failed
UNFINISHED = "*.orbax-checkpoint-tmp*"  # names of the folders that Orbax is still writing


class CannotSave(OSError):
    """A checkpoint cannot be written."""


class Checkpoints:
    """The checkpoints of one training run. `last` has the notes of the last one, if the run resumes from it.

    Args:
      folder: has nothing but checkpoints; it need not exist.
      every: steps between two checkpoints; 0 saves none.
      keep: how many checkpoints stay; older ones are removed.
      resume: whether to look for the last one.
    """

    def __init__(self, folder: Path, every: int, keep: int, resume: bool):
        self.folder, self.every, self.keep = folder.absolute(), every, keep
        self.last = read_last(folder) if resume else None
        self._manager: ocp.CheckpointManager | None = None
        self._unfinished: int | None = None  # the step whose checkpoint is being written
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def is_due(self, step: int, steps: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == steps)

    def check_room(self, state: TrainState) -> None:
        """Raise before training if the disk has no room for the checkpoints of this state, of arrays or of shapes."""
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(_items(state)))
        needed = size * (self.keep + 1 - len(steps_in(self.folder)))  # a new one is written before the oldest goes
        free = shutil.disk_usage(self.folder.parent).free
        if self.every and needed > free:
            raise CannotSave(
                f"--keep {self.keep} needs room for {needed / 2**20:,.1f} MiB of checkpoints, got "
                f"{free / 2**20:,.1f} MiB in {self.folder.parent}; free some space, or choose another --output"
            )

    def save(self, step: int, state: TrainState, notes: JsonObject) -> None:
        """Finish the previous checkpoint, then begin to write this one. The state may be donated as soon as this
        returns.
        """
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

    def _check_folder(self) -> None:
        """Raise where Orbax would wait for minutes, or create a folder again that somebody has removed."""
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(f"no folder {self.folder.parent}")
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(self.folder if self.folder.exists() else self.folder.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        with self._writing():
            self._wait()
            if self._manager is not None:
                self._manager.close()
        self._close()

    def restore(self, like: TrainState, new_fp8: Callable[[], PyTree]) -> tuple[TrainState, bool]:
        """The state of the last checkpoint, and whether its FP8 state is new, because another recipe saved the
        checkpoint.

        Args:
          like: `step.state_shapes(...)`; a leaf without a sharding is put on the first device.
          new_fp8: makes the FP8 state as it is before the first step.
        """
        assert self.last is not None, "there is a checkpoint"
        like = jax.tree.map(_with_sharding, like)
        wanted = _items(like)
        has_scales = _types(self.last["arrays"].get("fp8", {})) == describe(wanted.get("fp8", {}))
        if not has_scales:
            wanted.pop("fp8", None)
        items = self._read(wanted)
        is_new = not has_scales and bool(like.fp8)
        fp8_state = jax.tree.map(_put, new_fp8(), like.fp8) if is_new else items.get("fp8", {})
        step = _put(self.last["step"], like.step)
        collections = {name: items[name] for name in like.collections}
        return TrainState(step, items["params"], fp8_state, items["opt_state"], collections=collections), is_new

    def restore_variables(self, like: Variables) -> dict[str, PyTree]:
        """The collections of `like` from the last checkpoint, for a program that does not train. `like` is as in
        `restore`.
        """
        return self._read({name: jax.tree.map(_with_sharding, tree) for name, tree in like.items()})

    def _read(self, wanted: dict[str, PyTree]) -> dict[str, PyTree]:
        """These items of the last checkpoint, sharded as in `wanted`. Raises if an array is not as it was saved."""
        assert self.last is not None, "there is a checkpoint"
        step, saved = self.last["step"], self.last["arrays"]
        for name, tree in wanted.items():
            _check_types(name, _types(saved.get(name, {})), describe(tree))
        arguments = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
        with self._writing():
            manager = self._opened()
        with _reading(self.folder, step):
            restored = manager.restore(step, args=ocp.args.Composite(**arguments))
            for name in wanted:
                wrong = [path for path, array in describe(restored[name]).items() if array != saved[name][path]]
                if wrong:
                    raise ValueError(f"other numbers in {name}{wrong[0]}")
            return {name: restored[name] for name in wanted}

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            if self.every:
                options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, cleanup_tmp_directories=True)
            else:  # another process may be writing the next checkpoint
                options = ocp.CheckpointManagerOptions(read_only=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
            self._quiet.enter_context(quietly())
        return self._manager

    def _close(self) -> None:
        self._manager = None
        self._quiet.close()

    def _wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise if its folder does not exist then."""
        if self._unfinished is None:
            return
        step, self._unfinished = self._unfinished, None
        self._opened().wait_until_finished()
        if step not in steps_in(self.folder):
            raise FileNotFoundError(f"no folder {self.folder / str(step)}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the block into a `CannotSave` of one sentence, and remove the unfinished checkpoint."""
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
            remedy = "choose another --output: no checkpoint is complete yet"
            if steps:
                remedy = f"the checkpoint of step {steps[-1]} is complete, --resume continues from it"
            raise CannotSave(f"a checkpoint must be written to {self.folder}, got {reason(error)}; {remedy}") from error


@contextlib.contextmanager
def _reading(folder: Path, step: int) -> Iterator[None]:
    """Turn an error of the block into a `CannotResume` of one sentence."""
    try:
        with quietly():
            yield
    except Exception as error:
        # Orbax raises Exception itself where an array cannot be read.
        if type(error) is not Exception and not isinstance(error, OSError | ValueError | KeyError):
            raise
        path, before = folder / str(step), [number for number in steps_in(folder) if number < step]
        remedy = "there is no other, so begin a new run"
        if before:
            remedy = f"remove it, and --resume continues from step {before[-1]}"
        raise CannotResume(f"the checkpoint {path} must be as it was saved, got {reason(error)}; {remedy}") from None


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in this folder, ascending."""
    numbered = (path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())
    return sorted(int(path.name) for path in numbered if path.name == str(int(path.name)))  # and not 007


def read_last(folder: Path, needed: tuple[str, ...] = ()) -> JsonObject | None:
    """The notes of the last checkpoint in a folder, which must have these entries; None where there is no checkpoint.

    The file is read without Orbax, whose reads all processes would have to join.
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


def _check_settings(described: Mapping[str, object]) -> None:
    """Raise unless a command line could give these settings. Checkpoints of older versions have fewer of them."""
    for name in ("preset", "recipe", "tokenizer", "vocab_size"):
        if name not in described:
            raise ValueError(f"notes whose settings are without {name}")
    settings_from(described)


def describe(tree: PyTree) -> dict[str, list]:
    """By path, the dtype and shape of every leaf; for arrays the checksum of their bits as well, which a
    `jax.ShapeDtypeStruct` does not have.
    """
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
    """uint32[]: the sum of all elements' bits, each times an odd factor of its own. So the sum changes when one element
    changes, and when two elements swap places.

    Sums of integers do not depend on the order, so every sharding gives the same checksum.
    """
    bits = lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)  # of each element in the flattened array
    for dim, size in enumerate(array.shape):
        index = index * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, array.shape, dim)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def _items(state: TrainState) -> dict[str, PyTree]:
    """The trees of a state that a checkpoint has, without empty ones."""
    items = {"params": state.params, "opt_state": state.opt_state, "fp8": state.fp8, **state.collections}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}


def _types(arrays: dict[str, list]) -> dict[str, list]:
    """Dtype and shape of each array that `describe` describes, without the checksum."""
    return {path: array[:2] for path, array in arrays.items()}


def _check_types(name: str, saved: Mapping[str, list], wanted: Mapping[str, list]) -> None:
    """Raise unless the checkpoint has the arrays of this run, in the same dtypes and shapes."""
    for path in [*wanted, *saved]:
        if saved.get(path) != wanted.get(path):
            own, other = (_in_words(arrays.get(path)) for arrays in (wanted, saved))
            raise CannotResume(
                f"{name}{path} must be {own} in this run, got {other} in the checkpoint; train with the options "
                "that it was saved with"
            )


def _in_words(array: list | None) -> str:
    return "absent" if array is None else f"{array[0]}{array[1]}"


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _put(value: ArrayLike, like: jax.Array) -> jax.Array:
    """The whole array, which every process has, sharded as `like`."""
    whole = np.asarray(value, like.dtype)
    return jax.make_array_from_callback(whole.shape, like.sharding, lambda index: whole[index])
