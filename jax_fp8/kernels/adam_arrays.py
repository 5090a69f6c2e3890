"""Leaves, as the optimizer's kernel updates them: everything that belongs to one array of the tree, and as a flat list.

A leaf has up to eleven arrays for the kernel, in the order of ARRAYS. It leaves out those that it does not have, and
its Layout says which are there, so that the list can be read back. In Python they are a dict by name.
"""

from dataclasses import dataclass, field, replace
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import NamedTuple

import jax

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """The float32 scalars of one step, in the kernel's order; `apply` is 1, or 0 for a step that changes nothing."""

    rate: jax.Array
    b1: jax.Array
    one_minus_b1: jax.Array
    b2: jax.Array
    one_minus_b2: jax.Array
    eps: jax.Array
    weight_decay: jax.Array
    correction1: jax.Array
    correction2: jax.Array
    grad_scale: jax.Array
    apply: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaf:
    """One array of the tree and everything that belongs to it, all of one shape; the columnwise cast is transposed.

    Args:
      gradient: float32, bfloat16 or float16.
      mu, nu: the moments: float32, bfloat16, float16 or `Fp8Array`; in FP8, `nu` holds the square root.
      param: float32, bfloat16 or float16; None for a param in FP8, which is `values`.
      master: None for a float32 param, else float32 or float16, or uint16: the remainder of a bfloat16 param.
      cast: the weight in FP8 with one scale, which the kernel overwrites, or None; without `columnwise` only rowwise.
      scale, mu_scale, nu_scale: float32 scalars, the new scales of the cast and of FP8 moments.
      decays: whether weight decay applies; static.
    """

    gradient: jax.Array
    mu: jax.Array | Fp8Array
    nu: jax.Array | Fp8Array
    param: PyTree
    master: PyTree
    cast: Fp8Pair | None = None
    scale: PyTree = None
    mu_scale: PyTree = None
    nu_scale: PyTree = None
    decays: bool = field(default=True, metadata={"static": True})

    def as_matrix(self) -> "Leaf":
        """The leaf as its FP8 copy has it: kernels of experts (experts, k, n) are one matrix (experts * k, n)."""
        return self.in_shape((-1, self.gradient.shape[-1])) if self.gradient.ndim > 2 else self

    def in_shape(self, shape: tuple[int, ...]) -> "Leaf":
        """All arrays in this shape, except the FP8 copy."""

        def reshaped(array: jax.Array | Fp8Array | None):
            if isinstance(array, Fp8Array):
                return replace(array, values=array.values.reshape(shape))
            return None if array is None else array.reshape(shape)

        names = ("gradient", "mu", "nu", "param", "master")
        return replace(self, **{name: reshaped(getattr(self, name)) for name in names})


class Layout(IntFlag):
    """Which arrays a leaf has beside g, mu and nu, and whether it decays; names and values as in csrc/adam.cc."""

    HAS_PARAM = 1
    HAS_MASTER = 2
    HAS_VALUES = 4  # and their scale and amax
    HAS_VALUES_T = 8
    HAS_MU_SCALE = 16  # where mu is FP8
    HAS_NU_SCALE = 32
    DECAYS = 64


# The kernel's order; each array with the bit that says it is there, 0 where it always is.
ARRAYS = {
    "g": Layout(0),  # only read; all others are updated in place
    "mu": Layout(0),
    "nu": Layout(0),
    "param": Layout.HAS_PARAM,
    "master": Layout.HAS_MASTER,
    "values": Layout.HAS_VALUES,
    "values_t": Layout.HAS_VALUES_T,
    "scale": Layout.HAS_VALUES,
    "amax": Layout.HAS_VALUES,
    "mu_scale": Layout.HAS_MU_SCALE,
    "nu_scale": Layout.HAS_NU_SCALE,
}
SCALARS = ("scale", "amax", "mu_scale", "nu_scale")


class Scales(NamedTuple):
    """The scales of a leaf's FP8 numbers in the kernel's order: of the cast, of moments as they were and will be."""

    cast_scale: PyTree
    mu_scale_before: PyTree
    mu_scale_after: PyTree
    nu_scale_before: PyTree
    nu_scale_after: PyTree


def names_in(layout: Layout) -> list[str]:
    """The arrays of a leaf with this layout, in the kernel's order."""
    return [name for name, needed in ARRAYS.items() if needed in layout]


def layout_of(leaf: Leaf) -> Layout:
    present = [ARRAYS[name] for name in arrays_of(leaf)]
    return reduce(or_, present, Layout.DECAYS if leaf.decays else Layout(0))


def arrays_of(leaf: Leaf) -> dict[str, jax.Array]:
    """The arrays of a leaf by name, in the kernel's order."""
    (mu, mu_scale), (nu, nu_scale) = values_and_scale(leaf.mu), values_and_scale(leaf.nu)
    cast = [None] * 4 if leaf.cast is None else leaf.cast.arrays
    row = (leaf.gradient, mu, nu, leaf.param, leaf.master, *cast, mu_scale, nu_scale)
    return {name: array for name, array in zip(ARRAYS, row, strict=True) if array is not None}


def fields_of(arrays: dict[str, jax.Array]) -> dict[str, PyTree]:
    """The fields of a leaf that the kernel updates, from its arrays."""

    def moment(name: str):
        scale = arrays.get(f"{name}_scale")
        return arrays[name] if scale is None else Fp8Array(arrays[name], scale)

    cast = None
    if "values" in arrays:
        cast = Fp8Pair.with_shared_scale(arrays["values"], arrays.get("values_t"), arrays["scale"], arrays["amax"])
    weight = {name: arrays.get(name) for name in ("param", "master")}
    return {"mu": moment("mu"), "nu": moment("nu"), **weight, "cast": cast}


def values_and_scale(moment: jax.Array | Fp8Array) -> tuple[jax.Array, jax.Array | None]:
    return (moment.values, moment.scale) if isinstance(moment, Fp8Array) else (moment, None)


def leaf_of(layout: Layout, scales: Scales, arrays: dict[str, jax.Array]) -> Leaf:
    return Leaf(
        gradient=arrays["g"],
        **fields_of(arrays),
        scale=scales.cast_scale,
        mu_scale=scales.mu_scale_after,
        nu_scale=scales.nu_scale_after,
        decays=Layout.DECAYS in layout,
    )
