"""The parameters of a GEMM: one kernel and bias, or several side by side; and how their gradients are to look."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.kernels.explicit import whole_rows
from jax_fp8.kernels.quantize import Matrices, as_tuple


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinearParameters:
    """`kernel` (k, n), and `bias` (n,) or None; or both as tuples, of kernels (k, n_i) side by side."""

    kernel: Matrices
    bias: Matrices | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each kernel."""
        return tuple(kernel.shape[1] for kernel in as_tuple(self.kernel))

    @property
    def in_parts(self) -> bool:
        return isinstance(self.kernel, tuple)

    @classmethod
    def beside(cls, *parameters: "LinearParameters") -> "LinearParameters":
        """Those of several layers, side by side."""
        kernels, biases = tuple(each.kernel for each in parameters), tuple(each.bias for each in parameters)
        return cls(kernels, None if biases[0] is None else biases)  # type: ignore[arg-type]


@jax.tree_util.register_static
@dataclass(frozen=True)
class ParamInfo:
    """What a backward must know of a parameter whose value it does not keep: how its gradient is to look."""

    dtype: Any
    sharding: Any

    @classmethod
    def of(cls, tree: Any) -> Any:
        """For every array of a tree."""
        return jax.tree.map(lambda leaf: cls(leaf.dtype, jax.typeof(leaf).sharding), tree)

    def place(self, gradient: jax.Array) -> jax.Array:
        """On an Explicit mesh, a cotangent has the sharding of its primal in its type;
        elsewhere there is nothing to do."""
        return gradient if self.sharding.mesh.empty else jax.reshard(gradient, self.sharding)

    @property
    def columns_over(self) -> tuple[str, ...]:
        """The Explicit axes that split its last dim."""
        axes = tuple(self.sharding.spec)[-1:]
        return axes[0] if axes and isinstance(axes[0], tuple) else tuple(axis for axis in axes if axis)

    @staticmethod
    def place_all(likes: Any, gradients: Any) -> Any:
        """`place` for every array of a tree; where there is no gradient, there is nothing to place."""
        return jax.tree.map(lambda gradient, like: like.place(gradient), gradients, likes)


def as_one_matrix(kernel: jax.Array) -> jax.Array:
    """Kernels of experts (..., experts, k, n) as (..., experts * k, n)."""
    return kernel.reshape(*kernel.shape[:-3], -1, kernel.shape[-1])


def split_columns(x: jax.Array, widths: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """The columns of (..., n) by the widths n_i of kernels side by side."""
    return (x,) if len(widths) == 1 else tuple(jnp.split(x, list(accumulate(widths))[:-1], axis=-1))


def joined(arrays, dtype) -> Any:
    """Kernels or biases side by side as one, in `dtype`: the cast, which is needed anyway, puts them together."""
    if arrays is None:
        return None
    cast = [array.astype(dtype) for array in as_tuple(arrays)]
    return cast[0] if len(cast) == 1 else jnp.concatenate([whole_rows(array) for array in cast], axis=-1)


def gradients_like(parts, like: Any) -> Any:
    """Parts of a gradient, in the dtypes, the places and the structure of what they are gradients of."""
    likes: Any = as_tuple(like)
    cast = tuple(one.place(part.astype(one.dtype)) for part, one in zip(parts, likes, strict=True))
    return cast if isinstance(like, tuple) else cast[0]
