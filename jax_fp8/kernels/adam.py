"""Adam over a whole tree of parameters, each array read and written once, with the weights cast to FP8 on the way.

    g = grad_scale g            (L2 mode: g = g + weight_decay p)
    m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) g²
    u = (m correction1) / (sqrt(v correction2) + eps)      (AdamW mode: u = u + weight_decay p)
    p = p - rate u

All in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101), `p` being the master, and every operation rounded by
itself: kernel and reference agree bit for bit. Subnormal numbers count on the GPU; XLA's CPU compiler flushes them to zero.

One launch serves all leaves, in place: XLA copies an array first only where it is still needed. A leaf with a `cast` is written in FP8 as
well, with its transpose, its scale, and the maximum of its magnitudes, from which the next scale can be made. Every scalar of a leaf has its
own buffer, as a state wants it: cutting them out of one vector would take a small kernel each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.dispatch import Split, dispatch, pmax
from jax_fp8.kernels.storage import (
    REMAINDER,
    master_of,
    off_the_tie,
    quantize_root,
    remainder_of,
    round_second_moment,
)

TARGET = "jax_fp8_adam"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coefficients:
    """The numbers of one step, float32 scalars in the kernel's order; `apply` is 1, or 0 for a step that changes nothing."""

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
    """One array of the tree and everything that belongs to it; all of one shape, save the columnwise cast, which is a transposed matrix.

    Args:
      gradient: float32, bfloat16 or float16.
      mu, nu: the moments: float32, bfloat16, float16 or `Fp8Array`; in FP8, `nu` holds the square root.
      param: float32, bfloat16 or float16; None for a param in FP8, which is `values`.
      master: None for a float32 param, else float32 or float16, or uint16: the remainder of a bfloat16 param.
      cast: the weight in FP8 with one scale, to be written anew, or None; without `columnwise` in one orientation.
      scale, mu_scale, nu_scale: float32 scalars to write the cast and FP8 moments with, which become the scales of these.
      decays: whether weight decay applies; static.
    """

    gradient: jax.Array
    mu: jax.Array | Fp8Array
    nu: jax.Array | Fp8Array
    param: Any
    master: Any
    cast: Fp8Pair | None = None
    scale: Any = None
    mu_scale: Any = None
    nu_scale: Any = None
    decays: bool = field(default=True, metadata={"static": True})


def adam(leaves: Sequence[Leaf], coefficients: Coefficients, seed: jax.Array, adam_w_mode: bool) -> list[Leaf]:
    """Update all leaves.

    Args:
      leaves: what to update.
      coefficients: the numbers of this step.
      seed: uint32 scalar, different at every step: for the rounding of second moments in FP8.
      adam_w_mode: decoupled weight decay, else an L2 term.

    Returns:
      The leaves with new moments, params, masters and casts; as they were where `apply` is 0.
    """
    if not leaves:
        return []
    settings = {"layouts": tuple(map(_layout, leaves)), "adam_w_mode": adam_w_mode}
    vector = jnp.stack([getattr(coefficients, number.name) for number in fields(Coefficients)])
    operands = [vector, _scales(leaves), seed, *(array for leaf in leaves for array in _arrays(leaf).values())]
    results = iter(dispatch(_rule(leaves), partial(_kernel, **settings), partial(_reference, **settings), *operands))
    updated = ({name: next(results) for name in _arrays(leaf) if name != "g"} for leaf in leaves)
    return [replace(leaf, **_fields(arrays)) for leaf, arrays in zip(leaves, updated, strict=True)]


