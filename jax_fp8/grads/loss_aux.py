"""What a loss returns beside its number: what the caller wants to see of a step, and the next values of collections.

    loss_fn(variables, batch) → loss, {"batch_stats": ..., "accuracy": ...}
                                       └ as a collection of the variables   └ anything else → metrics["aux"]
    of several parts of a batch ─joined→ one, as if they had been one batch

A part is a microbatch, or a device's part of one. All of them start from the same collections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import describe, first_difference
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.grads.checks import check_loss

OWN_COLLECTIONS = ("params", "fp8", "fp8_cache")  # which a step moves by itself


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aux:
    """`collections`: those that the loss has changed, by name; `rest`: what else it returned beside its number."""

    collections: dict[str, Any]
    rest: Any


class AuxLoss:
    """`loss_fn(variables, batch) -> (loss, aux)` as a loss of `(loss, Aux)`: entries of a dict `aux` that are named
    like collections of the variables are their next values.
    """

    def __init__(self, loss_fn: Callable):
        if isinstance(loss_fn, LayeredLoss):
            raise ValueError(
                "has_aux=True needs a loss in one that returns (loss, aux), got a LayeredLoss, whose last piece is a "
                "number; leave out has_aux, or pass a function that calls it and returns a pair"
            )
        self._loss_fn = loss_fn
        self.whole_batch = getattr(loss_fn, "whole_batch", None)

    def __call__(self, variables: Mapping, *args: Any, **options: Any) -> tuple[Any, Aux]:
        out = self._loss_fn(variables, *args, **options)
        check_loss(out, has_aux=True)
        return out[0], _as_aux(out[1], others_of(variables))


def others_of(variables: Mapping) -> dict[str, Any]:
    """The collections that a loss may change, as plain dicts."""
    return {name: _plain(tree) for name, tree in variables.items() if name not in OWN_COLLECTIONS}


def joined_microbatches(stacked: Aux) -> Aux:
    """Of the microbatches of a step, whose arrays are stacked along a first dim."""
    return _joined(
        stacked,
        lambda x: jnp.mean(x, axis=0, dtype=_wide(x)).astype(x.dtype),
        lambda x: jnp.sum(x, axis=0, dtype=x.dtype),
        lambda x: jnp.max(x, axis=0),
    )


def joined_devices(aux: Aux, axes: tuple[str, ...]) -> Aux:
    """Of the devices of these mesh axes, whose parts of the batch are equally large; inside a `shard_map`."""
    if not axes:
        return aux
    return _joined(
        aux,
        lambda x: lax.pmean(x.astype(_wide(x)), axes).astype(x.dtype),
        lambda x: lax.psum(x, axes),
        lambda x: lax.pmax(x, axes),
    )


def check_shapes_of_parts(of_part: Any, of_whole: Any) -> None:
    """Raise where the shapes of what a loss returns depend on how many rows it has: the mean over parts of a batch
    would be one of different rows.

    Args:
      of_part, of_whole: shapes of `(loss, Aux)`, of a part of a batch and of all of it.
    """
    difference = first_difference(of_whole[1].rest, of_part[1].rest)
    if difference is not None:
        raise ValueError(
            "aux must have shapes that do not depend on the number of rows, for it is joined over the parts of a "
            f"batch, but in a part of it {difference}; return a mean or a sum over the rows"
        )


def check_has_no_aux(has_aux: bool) -> None:
    """Raise where microbatches in pieces would have to add up what a loss returns: nobody knows its shapes before."""
    if has_aux:
        raise ValueError(
            "microbatches in pieces are of a loss that returns a number alone, got a step with has_aux=True; call "
            "step(state, batch), which splits the batch, or make another step without has_aux"
        )


def _joined(aux: Aux, mean: Callable, total: Callable, largest: Callable) -> Aux:
    def of_collection(x):
        if not _is_of_numbers(x.dtype):
            raise ValueError(
                "a collection that parts of a batch change must hold numbers, whose mean or maximum is the next, got "
                f"{x.dtype}; take random keys from the rngs of the step"
            )
        return mean(x) if _is_float(x) else largest(x)

    def of_rest(x):
        return mean(x) if _is_float(x) else largest(x) if x.dtype == bool else total(x)

    return Aux(jax.tree.map(of_collection, aux.collections), jax.tree.map(of_rest, aux.rest))


def _as_aux(aux, collections) -> Aux:
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


def _check_is_alike(name, before, after):
    difference = first_difference(before, after)
    if difference is not None:
        raise ValueError(
            f'aux["{name}"] must be like the collection "{name}" of the state, but of it {difference}; return what '
            f'model.apply(..., mutable=["{name}"]) did, and leave a collection that grows with every call out of the '
            "variables of the state"
        )


def _check_has_none_inside(rest, collections):
    """Raise where a collection is not at the top of aux: it would be taken for a metric, and stay as it was."""
    trees = [tree for tree in collections.values() if any(map(jnp.ndim, jax.tree.leaves(tree)))]

    def is_one(node):
        if not isinstance(node, Mapping):
            return False
        named = collections.keys() & node.keys() or isinstance(node.get("fp8"), Mapping)
        return bool(named) or any(first_difference(tree, _plain(node)) is None for tree in trees)

    for path, node in jax.tree_util.tree_leaves_with_path(rest, is_leaf=is_one):
        if is_one(node):
            raise ValueError(
                "collections must be entries of aux, a dict, by the names that they have in the state, got "
                f"{describe(node)} at {_place(path)}; return (loss, {{**updates, ...}}) with the updates that "
                "model.apply returned"
            )


def _plain(tree) -> Any:
    """Dicts where there are others, such as Flax's frozen ones."""
    return {name: _plain(child) for name, child in tree.items()} if isinstance(tree, Mapping) else tree


def _as_numbers(rest) -> Any:
    return jax.tree_util.tree_map_with_path(_as_number, rest)


def _as_number(path, leaf) -> jax.Array:
    """An array, of one dtype for every number of parts: counts are added up, and in 8 or 16 bits they would wrap."""
    dtype = getattr(leaf, "dtype", None)
    is_number = isinstance(leaf, bool | int | float | complex) if dtype is None else _is_of_numbers(dtype)
    if not is_number:
        raise ValueError(
            f"aux must hold numbers and flags, got {describe(leaf)} at {_place(path)}; leave it out of what loss_fn "
            "returns"
        )
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array
    is_unsigned = jnp.issubdtype(array.dtype, jnp.unsignedinteger)
    return array.astype(jnp.promote_types(array.dtype, jnp.uint32 if is_unsigned else jnp.int32))


def _is_of_numbers(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def _place(path) -> str:
    return f"aux{jax.tree_util.keystr(path)}"


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _wide(x) -> Any:
    """In which a mean is computed."""
    return x.dtype if x.dtype.itemsize >= 4 else jnp.float32
