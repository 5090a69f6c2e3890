"""Adam over a whole tree of parameters, each array read and written once, with the weights cast to FP8 on the way.

    g = grad_scale g            (L2 mode: g = g + weight_decay p)
    m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) g²
    u = (m correction1) / (sqrt(v correction2) + eps)      (AdamW mode: u = u + weight_decay p)
    p = p - rate u

All in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101), `p` being the master, and every operation rounded by
itself: kernel and reference agree bit for bit. Subnormal numbers count on the GPU; XLA's CPU compiler flushes them to zero.

One launch serves all leaves, in place: XLA copies an array first only where it is still needed. A leaf with `values` is written in FP8 as
well, `values_t` holding the transpose, and the maximum of its magnitudes comes back, from which the next scale can be made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.ops.amax import amax_reference
from jax_fp8.ops.dispatch import Split, dispatch, pmax
from jax_fp8.ops.few_bits import REMAINDER, master_of, off_the_tie, quantize_root, remainder_of, round_second_moment
from jax_fp8.ops.quantize import quantize_reference

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
    """One array of the tree and everything that belongs to it; all of one shape, save `values_t`, which is a transposed matrix.

    Args:
      gradient: float32, bfloat16 or float16.
      mu, nu: the moments: float32, bfloat16, float16 or `Fp8Array`; in FP8, `nu` holds the square root.
      param: float32, bfloat16 or float16; None for a param in FP8, which is `values`.
      master: None for a float32 param, else float32 or float16, or uint16: the remainder of a bfloat16 param.
      values, values_t: FP8 arrays to write the weight into, or None.
      scale: of `values`, float32 scalar.
      mu_scale, nu_scale: of FP8 moments, for the values that are written.
      decays: whether weight decay applies; static.
    """

    gradient: jax.Array
    mu: jax.Array | Fp8Array
    nu: jax.Array | Fp8Array
    param: Any
    master: Any
    values: Any = None
    values_t: Any = None
    scale: Any = None
    mu_scale: Any = None
    nu_scale: Any = None
    decays: bool = field(default=True, metadata={"static": True})


def adam(
    leaves: Sequence[Leaf], coefficients: Coefficients, seed: jax.Array, adam_w_mode: bool
) -> tuple[list[Leaf], jax.Array]:
    """Update all leaves.

    Args:
      leaves: what to update.
      coefficients: the numbers of this step.
      seed: uint32 scalar, different at every step: for the rounding of second moments in FP8.
      adam_w_mode: decoupled weight decay, else an L2 term.

    Returns:
      The leaves with new moments, params, masters and values, and f32[leaves]: the amax of each weight that was cast (0 without `values`, and
      where `apply` is 0).
    """
    if not leaves:
        return [], jnp.zeros((0,), jnp.float32)
    settings = {"layout": tuple(map(_layout, leaves)), "adam_w_mode": adam_w_mode}
    vector = jnp.stack([getattr(coefficients, number.name) for number in fields(Coefficients)])
    operands = [vector, _scales(leaves), seed, *(array for leaf in leaves for array in _arrays(leaf))]
    *results, amaxes = dispatch(_rule(leaves), partial(_kernel, **settings), partial(_reference, **settings), *operands)
    remaining = iter(results)
    updated = [_replace_arrays(leaf, remaining) for leaf in leaves]
    return updated, amaxes


def adam_leaf(
    leaf: Leaf, coefficients: Coefficients, seed: jax.Array, number: int, adam_w_mode: bool
) -> tuple[Leaf, jax.Array, jax.Array]:
    """The reference: the updated leaf (`number` in the tree), the amax of its weight, and the update of a float32 param, `-rate u`."""
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
    weight = next(array for array in (updated.param, updated.master) if array is not None)
    amax = jnp.float32(0)
    if leaf.values is not None:
        values = quantize_reference(weight, leaf.values.dtype, leaf.scale)
        updated = replace(updated, values=values, values_t=None if leaf.values_t is None else values.T)
        amax = amax_reference(weight)
    unchanged = c.apply == 0
    updated = jax.tree.map(lambda old, new: jnp.where(unchanged, old, new), leaf, updated)
    return updated, jnp.where(unchanged, 0, amax), jnp.where(unchanged, -jnp.float32(0), update)


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
    values = [array.values if isinstance(array, Fp8Array) else array for array in (leaf.mu, leaf.nu)]
    optional = [leaf.param, leaf.master, leaf.values, leaf.values_t]
    return [leaf.gradient, *values, *(array for array in optional if array is not None)]


def _replace_arrays(leaf, arrays) -> Leaf:
    """The leaf with its arrays, save the gradient, taken from an iterator."""

    def take(old, scale: Any = None):
        if old is None:
            return None
        return Fp8Array(next(arrays), scale) if isinstance(old, Fp8Array) else next(arrays)

    mu, nu = take(leaf.mu, leaf.mu_scale), take(leaf.nu, leaf.nu_scale)
    param, master, values, values_t = map(take, (leaf.param, leaf.master, leaf.values, leaf.values_t))
    return replace(leaf, mu=mu, nu=nu, param=param, master=master, values=values, values_t=values_t)


def _layout(leaf) -> int:
    """Which arrays there are and whether the leaf decays, as bits."""
    present = (leaf.param, leaf.master, leaf.values, leaf.values_t)
    return sum((array is not None) << bit for bit, array in enumerate(present)) | leaf.decays << 4


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
        count = len(_arrays(leaf)) - (leaf.values_t is not None)
        return [straight] * count + [transposed] * (leaf.values_t is not None)

    per_leaf = [dims(number, leaf) for number, leaf in enumerate(leaves)]
    operands = ["coefficients", "leaves scales", "", *(dim for leaf in per_leaf for dim in leaf)]
    results = [*(dim for leaf in per_leaf for dim in leaf[1:]), "leaves"]
    return f"{','.join(operands)}->{','.join(results)}"


def _kernel(vector, scales, seed, *arrays, split: Split, layout, adam_w_mode):
    results, aliases, position = [], {}, 3  # three operands stand before the leaves
    for bits in layout:
        updated = range(position + 1, position + 3 + (bits & 15).bit_count())  # the gradient is only read
        aliases |= {operand: len(results) + i for i, operand in enumerate(updated)}
        results += [jax.ShapeDtypeStruct(arrays[i - 3].shape, arrays[i - 3].dtype) for i in updated]
        position = updated.stop
    results.append(jax.ShapeDtypeStruct((len(layout),), jnp.float32))
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    attributes = {"layout": np.array(layout, np.int32), "adam_w_mode": adam_w_mode}
    *updated, amaxes = call(vector, scales, seed, *arrays, **attributes)
    return *updated, pmax(amaxes, split, *split)  # the same on every shard of a leaf that is not split


def _reference(vector, scales, seed, *arrays, split: Split, layout, adam_w_mode):
    coefficients = Coefficients(*vector)
    remaining, results, amaxes = iter(arrays), [], []
    for number, (bits, scale) in enumerate(zip(layout, scales, strict=True)):
        leaf = _unpack(bits, scale, remaining)
        updated, amax, _ = adam_leaf(leaf, coefficients, seed, number, adam_w_mode)
        results += _arrays(updated)[1:]
        amaxes.append(amax)
    return *results, pmax(jnp.stack(amaxes), split, *split)


def _unpack(bits, scale, arrays) -> Leaf:
    def moment(before):
        array = next(arrays)
        return Fp8Array(array, before) if array.dtype.itemsize == 1 else array

    gradient, mu, nu = next(arrays), moment(scale[1]), moment(scale[3])
    param, master, values, values_t = (next(arrays) if bits >> bit & 1 else None for bit in range(4))
    decays = bool(bits >> 4)
    return Leaf(gradient, mu, nu, param, master, values, values_t, scale[0], scale[2], scale[4], decays=decays)