def adam_leaf(
    leaf: Leaf, coefficients: Coefficients, seed: jax.Array, number: int, adam_w_mode: bool
) -> tuple[Leaf, jax.Array]:
    """The reference: the updated leaf (`number` in the tree), and the update of a float32 param, `-rate u`."""
    c = coefficients
    g = _rounded(leaf.gradient.astype(jnp.float32) * c.grad_scale)
    p = _master(leaf)
    if leaf.decays and not adam_w_mode:
        g = g + _rounded(p * c.weight_decay)
    m = _rounded(c.b1 * _first_moment(leaf.mu)) + _rounded(c.one_minus_b1 * g)
    v = _rounded(c.b2 * _second_moment(leaf.nu)) + _rounded(c.one_minus_b2 * (g * g))
    u = (m * c.correction1) / (jnp.sqrt(v * c.correction2) + c.eps)
    if leaf.decays and adam_w_mode:
        u = u + _rounded(p * c.weight_decay)
    update = -_rounded(c.rate * u)
    p = p + update
    updated = _store(leaf, m, v, p, seed, number)
    if leaf.cast is not None:
        weight = updated.master if updated.param is None else updated.param
        old, old_t, _, _ = leaf.cast.arrays
        values = quantize_reference(weight, old.dtype, leaf.scale)
        values_t = None if old_t is None else values.T
        updated = replace(updated, cast=Fp8Pair.of(values, values_t, leaf.scale, amax_reference(weight)))
    unchanged = c.apply == 0
    updated = jax.tree.map(lambda old, new: jnp.where(unchanged, old, new), leaf, updated)
    return updated, jnp.where(unchanged, -jnp.float32(0), update)


def _store(leaf: Leaf, m, v, p, seed, number) -> Leaf:
    """Everything but the cast, rounded to what it is kept in."""
    kept = None if leaf.master is None else leaf.master.dtype
    if leaf.param is not None and leaf.param.dtype == jnp.bfloat16 and kept != jnp.float16:
        p = off_the_tie(p)
    if kept is None:
        param, master = p, None
    elif kept == REMAINDER:
        param, master = p.astype(jnp.bfloat16), remainder_of(p)
    else:
        master = p.astype(kept)
        param = None if leaf.param is None else master.astype(leaf.param.dtype)
    if isinstance(leaf.mu, Fp8Array):
        mu = Fp8Array(quantize_reference(m, leaf.mu.dtype, leaf.mu_scale), leaf.mu_scale)
    else:
        mu = m.astype(leaf.mu.dtype)
    if isinstance(leaf.nu, Fp8Array):
        nu = Fp8Array(quantize_root(v, leaf.nu.dtype, leaf.nu_scale, seed, number), leaf.nu_scale)
    else:
        nu = round_second_moment(v, leaf.nu.dtype)
    return replace(leaf, mu=mu, nu=nu, param=param, master=master)


def _master(leaf):
    if leaf.master is None:
        return leaf.param
    return master_of(leaf.param, leaf.master) if leaf.master.dtype == REMAINDER else leaf.master.astype(jnp.float32)


def _first_moment(mu):
    return mu.dequantize() if isinstance(mu, Fp8Array) else mu.astype(jnp.float32)


def _second_moment(nu):
    return jnp.square(nu.dequantize()) if isinstance(nu, Fp8Array) else nu.astype(jnp.float32)


def _rounded(product):
    """A product as float32 has it. Compilers fuse a product into the sum it enters and round once; a selection keeps them apart."""
    return jnp.where(product == product, product, np.float32(np.nan))


# ---- the custom call: leaves as a flat list of arrays ----------------------------------------------------------------
#
# A leaf gives the kernel up to eleven arrays, always in the order of ARRAYS, and leaves out those that it does not
# have. Its Layout says which are there, so that the list can be read again. In this file they are a dict by name.


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

    cast_scale: Any
    mu_scale_before: Any
    mu_scale_after: Any
    nu_scale_before: Any
    nu_scale_after: Any


def _names(layout: Layout) -> list[str]:
    """The arrays of a leaf with this layout, in the kernel's order."""
    return [name for name, needed in ARRAYS.items() if needed in layout]


def _layout(leaf: Leaf) -> Layout:
    present = [ARRAYS[name] for name in _arrays(leaf)]
    return reduce(or_, present, Layout.DECAYS if leaf.decays else Layout(0))


def _arrays(leaf: Leaf) -> dict[str, jax.Array]:
    """The arrays of a leaf by name, in the kernel's order."""
    (mu, mu_scale), (nu, nu_scale) = _values_and_scale(leaf.mu), _values_and_scale(leaf.nu)
    cast = [None] * 4 if leaf.cast is None else leaf.cast.arrays
    row = (leaf.gradient, mu, nu, leaf.param, leaf.master, *cast, mu_scale, nu_scale)
    return {name: array for name, array in zip(ARRAYS, row, strict=True) if array is not None}


