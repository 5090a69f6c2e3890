"""The parameters of a GEMM: one kernel and bias, or several side by side; and the form of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.frozen import FrozenKernel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.explicit import explicit_mesh, explicit_spec, whole_along, whole_rows
from jax_fp8.kernels.quantize import Matrices, as_tuple


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearParameters:
    """`kernel` (k, n) and `bias` (n,) or None; or tuples of them, for kernels (k, n_i) side by side. `weight` is the
    frozen weight of a layer without a recipe; with a recipe it is in the layer's `Fp8Gemm`.
    """

    kernel: Matrices
    bias: Matrices | None
    weight: Fp8Pair | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each kernel."""
        return tuple(kernel.shape[1] for kernel in as_tuple(self.kernel))

    @property
    def in_parts(self) -> bool:
        return isinstance(self.kernel, tuple)

    @property
    def is_frozen(self) -> bool:
        """Whether the weight is in FP8 beside the params, and has no gradient (core/frozen.py)."""
        return any(isinstance(kernel, FrozenKernel) for kernel in as_tuple(self.kernel))

    @classmethod
    def beside(cls, *parameters: "LinearParameters") -> "LinearParameters":
        """The parameters of several layers, side by side."""
        kernels, biases = tuple(each.kernel for each in parameters), tuple(each.bias for each in parameters)
        return cls(kernels, None if biases[0] is None else biases)  # type: ignore[arg-type]


@jax.tree_util.register_static
@dataclass(frozen=True)
class ParamInfo:
    """The dtype and the sharding of a parameter, hence of its gradient; a backward keeps this in place of the value."""

    dtype: jax.typing.DTypeLike
    sharding: jax.sharding.NamedSharding

    @classmethod
    def from_arrays(cls, tree: PyTree) -> PyTree:
        """The same tree, with a `ParamInfo` in place of every array."""
        return jax.tree.map(lambda leaf: cls(leaf.dtype, jax.typeof(leaf).sharding), tree)

    def place(self, gradient: jax.Array) -> jax.Array:
        """The gradient with the sharding of its param: on an Explicit mesh it is part of a cotangent's type."""
        return gradient if self.sharding.mesh.empty else jax.reshard(gradient, self.sharding)

    @property
    def columns_over(self) -> tuple[str, ...]:
        """The Explicit mesh axes that split the last dim."""
        axes = tuple(self.sharding.spec)[-1:]
        return axes[0] if axes and isinstance(axes[0], tuple) else tuple(axis for axis in axes if axis)

    @staticmethod
    def place_all(likes: PyTree, gradients: PyTree) -> PyTree:
        """`place` for every gradient of a tree; None stays None."""
        return jax.tree.map(lambda gradient, like: like.place(gradient), gradients, likes)


def as_one_matrix(kernel: jax.Array) -> jax.Array:
    """Kernels of experts (..., experts, k, n) as (..., experts * k, n).

    On an Explicit mesh that splits their rows these are gathered: of several experts they are not beside each other.
    """
    shape, mesh = (*kernel.shape[:-3], -1, kernel.shape[-1]), explicit_mesh(kernel)
    if mesh is None:
        return kernel.reshape(shape)
    kernel = whole_along(kernel, -2)
    *stacked, experts, _, columns = explicit_spec(kernel)
    return jnp.reshape(kernel, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*stacked, experts, columns)))


def split_columns(x: jax.Array, widths: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The columns of (..., n) by the widths n_i of kernels side by side."""
    return (x,) if len(widths) == 1 else tuple(jnp.split(x, list(accumulate(widths))[:-1], axis=-1))


def infos_of(like: PyTree) -> "tuple[ParamInfo, ...]":
    """The infos that stand in place of kernels side by side, or of one kernel."""
    return like if isinstance(like, tuple) else (like,)


def joined(arrays: Matrices | None, dtype: jax.typing.DTypeLike) -> PyTree:
    """Kernels or biases side by side as one array in `dtype`, or None; the cast also concatenates them."""
    if arrays is None:
        return None
    cast = [array.astype(dtype) for array in as_tuple(arrays)]
    return cast[0] if len(cast) == 1 else jnp.concatenate([whole_rows(array) for array in cast], axis=-1)


def gradients_like(parts: Sequence[jax.Array], like: PyTree) -> PyTree:
    """Parts of a gradient with the dtypes, shardings and structure of `like`, the infos of the params."""
    cast = tuple(info.place(part.astype(info.dtype)) for part, info in zip(parts, infos_of(like), strict=True))
    return cast if isinstance(like, tuple) else cast[0]
