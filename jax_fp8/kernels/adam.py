"""Adam over a whole tree of parameters in one pass: each array is read and written once, and weights are cast to FP8.

The equations are those of kernels/adam_leaf.py. Kernel and reference agree bit for bit.

One launch updates many leaves in place; XLA copies an array first only where it is still needed. A large tree takes
several launches, so that on a mesh some params are updated while gradients of others are still being reduced. A leaf
with a `cast` is also written in FP8, with its transpose, its scale and its amax, from which the next scale follows.
Kernels side by side may share one such copy, and block scaling has a scale for each square (kernels/shared_cast.py).
Every scalar of a leaf has a buffer of its own, because slicing it out of a vector would launch a small kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import CastRule
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.adam_arrays import (
    SCALARS,
    Coefficients,
    Layout,
    Leaf,
    Scales,
    arrays_of,
    fields_of,
    layout_of,
    leaf_of,
    names_in,
    values_and_scale,
)
from jax_fp8.kernels.adam_leaf import adam_leaf, rounds_at_random
from jax_fp8.kernels.casting import formula_attributes
from jax_fp8.kernels.dispatch import Split, dispatch, pmax
from jax_fp8.kernels.draws import Place, check_dims, place_words
from jax_fp8.kernels.shared_cast import (
    ColumnPlace,
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
      leaves: the arrays to update.
      coefficients: the scalars of this step.
      seed: uint32 scalar, different at every step, for the stochastic rounding of moments in few bits.
      adam_w_mode: decoupled weight decay, else an L2 term.
      shared: casts of leaves side by side, to be written anew.

    Returns:
      The leaves with new moments, params, masters and casts, and the pairs of the shared casts; as they were where
      `apply` is 0.
    """
    check_shared_casts(shared, leaves)
    for leaf in leaves:
        if rounds_at_random(leaf.mu, leaf.nu):
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
    """The first leaf and the end of each launch: leaves of at most LAUNCH_ELEMENTS together, or one larger leaf.
    The leaves of a shared cast stay together, with all leaves between them.
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


def _launch(
    leaves: Sequence[Leaf],
    coefficients: Coefficients,
    seed: jax.Array,
    adam_w_mode: bool,
    shared: Sequence[SharedCast],
    first_leaf: int,
) -> tuple[list[Leaf], list[Fp8Pair]]:
    members = tuple(cast.leaves for cast in shared)
    rule = shared[0].rule if shared else None
    settings: dict[str, PyTree] = {"layouts": tuple(map(layout_of, leaves)), "shared": members, "rule": rule}
    settings |= {"first_leaf": first_leaf, "adam_w_mode": adam_w_mode}
    kernel, reference = (partial(_on_shard, form, **settings) for form in (_kernel, _reference))
    vector = jnp.stack([getattr(coefficients, number.name) for number in fields(Coefficients)])
    operands = [vector, _scales(leaves, shared), seed, *(array for cast in shared for array in cast.arrays)]
    operands += [array for leaf in leaves for array in arrays_of(leaf).values()]
    results = iter(dispatch(_rule(leaves, members, rule), kernel, reference, *operands))
    pairs = [cast.pair_of(results) for cast in shared]
    updated = ({name: next(results) for name in arrays_of(leaf) if name != "g"} for leaf in leaves)
    return [replace(leaf, **fields_of(arrays)) for leaf, arrays in zip(leaves, updated, strict=True)], pairs


# ---- the custom call: the arrays of every shared cast, then those of every leaf --------------------------------------


def _scales(leaves: Sequence[Leaf], shared: Sequence[SharedCast]) -> jax.Array:
    """f32[leaves, 5]: `Scales` of each; 1 where there is none."""
    of_shared = {number: cast.scale for cast in shared for number in cast.leaves if cast.rule is None}

    def row(number: int, leaf: Leaf):
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


def _on_shard(
    form: Callable,
    vector: jax.Array,
    scales: jax.Array,
    seed: jax.Array,
    *arrays: jax.Array,
    split: Split,
    layouts: Sequence[Layout],
    shared: Sequence[Members],
    rule: CastRule | None,
    first_leaf: int,
    adam_w_mode: bool,
):
    """Kernel or reference (`form`) on the arrays of this shard."""
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
        Place.on_shard(shape, names, split if rounds_at_random(of_leaf["mu"], of_leaf["nu"]) else {})
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
    vector: jax.Array,
    scales: jax.Array,
    seed: jax.Array,
    casts: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    layouts: Sequence[Layout],
    shared: Sequence[Members],
    leaf_places: Sequence[ColumnPlace],
    whereabouts: Sequence[Place],
    rule: CastRule | None,
    first_leaf: int,
    adam_w_mode: bool,
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
    how: dict[str, PyTree] = {name: np.array(of_leaves, np.int32) for name, of_leaves in numbers.items()}
    how |= {"shared_casts": np.int32(len(shared)), "first_leaf": np.int32(first_leaf), "adam_w_mode": adam_w_mode}
    how |= {"by_tile": rule is not None, **formula_attributes(None if rule is None else rule.formula)}
    new, each = call(*operands, **how), len(arrays_by(rule))
    return [new[each * cast : each * (cast + 1)] for cast in range(len(shared))], new[len(casts) :]


def _reference(
    vector: jax.Array,
    scales: jax.Array,
    seed: jax.Array,
    casts: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    layouts: Sequence[Layout],
    shared: Sequence[Members],
    _: object,
    whereabouts: Sequence[Place],
    rule: CastRule | None,
    first_leaf: int,
    adam_w_mode: bool,
):
    leaves, each = [], len(arrays_by(rule))
    rows = zip(_by_leaf(arrays, layouts), layouts, scales, whereabouts, strict=True)
    for number, (of_leaf, layout, row, where) in enumerate(rows, start=first_leaf):
        numbers = row, seed, np.uint32(number)
        leaves.append(_reference_of_leaf(vector, *numbers, of_leaf, where, layout, adam_w_mode))
    written = [
        shared_cast_reference(
            [leaves[number].param for number in members],
            tuple(casts[each * cast : each * (cast + 1)]),
            Scales(*scales[members[0]]).cast_scale,
            rule,
            Coefficients(*vector).apply == 0,
        )
        for cast, members in enumerate(shared)
    ]
    return written, [array for leaf in leaves for array in list(arrays_of(leaf).values())[1:]]


@partial(jax.jit, static_argnames=("layout", "adam_w_mode"))  # equal leaves share one trace
def _reference_of_leaf(
    vector: jax.Array,
    row: jax.Array,
    seed: jax.Array,
    number: jax.typing.ArrayLike,
    arrays: dict[str, jax.Array],
    whereabouts: Place,
    layout: Layout,
    adam_w_mode: bool,
) -> Leaf:
    leaf = leaf_of(layout, Scales(*row), arrays)
    return adam_leaf(leaf, Coefficients(*vector), seed, number, adam_w_mode, whereabouts)[0]


def _by_leaf(arrays: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[dict[str, jax.Array]]:
    """The arrays of every leaf, by name."""
    remaining = iter(arrays)
    return [{name: next(remaining) for name in names_in(layout)} for layout in layouts]


def _whole_amaxes(results: list[jax.Array], names: Sequence[str], split: Split) -> tuple[jax.Array, ...]:
    """The results, with each amax of the whole weight instead of this shard."""
    positions = [i for i, name in enumerate(names) if name == "amax"]
    if split and positions:
        # One pmax over every axis that splits any leaf; it does not change amaxes that are equal on all devices.
        amaxes = pmax(jnp.stack([results[i] for i in positions]), split, *split)
        for i, amax in zip(positions, amaxes, strict=True):
            results[i] = amax
    return tuple(results)
