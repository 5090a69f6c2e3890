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
from functools import partial
from typing import Any

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
    settings = {"layout": tuple(map(_layout, leaves)), "adam_w_mode": adam_w_mode}
    vector = jnp.stack([getattr(coefficients, number.name) for number in fields(Coefficients)])
    operands = [vector, _scales(leaves), seed, *(array for leaf in leaves for array in _arrays(leaf))]
    remaining = iter(dispatch(_rule(leaves), partial(_kernel, **settings), partial(_reference, **settings), *operands))
    return [_replace_arrays(leaf, remaining) for leaf in leaves]


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
        values = quantize_reference(weight, leaf.cast.rowwise.dtype, leaf.scale)
        values_t = None if leaf.cast.columnwise is None else values.T
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


# ---- the custom call: leaves as a flat list of arrays ----------------------------------------------------------------------


def _arrays(leaf) -> list[jax.Array]:
    """A leaf's arrays as the kernel takes them: the gradient first, then those that it updates, and those that are there."""
    moments = [moment.values if isinstance(moment, Fp8Array) else moment for moment in (leaf.mu, leaf.nu)]
    return [leaf.gradient, *moments, *(array for array in _optional(leaf) if array is not None)]


def _optional(leaf) -> list:
    """What follows the moments: arrays of the leaf's shape or its transpose, then scalars."""
    copies = [None] * 4 if leaf.cast is None else leaf.cast.arrays
    scales = [moment.scale if isinstance(moment, Fp8Array) else None for moment in (leaf.mu, leaf.nu)]
    return [leaf.param, leaf.master, *copies, *scales]


def _replace_arrays(leaf, arrays) -> Leaf:
    """The leaf with its arrays, save the gradient, taken from an iterator."""
    mu, nu = next(arrays), next(arrays)
    optional: list[Any] = [None if old is None else next(arrays) for old in _optional(leaf)]
    param, master, *cast, mu_scale, nu_scale = optional
    return replace(
        leaf,
        mu=mu if mu_scale is None else Fp8Array(mu, mu_scale),
        nu=nu if nu_scale is None else Fp8Array(nu, nu_scale),
        param=param,
        master=master,
        cast=None if leaf.cast is None else Fp8Pair.of(*cast),
    )


def _layout(leaf) -> int:
    """Which arrays there are and whether the leaf decays, as bits."""
    param, master, values, values_t, _, _, mu_scale, nu_scale = _optional(leaf)
    present = (param, master, values, values_t, mu_scale, nu_scale)
    return sum((array is not None) << bit for bit, array in enumerate(present)) | leaf.decays << len(present)


def _scales(leaves) -> jax.Array:
    """f32[leaves, 5]: of the values; of mu before and after; of nu before and after; 1 where there is none."""

    def row(leaf):
        before = [moment.scale if isinstance(moment, Fp8Array) else None for moment in (leaf.mu, leaf.nu)]
        return leaf.scale, before[0], leaf.mu_scale, before[1], leaf.nu_scale

    one = np.float32(1)
    return jnp.stack([one if scale is None else scale for leaf in leaves for scale in row(leaf)]).reshape(-1, 5)


def _rule(leaves) -> str:
    def dims(number, leaf):
        names = [f"x{number}d{dim}" for dim in range(leaf.gradient.ndim)]
        straight, transposed = " ".join(names), " ".join(reversed(names))
        optional = [straight, straight, straight, transposed, "", "", "", ""]
        present = [dims for dims, array in zip(optional, _optional(leaf), strict=True) if array is not None]
        return [straight, straight, straight, *present]

    per_leaf = [dims(number, leaf) for number, leaf in enumerate(leaves)]
    operands = ["coefficients", "leaves scales", "", *(dim for leaf in per_leaf for dim in leaf)]
    results = [dim for leaf in per_leaf for dim in leaf[1:]]
    return f"{','.join(operands)}->{','.join(results)}"


def _kernel(vector, scales, seed, *arrays, split: Split, layout, adam_w_mode):
    results, aliases, position = [], {}, 3  # three operands stand before the leaves
    for bits in layout:
        updated = range(position + 1, position + _count(bits))  # the gradient is only read
        aliases |= {operand: len(results) + i for i, operand in enumerate(updated)}
        results += [jax.ShapeDtypeStruct(arrays[i - 3].shape, arrays[i - 3].dtype) for i in updated]
        position = updated.stop
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    attributes = {"layout": np.array(layout, np.int32), "adam_w_mode": adam_w_mode}
    return _whole_amaxes(call(vector, scales, seed, *arrays, **attributes), layout, split)


def _reference(vector, scales, seed, *arrays, split: Split, layout, adam_w_mode):
    coefficients = Coefficients(*vector)
    remaining, results = iter(arrays), []
    for number, (bits, scale) in enumerate(zip(layout, scales, strict=True)):
        leaf = _unpack(bits, scale, [next(remaining) for _ in range(_count(bits))])
        updated, _ = adam_leaf(leaf, coefficients, seed, number, adam_w_mode)
        results += _arrays(updated)[1:]
    return _whole_amaxes(results, layout, split)


def _count(bits) -> int:
    """Arrays of a leaf with this layout: gradient and moments, what the bits say, and with values their scale and amax."""
    return 3 + (bits & 63).bit_count() + 2 * bool(bits & 4)


def _whole_amaxes(results, layout, split) -> tuple[jax.Array, ...]:
    """Results with each amax that of the whole weight, not of this shard."""
    results, positions, end = list(results), [], 0
    for bits in layout:
        end += _count(bits) - 1
        if bits & 4:
            positions.append(end - 1 - (bits >> 4 & 3).bit_count())
    if split and positions:
        amaxes = pmax(
            jnp.stack([results[i] for i in positions]), split, *split
        )  # the same on all shards of a leaf not split
        for i, amax in zip(positions, amaxes, strict=True):
            results[i] = amax
    return tuple(results)


def _unpack(bits, scale, arrays) -> Leaf:
    gradient, mu, nu, *others = arrays
    remaining = iter(others)
    param, master, values, values_t = (next(remaining) if bits >> bit & 1 else None for bit in range(4))
    cast = None if values is None else Fp8Pair.of(values, values_t, next(remaining), next(remaining))
    mu = Fp8Array(mu, next(remaining)) if bits & 16 else mu
    nu = Fp8Array(nu, next(remaining)) if bits & 32 else nu
    return Leaf(gradient, mu, nu, param, master, cast, scale[0], scale[2], scale[4], decays=bool(bits >> 6))
