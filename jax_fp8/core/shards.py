"""How arrays are split while a step runs on several devices, and how layers allow their params to be split.

A step over several devices is one program that each of them runs on its part of the batch and of the params (see
jax_fp8/parallel/). Layers are written once: a layer asks here how its params are split, and passes that to its op,
which does the collectives. Outside of such a step every answer is: not split.

Before the step, layers are traced once as on one device. In that trace each layer declares by a `ParamSharding` which
dim of a param a `tensor` axis may split.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.paths import LayerPath

SplitDim = Literal["columns", "rows"]
COLUMNS, ROWS, EXPERTS = -1, -2, -3  # dims of a kernel (..., in, features); of experts (..., experts, in, features)
DIM_OF: dict[SplitDim, int] = {"columns": COLUMNS, "rows": ROWS}
# jax traces a jitted function once for all calls with the same types of arguments. The context variables below are no
# arguments, so each context has a number of its own, under which jax traces again.
_TRACED = jax.make_user_context(default_value=0)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class TensorParallel:
    """The mesh axis over which layers are split, as an op takes it: static.

    Args:
      axis: its name.
      size: the number of devices along it.
      sequence: whether between layers each device keeps only its part of the rows (sequence parallelism): a block of
        the flattened tokens, in an array of shape (batch, seq / size, features).
    """

    axis: str
    size: int
    sequence: bool = False

    def all_rows(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Leading dims of the arrays inside of a layer, from those of its input."""
        return (*leading[:-1], leading[-1] * self.size) if self.sequence else leading

    def own_rows(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        """Leading dims of a layer's result, from those of the arrays inside of it."""
        return (*leading[:-1], leading[-1] // self.size) if self.sequence else leading


@dataclass(frozen=True)
class ExpertParallel:
    """The mesh axis over which the experts of a mixture are split, as an op takes it: static. It splits the batch, too.

    Args:
      axis: its name.
      size: the number of devices along it.
    """

    axis: str
    size: int


@dataclass(frozen=True)
class ParamSharding:
    """How a layer lets a param be split over a `tensor` axis, and the kernels of experts over an `expert` axis.

    Args:
      dim: the dim that is split, counted from the end; None: the layer needs the whole param.
      pieces: how many pieces of that dim must stay whole, such as heads; None: each element is a piece.
      named: the word for such pieces in messages.
      or_whole: with more devices than pieces, each device may keep the whole param.
      is_shared: each device has the whole param, and uses it only for its own part of the layer, such as its heads, so
        that the gradient is a sum over the devices.
      dtype: the dtype in which the layer reads the param, if there is one only; the param may be gathered in it.
      splits_rows: with sequence parallelism, the layer computes all rows and returns each device's part of them.
      by_rule: other dims that may be split instead, where a user's rule says so.
      columns_of: for a bias, its kernel: the bias is split where the columns of the kernel are.
      logical_name: the name of the dim, for params that carry the names of their dims (nn/names.py).
      has_experts: the param is (..., experts, in, features), and an `expert` axis splits the experts.
    """

    dim: int | None = None
    pieces: int | None = None
    named: str = "features"
    or_whole: bool = False
    dtype: jax.typing.DTypeLike | None = None
    splits_rows: bool = False
    by_rule: tuple[int, ...] = ()
    columns_of: LayerPath | None = None
    is_shared: bool = False
    logical_name: str = "mlp"
    has_experts: bool = False


@dataclass(frozen=True)
class Shards:
    """How the arrays of a step are split, as one device sees it.

    Args:
      batch_axes: the mesh axes that split the batch.
      tensor: how layers are split, or None.
      dims: by the path of a param, the dim that `tensor` splits, counted from the end, or None.
      batch_parts: the number of parts of the batch.
      experts: how experts are split, or None.
    """

    batch_axes: tuple[str, ...]
    tensor: TensorParallel | None
    dims: Mapping[LayerPath, int | None]
    batch_parts: int
    experts: ExpertParallel | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split tensors, over which amaxes are maxima."""
        return self.batch_axes if self.tensor is None else (*self.batch_axes, self.tensor.axis)

    def tensor_dim(self, path: LayerPath) -> int | None:
        """The dim of this param that is split over `tensor`, or None."""
        if self.tensor is None:
            return None
        if path not in self.dims:
            raise ValueError(
                f"with tensor parallelism a layer must be at its path in the params, got {'/'.join(path)}, which is not"
                " there; apply the model to all variables of the state"
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


def current_experts() -> ExpertParallel | None:
    """How experts are split here, or None."""
    shards = _CURRENT.get()
    return None if shards is None else shards.experts


def current_amax_axes() -> tuple[str, ...]:
    """The mesh axes over which the amax of a tensor is a maximum here."""
    shards = _CURRENT.get()
    return () if shards is None else shards.axes


def parts_of(path: LayerPath, dim: int) -> int:
    """Over how many devices this dim of a param, counted from the end, is split."""
    shards = _CURRENT.get()
    if shards is None or shards.tensor is None or shards.tensor_dim(path) != dim:
        return 1
    return shards.tensor.size


def split_dim_of(kernel: LayerPath) -> SplitDim | None:
    """Which dim of a kernel is split here: its columns, its rows, or none."""
    return next((name for name, dim in DIM_OF.items() if parts_of(kernel, dim) > 1), None)


@contextmanager
def declared_shardings() -> Iterator[dict[LayerPath, ParamSharding]]:
    """Collect, by path, how the layers that are traced in this context let their params be split."""
    declared: dict[LayerPath, ParamSharding] = {}
    token = _DECLARED.set(declared)
    try:
        with _TRACED(next(_NUMBERS)):
            yield declared
    finally:
        _DECLARED.reset(token)


def declare_sharding(path: LayerPath, sharding: ParamSharding) -> None:
    """Declare how a param of a layer may be split; without `declared_shardings` around it, do nothing."""
    declared = _DECLARED.get()
    if declared is not None:
        declared[path] = sharding


def parts_of_batch() -> int:
    """The number of parts of the batch here."""
    shards = _CURRENT.get()
    return 1 if shards is None else shards.batch_parts


def sum_over_batch(x: jax.Array) -> jax.Array:
    """The sum of `x` over all parts of the batch."""
    shards = _CURRENT.get()
    return x if shards is None or not shards.batch_axes else lax.psum(x, shards.batch_axes)


def largest_amax(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The maximum of amaxes over mesh axes, computed of their bits as integers: floats that are not negative have the
    same order as their bits, and a maximum of floats over devices may lose a NaN.
    """
    if not axes:
        return x
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(x, jnp.uint32), axes), jnp.float32)


def scattered_sum(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """The sum over the devices of these axes; each device keeps its own part of it along `dim`.

    CPU processes under `jax.distributed` compute the whole sum on each device instead, and take their part: there jax's
    reduce-scatter sometimes gives the first process wrong values, from 64 KiB on
    (https://github.com/jax-ml/jax/issues/40830).
    """
    if not jax.distributed.is_initialized() or jax.default_backend() != "cpu":
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    total, size = lax.psum(x, axes), x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(total, lax.axis_index(axes) * size, size, dim)