def _fields(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The fields of a leaf that the kernel updates, from its arrays."""

    def moment(name):
        scale = arrays.get(f"{name}_scale")
        return arrays[name] if scale is None else Fp8Array(arrays[name], scale)

    cast = None
    if "values" in arrays:
        cast = Fp8Pair.of(arrays["values"], arrays.get("values_t"), arrays["scale"], arrays["amax"])
    weight = {name: arrays.get(name) for name in ("param", "master")}
    return {"mu": moment("mu"), "nu": moment("nu"), **weight, "cast": cast}


def _values_and_scale(moment: jax.Array | Fp8Array) -> tuple[jax.Array, jax.Array | None]:
    return (moment.values, moment.scale) if isinstance(moment, Fp8Array) else (moment, None)


def _scales(leaves: Sequence[Leaf]) -> jax.Array:
    """f32[leaves, 5]: `Scales` of each; 1 where there is none."""

    def row(leaf):
        (_, mu), (_, nu) = _values_and_scale(leaf.mu), _values_and_scale(leaf.nu)
        return Scales(leaf.scale, mu, leaf.mu_scale, nu, leaf.nu_scale)

    one = np.float32(1)
    scales = [one if scale is None else scale for leaf in leaves for scale in row(leaf)]
    return jnp.stack(scales).reshape(-1, len(Scales._fields))


def _rule(leaves: Sequence[Leaf]) -> str:
    operands, results = ["coefficients", "leaves scales", ""], []
    for number, leaf in enumerate(leaves):
        dims = [f"x{number}d{dim}" for dim in range(leaf.gradient.ndim)]
        special = {"values_t": " ".join(reversed(dims)), **dict.fromkeys(SCALARS, "")}
        per_array = [special.get(name, " ".join(dims)) for name in _arrays(leaf)]
        operands += per_array
        results += per_array[1:]
    return f"{','.join(operands)}->{','.join(results)}"


def _kernel(vector, scales, seed, *arrays, split: Split, layouts, adam_w_mode):
    results, aliases, position = [], {}, 0
    for layout in layouts:
        updated = range(position + 1, position + len(_names(layout)))
        aliases |= {3 + i: len(results) + j for j, i in enumerate(updated)}  # three operands stand before the leaves
        results += [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in updated]
        position = updated.stop
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    attributes = {"layout": np.array(layouts, np.int32), "adam_w_mode": adam_w_mode}
    return _whole_amaxes(call(vector, scales, seed, *arrays, **attributes), layouts, split)


def _reference(vector, scales, seed, *arrays, split: Split, layouts, adam_w_mode):
    coefficients = Coefficients(*vector)
    remaining, results = iter(arrays), []
    for number, (layout, row) in enumerate(zip(layouts, scales, strict=True)):
        leaf = _unpack(layout, Scales(*row), {name: next(remaining) for name in _names(layout)})
        updated, _ = adam_leaf(leaf, coefficients, seed, number, adam_w_mode)
        results += list(_arrays(updated).values())[1:]
    return _whole_amaxes(results, layouts, split)


def _unpack(layout: Layout, scales: Scales, arrays: dict[str, jax.Array]) -> Leaf:
    return Leaf(
        gradient=arrays["g"],
        **_fields(arrays),
        scale=scales.cast_scale,
        mu_scale=scales.mu_scale_after,
        nu_scale=scales.nu_scale_after,
        decays=Layout.DECAYS in layout,
    )


def _whole_amaxes(results, layouts, split) -> tuple[jax.Array, ...]:
    """Results with each amax that of the whole weight, not of this shard."""
    results = list(results)
    names = [name for layout in layouts for name in _names(layout)[1:]]
    positions = [i for i, name in enumerate(names) if name == "amax"]
    if split and positions:
        # pmax over every axis that splits any leaf: harmless to a leaf that is the same on all shards.
        amaxes = pmax(jnp.stack([results[i] for i in positions]), split, *split)
        for i, amax in zip(positions, amaxes, strict=True):
            results[i] = amax
    return tuple(results)
