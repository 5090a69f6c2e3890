"""Adam over a whole tree of parameters, each array read and written once, with the weights cast to FP8 on the way.

    g = grad_scale g            (L2 mode: g = g + weight_decay p)
    m = b1 m + (1 - b1) g       v = b2 v + (1 - b2) g²
    u = (m correction1) / (sqrt(v correction2) + eps)      (AdamW mode: u = u + weight_decay p)
    p = p - rate u

All in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101), `p` being the master, and every
operation rounded by itself: kernel and reference agree bit for bit. Subnormal numbers count on the GPU; XLA's CPU
compiler flushes them to zero.

One launch serves many leaves, in place: XLA copies an array first only where it is still needed. A large tree takes
several, so that on a mesh some params are updated while gradients of others are still being summed. A leaf with a
`cast` is written in FP8 as well, with its transpose, its scale, and the maximum of its magnitudes, from which the next
scale can be made; leaves side by side may share one such copy, and those of block scaling have a scale for each square
(kernels/shared_cast.py). Every scalar of a leaf has its own buffer, as a state wants it: cutting them out of one vector
would take a small kernel each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import CastRule
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.kernels.adam_arrays import (
    SCALARS,
    Coefficients,
    Leaf,
    Scales,
    arrays_of,
    fields_of,
    layout_of,
    leaf_of,
    names_in,
    values_and_scale,
)
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import formula_attributes, quantize_reference
from jax_fp8.kernels.dispatch import Split, dispatch, pmax
from jax_fp8.kernels.draws import Place, check_dims, draws_of, index_of, place_words
from jax_fp8.kernels.shared_cast import (
    Members,
    SharedCast,
    arrays_by,
    check_shards,
    check_shared_casts,
    on_this_shard,
    places,
    row_dim,
    shared_cast_reference,
    shared_dims,
    with_all_columns,
)
from jax_fp8.kernels.storage import (
    REMAINDER,
    master_of,
    off_the_tie,
    quantize_at_random,
    quantize_root,
    remainder_of,
    round_at_random,
    rounds_to,
)

TARGET = "jax_fp8_adam"
LAUNCH_ELEMENTS = 2**27  # about 1 ms


def adam(
    leaves: Sequence[Leaf],
    coefficients: Coefficients,
    seed: jax.Array,
    adam_w_mode: bool,
    shared: Sequence[SharedCast] = (),
) -> tuple[list[Leaf], list[Fp8Pair]]:
    """Update all leaves.

    Args:
      leaves: what to update.
      coefficients: the numbers of this step.
      seed: uint32 scalar, different at every step: for the rounding of moments in few bits.
      adam_w_mode: decoupled weight decay, else an L2 term.
      shared: casts of leaves side by side, to be written anew.

    Returns:
      The leaves with new moments, params, masters and casts, and the pairs of the shared casts; as they were where
      `apply` is 0.
    """
    check_shared_casts(shared, leaves)
    for leaf in leaves:
        if _rounds_at_random(leaf.mu, leaf.nu):
            check_dims(leaf.gradient.shape)
    updated: list[Leaf] = []
    pairs: dict[int, Fp8Pair] = {}
    for first, stop in launches([leaf.gradient.size for leaf in leaves], [cast.leaves for cast in shared]):
        here = {number: cast for number, cast in enumerate(shared) if first <= cast.leaves[0] < stop}
        casts = [replace(cast, leaves=tuple(leaf - first for leaf in cast.leaves)) for cast in here.values()]
        some, of_casts = _launch(leaves[first:stop], coefficients, seed, adam_w_mode, casts, first)
        updated += some
        pairs |= dict(zip(here, of_casts, strict=True))
    return updated, [pairs[number] for number in range(len(shared))]


def launches(sizes: Sequence[int], shared: Sequence[Members]) -> Iterator[tuple[int, int]]:
    """The first leaf and the end of each launch: as many leaves as have LAUNCH_ELEMENTS together, or one that has more.
    The leaves of a shared cast stay together, with all that are between them.
    """
    last_of = {min(members): max(members) for members in shared}
    first, elements, must_have = 0, 0, -1
    for number, size in enumerate(sizes):
        if number > max(first, must_have) and elements + size > LAUNCH_ELEMENTS:
            yield first, number
            first, elements = number, 0
        elements += size
        must_have = max(must_have, last_of.get(number, -1))
    if sizes:
        yield first, len(sizes)


def _launch(leaves, coefficients, seed, adam_w_mode, shared, first_leaf) -> tuple[list[Leaf], list[Fp8Pair]]:
    members = tuple(cast.leaves for cast in shared)
    rule = shared[0].rule if shared else None
    settings: dict[str, Any] = {"layouts": tuple(map(layout_of, leaves)), "shared": members, "rule": rule}
    settings |= {"first_leaf": first_leaf, "adam_w_mode": adam_w_mode}
    kernel, reference = (partial(_on_shard, form, **settings) for form in (_kernel, _reference))
    vector = jnp.stack([getattr(coefficients, number.name) for number in fields(Coefficients)])
    operands = [vector, _scales(leaves, shared), seed, *(array for cast in shared for array in cast.arrays)]
    operands += [array for leaf in leaves for array in arrays_of(leaf).values()]
    results = iter(dispatch(_rule(leaves, members, rule), kernel, reference, *operands))
    pairs = [cast.pair_of(results) for cast in shared]
    updated = ({name: next(results) for name in arrays_of(leaf) if name != "g"} for leaf in leaves)
    return [replace(leaf, **fields_of(arrays)) for leaf, arrays in zip(leaves, updated, strict=True)], pairs


def adam_leaf(
    leaf: Leaf,
    coefficients: Coefficients,
    seed: jax.Array,
    number: int,
    adam_w_mode: bool,
    whereabouts: Place | None = None,
) -> tuple[Leaf, jax.Array]:
    """The reference: the updated leaf (`number` in the tree), and the update of a float32 param, `-rate u`.
    Of a shard, `whereabouts` says where in the leaf it lies.
    """
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
    draws = None, None
    if _rounds_at_random(leaf.mu, leaf.nu):
        draws = draws_of(index_of(leaf.gradient, whereabouts), seed, number)
    updated = _store(leaf, m, v, p, *draws)
    if leaf.cast is not None:
        weight = updated.master if updated.param is None else updated.param
        old, old_t, _, _ = leaf.cast.arrays
        values = quantize_reference(weight, old.dtype, leaf.scale)
        values_t = None if old_t is None else values.T
        updated = replace(updated, cast=Fp8Pair.of(values, values_t, leaf.scale, amax_reference(weight)))
    unchanged = c.apply == 0
    updated = jax.tree.map(lambda old, new: jnp.where(unchanged, old, new), leaf, updated)
    return updated, jnp.where(unchanged, -jnp.float32(0), update)


def _store(leaf: Leaf, m, v, p, nu_draw, mu_draw) -> Leaf:
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
        mu = Fp8Array(quantize_at_random(m, leaf.mu.dtype, leaf.mu_scale, mu_draw), leaf.mu_scale)
    else:
        mu = m if leaf.mu.dtype == jnp.float32 else round_at_random(m, mu_draw)
    if isinstance(leaf.nu, Fp8Array):
        nu = Fp8Array(quantize_root(v, leaf.nu.dtype, leaf.nu_scale, nu_draw), leaf.nu_scale)
    else:
        nu = v if leaf.nu.dtype == jnp.float32 else round_at_random(v, nu_draw, never_zero=True)
    return replace(leaf, mu=mu, nu=nu, param=param, master=master)


def _rounds_at_random(*moments) -> bool:
    """Whether a moment has fewer bits than the float32 that it is computed in."""
    return any(moment.dtype != jnp.float32 for moment in moments)


def _master(leaf):
    """The number that the step starts from. Where a master does not round to its param, somebody has changed the param,
    which is the master then."""
    if leaf.master is None:
        return leaf.param
    if leaf.master.dtype == REMAINDER:
        return master_of(leaf.param, leaf.master)
    master = leaf.master.astype(jnp.float32)
    if leaf.param is None:
        return master
    return jnp.where(rounds_to(leaf.master, leaf.param), master, leaf.param.astype(jnp.float32))


def _first_moment(mu):
    return mu.dequantize() if isinstance(mu, Fp8Array) else mu.astype(jnp.float32)


def _second_moment(nu):
    return jnp.square(nu.dequantize()) if isinstance(nu, Fp8Array) else nu.astype(jnp.float32)


def _rounded(product):
    """A product as float32 has it. Compilers fuse a product into the sum it enters and round once;
    a selection keeps them apart."""
    return jnp.where(product == product, product, np.float32(np.nan))


# ---- the custom call: the arrays of every shared cast, then those of every leaf --------------------------------------


def _scales(leaves: Sequence[Leaf], shared: Sequence[SharedCast]) -> jax.Array:
    """f32[leaves, 5]: `Scales` of each; 1 where there is none."""
    of_shared = {number: cast.scale for cast in shared for number in cast.leaves if cast.rule is None}

    def row(number, leaf):
        (_, mu), (_, nu) = values_and_scale(leaf.mu), values_and_scale(leaf.nu)
        return Scales(of_shared.get(number, leaf.scale), mu, leaf.mu_scale, nu, leaf.nu_scale)

    one = np.float32(1)
    scales = [one if scale is None else scale for place in enumerate(leaves) for scale in row(*place)]
    return jnp.stack(scales).reshape(-1, len(Scales._fields))


def _rule(leaves: Sequence[Leaf], shared: tuple[Members, ...], rule: CastRule | None) -> str:
    operands, results = shared_dims(shared, "in", rule), shared_dims(shared, "out", rule)
    operands = ["coefficients", "leaves scales", "", *operands]
    for leaf, dims in zip(leaves, leaf_dims([leaf.gradient.ndim for leaf in leaves], shared), strict=True):
        special = {"values_t": " ".join(reversed(dims)), **dict.fromkeys(SCALARS, "")}
        per_array = [special.get(name, " ".join(dims)) for name in arrays_of(leaf)]
        operands += per_array
        results += per_array[1:]
    return f"{','.join(operands)}->{','.join(results)}"


def leaf_dims(ranks: Sequence[int], shared: Sequence[Members]) -> list[list[str]]:
    """The names of the dims of every leaf."""
    rows_of = {number: row_dim(cast) for cast, members in enumerate(shared) for number in members}
    names = [[f"x{number}d{dim}" for dim in range(rank)] for number, rank in enumerate(ranks)]
    return [[rows_of.get(number, name) for name in dims[:1]] + dims[1:] for number, dims in enumerate(names)]


def _on_shard(form, vector, scales, seed, *arrays, split: Split, layouts, shared, rule, first_leaf, adam_w_mode):
    """One of the two forms below on the arrays of this shard."""
    each = len(arrays_by(rule))
    casts, arrays = arrays[: each * len(shared)], arrays[each * len(shared) :]
    each_leaf = _by_leaf(arrays, layouts)
    shapes = [of_leaf["g"].shape for of_leaf in each_leaf]
    check_shards(shared, shapes, split, rule)
    widths = [[shapes[number][1] for number in members] for members in shared]
    old, room = [], []
    for cast, members in enumerate(shared):
        here = casts[each * cast : each * (cast + 1)]
        was, to_write = on_this_shard(cast, members, here, sum(widths[cast]), rule, split)
        old, room = [*old, was], [*room, *to_write]
    settings = {"rule": rule, "first_leaf": first_leaf, "adam_w_mode": adam_w_mode}
    dims = leaf_dims([len(shape) for shape in shapes], shared)
    whereabouts = [
        Place.on_shard(shape, names, split if _rounds_at_random(of_leaf["mu"], of_leaf["nu"]) else {})
        for of_leaf, shape, names in zip(each_leaf, shapes, dims, strict=True)
    ]
    leaf_places = places(shared, shapes), whereabouts
    written, updated = form(vector, scales, seed, room, arrays, layouts, shared, *leaf_places, **settings)
    unchanged = vector[-1] == 0  # `apply`
    rows = zip(shared, widths, written, old, strict=True)
    whole = [array for row in rows for array in with_all_columns(*row, rule, split, unchanged)]
    names = [*arrays_by(rule) * len(shared), *(name for layout in layouts for name in names_in(layout)[1:])]
    return _whole_amaxes([*whole, *updated], names, split)


def _kernel(
    vector, scales, seed, casts, arrays, layouts, shared, leaf_places, whereabouts, rule, first_leaf, adam_w_mode
):
    """The new arrays of each shared cast, and of all leaves."""
    shapes = [of_leaf["g"].shape for of_leaf in _by_leaf(arrays, layouts)]
    operands = [vector, scales, seed, place_words(shapes, whereabouts), *casts, *arrays]
    position = len(operands) - len(arrays)
    updated = list(range(position - len(casts), position))
    for layout in layouts:
        updated += range(position + 1, position + len(names_in(layout)))
        position += len(names_in(layout))
    results = [jax.ShapeDtypeStruct(operands[i].shape, operands[i].dtype) for i in updated]
    aliases = {operand: result for result, operand in enumerate(updated)}
    call = jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)
    numbers = {"layout": layouts}
    numbers |= {"shared_cast": [of.cast for of in leaf_places], "first_column": [of.first_column for of in leaf_places]}
    how: dict[str, Any] = {name: np.array(of_leaves, np.int32) for name, of_leaves in numbers.items()}
    how |= {"shared_casts": np.int32(len(shared)), "first_leaf": np.int32(first_leaf), "adam_w_mode": adam_w_mode}
    how |= {"by_tile": rule is not None, **formula_attributes(None if rule is None else rule.formula)}
    new, each = call(*operands, **how), len(arrays_by(rule))
    return [new[each * cast : each * (cast + 1)] for cast in range(len(shared))], new[len(casts) :]


def _reference(vector, scales, seed, casts, arrays, layouts, shared, _, whereabouts, rule, first_leaf, adam_w_mode):
    leaves, each = [], len(arrays_by(rule))
    rows = zip(_by_leaf(arrays, layouts), layouts, scales, whereabouts, strict=True)
    for number, (of_leaf, layout, row, where) in enumerate(rows, start=first_leaf):
        numbers = row, seed, np.uint32(number)
        leaves.append(_reference_of_leaf(vector, *numbers, of_leaf, where, layout, adam_w_mode))
    written = [
        shared_cast_reference(
            [leaves[number].param for number in members],
            casts[each * cast : each * (cast + 1)],
            Scales(*scales[members[0]]).cast_scale,
            rule,
            Coefficients(*vector).apply == 0,
        )
        for cast, members in enumerate(shared)
    ]
    return written, [array for leaf in leaves for array in list(arrays_of(leaf).values())[1:]]


@partial(jax.jit, static_argnames=("layout", "adam_w_mode"))  # which is traced once for all leaves alike
def _reference_of_leaf(vector, row, seed, number, arrays, whereabouts, layout, adam_w_mode) -> Leaf:
    leaf = leaf_of(layout, Scales(*row), arrays)
    return adam_leaf(leaf, Coefficients(*vector), seed, number, adam_w_mode, whereabouts)[0]


def _by_leaf(arrays, layouts) -> list[dict[str, jax.Array]]:
    """The arrays of every leaf, by name."""
    remaining = iter(arrays)
    return [{name: next(remaining) for name in names_in(layout)} for layout in layouts]


def _whole_amaxes(results: list[jax.Array], names: Sequence[str], split: Split) -> tuple[jax.Array, ...]:
    """Results with each amax that of the whole weight, not of this shard."""
    positions = [i for i, name in enumerate(names) if name == "amax"]
    if split and positions:
        # pmax over every axis that splits any leaf: harmless to a leaf that is the same on all shards.
        amaxes = pmax(jnp.stack([results[i] for i in positions]), split, *split)
        for i, amax in zip(positions, amaxes, strict=True):
            results[i] = amax
    return tuple(results)
