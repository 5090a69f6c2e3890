"""The aux of a loss: metrics for the caller, and the next values of collections such as "batch_stats".

    loss_fn(variables, batch) → loss, {"batch_stats": ..., "accuracy": ...}
                                       └ named like a collection            └ anything else → metrics["aux"]
    the aux of several parts of a batch ─joined→ one aux, as if the parts had been one batch

A part is a microbatch, or a device's part of one. All parts start from the same collections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath

from jax_fp8.core.checks import describe, first_difference
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.grads.checks import check_loss

OWN_COLLECTIONS = ("params", "fp8", "fp8_cache")  # a step updates these, not the loss
Reduction = Callable[[jax.Array], jax.Array]  # joins the arrays of all parts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aux:
    """`collections`: the next values of those that the loss has changed, by name; `rest`: all else in the aux."""

    collections: dict[str, PyTree]
    rest: PyTree


class AuxLoss:
    """`loss_fn(variables, batch) -> (loss, aux)` as a loss that returns `(loss, Aux)`. If `aux` is a dict, its entries
    that are named like collections of the variables are the next values of these.
    """

    def __init__(self, loss_fn: Callable):
        if isinstance(loss_fn, LayeredLoss):
            raise ValueError(
                "has_aux=True needs a function that returns (loss, aux), got a LayeredLoss, whose last piece returns a "
                "number; leave out has_aux, or pass a function that calls it and returns a pair"
            )
        self._loss_fn = loss_fn
        self.whole_batch = getattr(loss_fn, "whole_batch", None)

    def __call__(self, variables: Variables, *args: PyTree, **options: object) -> tuple[jax.typing.ArrayLike, Aux]:
        out = self._loss_fn(variables, *args, **options)
        check_loss(out, has_aux=True)
        return out[0], _as_aux(out[1], others_of(variables))


def others_of(variables: Variables) -> dict[str, PyTree]:
    """The collections that a loss may change, as plain dicts."""
    return {name: _plain(tree) for name, tree in variables.items() if name not in OWN_COLLECTIONS}


def joined_microbatches(stacked: Aux) -> Aux:
    """The aux of a step from those of its microbatches, whose arrays are stacked along a first dim."""
    return _joined(
        stacked,
        mean=lambda x: jnp.mean(x, axis=0, dtype=_mean_dtype(x)).astype(x.dtype),
        total=lambda x: jnp.sum(x, axis=0, dtype=x.dtype),
        largest=lambda x: jnp.max(x, axis=0),
    )


def joined_devices(aux: Aux, axes: tuple[str, ...]) -> Aux:
    """The aux of all devices along these mesh axes, whose parts of the batch have equal size; inside a `shard_map`."""
    if not axes:
        return aux
    return _joined(
        aux,
        mean=lambda x: lax.pmean(x.astype(_mean_dtype(x)), axes).astype(x.dtype),
        total=lambda x: lax.psum(x, axes),
        largest=lambda x: lax.pmax(x, axes),
    )


def check_shapes_of_parts(of_part: PyTree, of_whole: PyTree) -> None:
    """Raise where the shapes of a loss's aux depend on the number of rows: an array with an entry for each row cannot
    be averaged over parts of a batch.

    Args:
      of_part: shapes of `(loss, Aux)` for a part of a batch.
      of_whole: the same for the whole batch.
    """
    difference = first_difference(of_whole[1].rest, of_part[1].rest)
    if difference is not None:
        raise ValueError(
            "aux must have shapes that do not depend on the number of rows, for it is joined over the parts of a "
            f"batch, but in a part of it {difference}; return a mean or a sum over the rows"
        )


def check_has_no_aux(has_aux: bool) -> None:
    """Raise for microbatches in pieces: their aux would have to be added up before its shapes are known."""
    if has_aux:
        raise ValueError(
            "microbatches in pieces need a loss that returns a number alone, got a step with has_aux=True; call "
            "step(state, batch), which splits the batch, or make another step without has_aux"
        )


def _joined(aux: Aux, mean: Reduction, total: Reduction, largest: Reduction) -> Aux:
    """Floats: the mean. Integers and flags: in a collection the maximum; in the rest the sum, or any flag."""

    def join_collection(x: jax.Array) -> jax.Array:
        if not _is_of_numbers(x.dtype):
            raise ValueError(
                "a collection that parts of a batch change must hold numbers, whose mean or maximum is the next, got "
                f"{x.dtype}; take random keys from the rngs of the step"
            )
        return mean(x) if _is_float(x) else largest(x)

    def join_rest(x: jax.Array) -> jax.Array:
        return mean(x) if _is_float(x) else largest(x) if x.dtype == bool else total(x)

    return Aux(jax.tree.map(join_collection, aux.collections), jax.tree.map(join_rest, aux.rest))


def _as_aux(aux: PyTree, collections: Variables) -> Aux:
    aux = _plain(aux)
    if not isinstance(aux, dict):
        _check_has_none_inside(aux, collections)
        return Aux({}, _as_numbers(aux))
    own = [name for name in OWN_COLLECTIONS if isinstance(aux.get(name), Mapping)]
    if own:
        raise ValueError(
            f'aux must leave the collection "{own[0]}" to the step, which moves it, got it among {sorted(aux)}; '
            "name the others in mutable=[...]"
        )
    changed = {name: tree for name, tree in aux.items() if name in collections}
    rest = {name: tree for name, tree in aux.items() if name not in collections}
    for name, tree in changed.items():
        _check_is_alike(name, collections[name], tree)
    _check_has_none_inside(rest, collections)
    return Aux(changed, _as_numbers(rest))


def _check_is_alike(name: str, before: PyTree, after: PyTree) -> None:
    difference = first_difference(before, after)
    if difference is not None:
        raise ValueError(
            f'aux["{name}"] must be like the collection "{name}" of the state, but of it {difference}; return what '
            f'model.apply(..., mutable=["{name}"]) did, and leave a collection that grows with every call out of the '
            "variables of the state"
        )


def _check_has_none_inside(rest: PyTree, collections: Variables) -> None:
    """Raise where a collection is inside of an entry of aux: it would be taken for a metric, and not be updated."""
    trees = [tree for tree in collections.values() if any(map(jnp.ndim, jax.tree.leaves(tree)))]

    def is_collection(node: PyTree) -> bool:
        if not isinstance(node, Mapping):
            return False
        named = collections.keys() & node.keys() or isinstance(node.get("fp8"), Mapping)
        return bool(named) or any(first_difference(tree, _plain(node)) is None for tree in trees)

    for path, node in jax.tree_util.tree_leaves_with_path(rest, is_leaf=is_collection):
        if is_collection(node):
            raise ValueError(
                "collections must be entries of aux, a dict, by the names that they have in the state, got "
                f"{describe(node)} at {_shown(path)}; return (loss, {{**updates, ...}}) with the updates that "
                "model.apply returned"
            )


def _plain(tree: PyTree) -> PyTree:
    """The same tree with plain dicts in place of other mappings, such as Flax's frozen ones."""
    return {name: _plain(child) for name, child in tree.items()} if isinstance(tree, Mapping) else tree


def _as_numbers(rest: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(_as_number, rest)


def _as_number(path: KeyPath, leaf: object) -> jax.Array:
    """A leaf as an array. Integers get at least 32 bits: counts are added up, and in 8 or 16 bits they would wrap."""
    dtype = getattr(leaf, "dtype", None)
    is_number = isinstance(leaf, bool | int | float | complex) if dtype is None else _is_of_numbers(dtype)
    if not is_number:
        raise ValueError(
            f"aux must hold numbers and flags, got {describe(leaf)} at {_shown(path)}; leave it out of what loss_fn "
            "returns"
        )
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array
    is_unsigned = jnp.issubdtype(array.dtype, jnp.unsignedinteger)
    return array.astype(jnp.promote_types(array.dtype, jnp.uint32 if is_unsigned else jnp.int32))


def _is_of_numbers(dtype: jax.typing.DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _shown(path: KeyPath) -> str:
    return f"aux{jax.tree_util.keystr(path)}"


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _mean_dtype(x: jax.Array) -> jax.typing.DTypeLike:
    """The dtype in which a mean is computed."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32
