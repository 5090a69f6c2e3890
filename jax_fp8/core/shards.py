"""What the program of one device knows of the others, while a step runs on shards; and what layers say of their params.

A step over several devices is one program that each of them runs on its part of the batch and of the params (see
jax_fp8/parallel/). Layers are written once: a layer asks here how its params are split, and hands that to its op, which
does the collectives. Outside of such a step there is nothing to know, and nothing changes.

Before that, layers are traced once as on one device, and declare which dim of a param a `tensor` axis may split:
`ParamSharding`.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.paths import LayerPath

SplitDim = Literal["columns", "rows"]
COLUMNS, ROWS = -1, -2  # dims of a kernel (..., in, features)
DIM_OF: dict[SplitDim, int] = {"columns": COLUMNS, "rows": ROWS}
# jax traces a jitted function once for all calls with such arguments; what is known here is none of them.
_TRACED = jax.make_user_context(default_value=0)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class TensorParallel:
    """The mesh axis over which layers are split, as an op takes it: static.

    Args:
      axis: its name.
      size: how many devices it has.
      sequence: between layers, each device keeps its part of the rows only (sequence parallelism): a block of the
        flattened tokens, in an array of shape (batch, seq / size, features).
    """

    axis: str
    size: int
    sequence: bool = False

    def all_rows(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Leading dims of what a layer computes inside, from those of its input."""
        return (*leading[:-1], leading[-1] * self.size) if self.sequence else leading

    def own_rows(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Leading dims of what a layer returns, from those of what it computes inside."""
        return (*leading[:-1], leading[-1] // self.size) if self.sequence else leading


@dataclass(frozen=True)
class ParamSharding:
    """How a layer lets a param be split over a `tensor` axis.

    Args:
      dim: that is split, counted from the end; None: the layer needs all of the param.
      pieces: of that dim, none of which may be cut: heads, features; None: each of its elements.
      named: what they are, for messages.
      or_whole: more devices than pieces may each keep the whole param.
      is_shared: each device has all of it, and uses it for its own part of the layer alone, such as its heads: the
        gradient is a sum over the devices.
      dtype: in which the layer reads the param, if in one only; it may then be gathered in it.
      splits_rows: with sequence parallelism, the layer returns each device's part of the rows from those of all.
      by_rule: other dims that may be split instead, where a user's rule says so.
      columns_of: the kernel that this is the bias of: it is split where the columns of the kernel are.
      logical_name: of the dim, for params that carry the names of their dims (nn/names.py).
    """

    dim: int | None = None
    pieces: int | None = None
    named: str = "features"
    or_whole: bool = False
    dtype: Any = None
    splits_rows: bool = False
    by_rule: tuple[int, ...] = ()
    columns_of: LayerPath | None = None
    is_shared: bool = False
    logical_name: str = "mlp"


@dataclass(frozen=True)
class Shards:
    """One device's view.

    Args:
      batch_axes: the mesh axes that split the batch.
      tensor: how layers are split, or None.
      dims: for every param by its path, the dim that `tensor` splits, counted from the end, or None.
      batch_parts: how many parts the batch has.
    """

    batch_axes: tuple[str, ...]
    tensor: TensorParallel | None
    dims: Mapping[LayerPath, int | None]
    batch_parts: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Those over which tensors are in parts, and their amaxes maxima."""
        return self.batch_axes if self.tensor is None else (*self.batch_axes, self.tensor.axis)

    def tensor_dim(self, path: LayerPath) -> int | None:
        """The dim of this param that is split over `tensor`, or None."""
        if self.tensor is None:
            return None
        if path not in self.dims:
            raise ValueError(
                f"tensor parallelism finds how {'/'.join(path)} is split by its path in the params, which is not there;"
                " apply the model to all variables of the state"
            )
        return self.dims[path]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Layers that are traced in this context run on shards."""
        token = _CURRENT.set(self)
        try:
            with _TRACED(next(_NUMBERS)):
                yield
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[Shards | None] = ContextVar("shards", default=None)
_DECLARED: ContextVar[dict[LayerPath, ParamSharding] | None] = ContextVar("declared_shardings", default=None)


def current_tensor() -> TensorParallel | None:
    """How layers are split here, or None."""
    shards = _CURRENT.get()
    return None if shards is None else shards.tensor


def current_amax_axes() -> tuple[str, ...]:
    """The mesh axes over which the amax of a tensor is a maximum here."""
    shards = _CURRENT.get()
    return () if shards is None else shards.axes


def parts_of(path: LayerPath, dim: int) -> int:
    """How many devices share this dim, counted from the end, of a param."""
    shards = _CURRENT.get()
    if shards is None or shards.tensor is None or shards.tensor_dim(path) != dim:
        return 1
    return shards.tensor.size


def split_dim_of(kernel: LayerPath) -> SplitDim | None:
    """Which dim of a kernel is split here: its columns, its rows, or none."""
    return next((name for name, dim in DIM_OF.items() if parts_of(kernel, dim) > 1), None)


@contextmanager
def declared_shardings() -> Iterator[dict[LayerPath, ParamSharding]]:
    """Collect how the layers that are traced in this context let their params be split, by path."""
    found: dict[LayerPath, ParamSharding] = {}
    token = _DECLARED.set(found)
    try:
        with _TRACED(next(_NUMBERS)):
            yield found
    finally:
        _DECLARED.reset(token)


def declare_sharding(path: LayerPath, sharding: ParamSharding) -> None:
    """A layer declares how a param of its may be split, to whoever collects it."""
    found = _DECLARED.get()
    if found is not None:
        found[path] = sharding


def parts_of_batch() -> int:
    """How many parts the batch has here."""
    shards = _CURRENT.get()
    return 1 if shards is None else shards.batch_parts


def sum_over_batch(x: jax.Array) -> jax.Array:
    """The sum of a number of this device's part of the batch over all parts."""
    shards = _CURRENT.get()
    return x if shards is None or not shards.batch_axes else lax.psum(x, shards.batch_axes)


def largest_amax(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The maximum of amaxes over mesh axes, as integers: what is not negative orders as its bits, and a maximum of
    floats may lose a NaN on its way.
    """
    if not axes:
        return x
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(x, jnp.uint32), axes), jnp.float32)


def scattered_sum(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """The sum over the devices of these axes, of which each keeps its own part along `dim`.

    Processes that `jax.distributed` has joined, of CPUs, add up everything, and each device takes its part: jax's
    reduce-scatter gives the first of them wrong values there now and then, from 64 KiB on
    (https://github.com/jax-ml/jax/issues/40830).
    """
    if not jax.distributed.is_initialized() or jax.default_backend() != "cpu":
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    total, size = lax.psum(x, axes), x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(total, lax.axis_index(axes) * size, size, dim)
