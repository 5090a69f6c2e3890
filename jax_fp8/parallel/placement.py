"""Where every param lies on a mesh: the user's rules decide, then what layers declare of their params, then the shape.

    shardings that layers declare, rules ─place_params→ a ParamPlace for each param ─→ specs of params, optimizer state
                                                        and for each kernel that is frozen in FP8 by itself

A `tensor` axis splits the dim that a layer declares (its columns, rows, heads), and an `expert` axis the experts of a
mixture, whatever rules say. `fsdp` splits the rows of every matrix: a shard is then contiguous, and a gathered matrix
needs no permutation. Vectors stay whole, for they are small. `pipe` splits the parts of `fsdp`: the devices of all
stages store a part of each layer, whichever stage computes it. So params are the same tree on every mesh, and each
device updates an equal share of them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.frozen import frozen_kernels
from jax_fp8.core.paths import LayerPath, map_with_names, names_of
from jax_fp8.core.shards import EXPERTS, ParamSharding, Shards
from jax_fp8.core.types import PyTree
from jax_fp8.parallel.mesh import EXPERT, FSDP, PIPE, TENSOR, Parallelism, Rules
from jax_fp8.parallel.param_place import ParamPlace


@dataclass(frozen=True)
class Placement:
    """Where all params of a step lie; `places` is a tree like the params, `frozen` has the kernels that are frozen in
    FP8 (core/frozen.py), which `tensor` alone splits, by their paths among the params.
    """

    parallel: Parallelism
    places: PyTree
    frozen: Mapping[LayerPath, ParamPlace] = field(default_factory=dict)

    @property
    def specs(self) -> PyTree:
        return jax.tree.map(lambda place: place.spec, self.places, is_leaf=_is_place)

    @cached_property
    def by_path(self) -> dict[LayerPath, ParamPlace]:
        by_path: dict[LayerPath, ParamPlace] = {}
        map_with_names(by_path.__setitem__, self.places, is_leaf=_is_place)
        return by_path

    @property
    def shards(self) -> Shards:
        """How layers find their params and the batch split, in the program of one device."""
        dims = {path: place.tensor_dim for path, place in (self.by_path | {**self.frozen}).items()}
        parallel = self.parallel
        return Shards(parallel.batch_axes, parallel.tensor, dims, parallel.batch_parts, parallel.experts)

    @property
    def shards_of_weights(self) -> Shards:
        """`shards` for casting weights: the devices of `pipe` have parts of them, too."""
        shards = self.shards
        return replace(shards, batch_axes=(*shards.batch_axes, *((PIPE,) if self.parallel.stages > 1 else ())))

    @property
    def splits_params(self) -> bool:
        return any(place.spec for place in self.by_path.values())

    def shardings(self, tree: PyTree) -> PyTree:
        """The sharding of each array of a tree. An array with the name and shape of a param, as in an optimizer's
        state, lies like that param; all other arrays are the same on all devices.
        """
        by_path = self.by_path

        def sharding(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
            place = _place_of(path, leaf.shape, by_path)
            return NamedSharding(self.parallel.mesh, place.spec if place else PartitionSpec())

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def shardings_of_frozen(self, collection: PyTree) -> PyTree:
        """The sharding of each array of the collection "fp8_frozen": values, and scales of tiles, lie like their
        kernel's transpose; all other arrays are the same on all devices.
        """

        def sharding(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
            names = names_of(path)
            place = self.frozen.get(names[: names.index(None)]) if None in names else None
            dim = None if place is None or leaf.ndim < 2 else place.tensor_dim
            spec = [
                TENSOR if dim is not None and number == (-3 - dim) % leaf.ndim else None for number in range(leaf.ndim)
            ]
            return NamedSharding(self.parallel.mesh, PartitionSpec(*spec))

        return jax.tree_util.tree_map_with_path(sharding, collection)


def place_params(
    parallel: Parallelism,
    params: PyTree,
    declared: Mapping[LayerPath, ParamSharding],
    frozen: PyTree = MappingProxyType({}),
) -> Placement:
    """Where params lie, which are arrays or their shapes.

    Args:
      declared: the shardings that layers declare.
      frozen: the collection "fp8_frozen".
    """

    def place(path: LayerPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> ParamPlace:
        rule = _rule_of(path, parallel.rules)
        if rule is not None:
            return _by_rule(parallel, path, leaf.shape, rule, declared.get(path, ParamSharding()))
        return _as_declared(parallel, path, leaf.shape, declared.get(path, ParamSharding()))

    def place_frozen(path: LayerPath, pair: Fp8Pair) -> ParamPlace:
        if parallel.experts is not None and declared.get(path, ParamSharding()).has_experts:
            raise ValueError(
                f"{'/'.join(path)}: frozen kernels of experts must be whole on every device, got "
                f"{EXPERT}={parallel.experts.size}; name that axis data"
            )
        *stacked, n, k = pair.columnwise.shape
        own = replace(place(path, jax.ShapeDtypeStruct((*stacked, k, n), pair.columnwise.dtype)), fsdp_dim=None)
        _check_tiles(parallel, path, pair.columnwise, own.tensor_dim)
        return own

    of_frozen = {path: place_frozen(path, pair) for path, pair in frozen_kernels(frozen).items()}
    placement = Placement(parallel, map_with_names(place, params), of_frozen)
    _check_biases(placement, declared)
    return placement


def placed_shapes(shapes: PyTree, shardings: PyTree) -> PyTree:
    """`jax.ShapeDtypeStruct`s with these shardings."""

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes, shardings)


def zeros_like(placed: PyTree) -> PyTree:
    """Zeros of these shapes; each device makes its own shards."""
    make = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), placed),
        out_shardings=jax.tree.map(lambda x: x.sharding, placed),
    )
    return make()


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Arrays of a program that is being traced, with these shardings."""

    def place(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if AxisType.Explicit in sharding.mesh.axis_types:
            return jax.reshard(leaf, sharding)
        return lax.with_sharding_constraint(leaf, sharding)

    return jax.tree.map(place, tree, shardings)


def _as_declared(parallel: Parallelism, path: LayerPath, shape: tuple[int, ...], sharding: ParamSharding) -> ParamPlace:
    """Where a param lies that no rule is about."""
    size, dim, is_partial = parallel.size(TENSOR), sharding.dim, sharding.is_shared
    if size == 1 or dim is None:
        dim = None
    elif _pieces(sharding) % size:
        if not (sharding.or_whole and size % _pieces(sharding) == 0):
            _refuse(path, shape, size, sharding)
        dim, is_partial = None, True
    expert_dim = _expert_dim(parallel, path, shape, sharding)
    own = ParamPlace(shape, dim, None, is_partial, sharding.dtype, parallel.storage_axes, expert_dim)
    return replace(own, fsdp_dim=_fsdp_dim(own.shape_in_layer(parallel), parallel.storage_parts))


def _expert_dim(parallel: Parallelism, path: LayerPath, shape: tuple[int, ...], sharding: ParamSharding) -> int | None:
    """The dim that `expert` splits; raises unless all its devices get as many experts."""
    if parallel.experts is None or not sharding.has_experts:
        return None
    size, experts = parallel.experts.size, shape[EXPERTS]
    if experts % size:
        raise ValueError(
            f"{EXPERT}={size} must divide the experts of {'/'.join(path)}, got {experts} in shape {shape}; choose "
            f"another size of the axis, or {math.ceil(experts / size) * size} experts"
        )
    return EXPERTS


def _pieces(sharding: ParamSharding) -> int:
    assert sharding.pieces is not None, "a layer that declares a dim says how many pieces it has"
    return sharding.pieces


def _refuse(path: LayerPath, shape: tuple[int, ...], size: int, sharding: ParamSharding) -> None:
    padded = math.ceil(_pieces(sharding) / size) * size
    several = f", or be a multiple of it, got {sharding.pieces}" if sharding.or_whole else f", got {sharding.pieces}"
    raise ValueError(
        f"tensor={size} must divide the {sharding.named} of {'/'.join(path)}{several} in shape {shape}; "
        f"choose another size of the axis, or {padded} {sharding.named}"
    )


def _fsdp_dim(shape: tuple[int, ...], size: int) -> int | None:
    """The rows of a matrix, if `size` divides them; else its columns, if it divides these; else None."""
    if size == 1 or len(shape) < 2:
        return None
    return next((dim for dim in (-2, -1) if shape[dim] % size == 0), None)


def _rule_of(path: LayerPath, rules: Rules) -> PartitionSpec | None:
    name = "/".join(path)
    return next((spec for pattern, spec in rules if re.search(pattern, name)), None)


def _by_rule(
    parallel: Parallelism, path: LayerPath, shape: tuple[int, ...], rule: PartitionSpec, sharding: ParamSharding
) -> ParamPlace:
    """Where a param lies by a user's rule."""
    if len(rule) > len(shape):
        raise ValueError(
            f"the rule {rule} of {'/'.join(path)} must not have more dims than the param's shape {shape}; shorten it"
        )
    dims: dict[str, int] = {}
    for number, entry in enumerate(rule):
        for axis in entry if isinstance(entry, tuple) else (entry,) if entry else ():
            if axis not in (TENSOR, FSDP):
                raise ValueError(
                    f"the rule {rule} of {'/'.join(path)} may name {FSDP} and {TENSOR}, got {axis!r}; leave it out"
                )
            dims[axis] = number - len(rule)
    tensor_dim = dims.get(TENSOR) if parallel.size(TENSOR) > 1 else None
    fsdp_dim = dims.get(FSDP) if parallel.storage_axes else None
    is_partial = (sharding.or_whole or sharding.is_shared) and parallel.size(TENSOR) > 1 and tensor_dim is None
    expert_dim = _expert_dim(parallel, path, shape, sharding)
    place = ParamPlace(shape, tensor_dim, fsdp_dim, is_partial, sharding.dtype, parallel.storage_axes, expert_dim)
    _check_is_declared(parallel, path, place, rule, sharding)
    if tensor_dim is not None and tensor_dim == sharding.dim and _pieces(sharding) % parallel.size(TENSOR):
        if sharding.or_whole and parallel.size(TENSOR) % _pieces(sharding) == 0:
            raise ValueError(
                f"a rule must leave {'/'.join(path)} whole over {TENSOR}={parallel.size(TENSOR)}, more devices than "
                f"there are {sharding.named}, got {rule} of {sharding.pieces}; leave {TENSOR} out of it"
            )
        _refuse(path, shape, parallel.size(TENSOR), sharding)
    for elements, axes in zip(shape, place.spec, strict=False):
        parts = math.prod(parallel.size(axis) for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis)
        if elements % parts:
            raise ValueError(
                f"the rule {rule} splits {elements} elements of {'/'.join(path)}, shape {shape}, "
                f"in {parts} parts, which must be equal; change the rule or the mesh"
            )
    return place


def _check_is_declared(
    parallel: Parallelism, path: LayerPath, place: ParamPlace, rule: PartitionSpec, sharding: ParamSharding
) -> None:
    """Raise where a rule splits a dim over `tensor` that the layer has not declared."""
    dims = sorted({dim for dim in (sharding.dim, *sharding.by_rule) if dim is not None})
    if place.tensor_dim not in (None, *dims):
        can = f"can split dim {' or '.join(map(str, dims))}" if dims else "needs all of it on every device"
        raise ValueError(
            f"a rule may split over {TENSOR}={parallel.size(TENSOR)} what a layer of jax_fp8 can split, got {rule} for "
            f"{'/'.join(path)} of shape {place.shape}, whose layer {can}; change the rule"
        )


def _check_biases(placement: Placement, declared: Mapping[LayerPath, ParamSharding]) -> None:
    """Raise where rules split a bias unlike the columns of its kernel."""
    by_path = placement.by_path | {**placement.frozen}
    for path, place in by_path.items():
        kernel = declared.get(path, ParamSharding()).columns_of
        if kernel not in by_path or (place.tensor_dim is None) == (by_path[kernel].tensor_dim != -1):
            continue
        raise ValueError(
            f"a bias must be split over {TENSOR}={placement.parallel.size(TENSOR)} where the columns of its kernel "
            f"are, got {by_path[kernel].spec} for {'/'.join(kernel)} and {place.spec} for {'/'.join(path)}; "
            "let the rules name both, or none"
        )


def _check_tiles(parallel: Parallelism, path: LayerPath, transposed: Fp8Array, dim: int | None) -> None:
    """Raise where a device would have a part of a tile of a frozen kernel, whose scale is of the whole tile."""
    if dim is None or transposed.scale.ndim == 0:
        return
    size, tile = transposed.shape[-3 - dim], transposed.granularity[-3 - dim]
    if size % (parallel.size(TENSOR) * tile):
        raise ValueError(
            f"{'/'.join(path)}: {TENSOR}={parallel.size(TENSOR)} must give each device whole tiles of {tile} of a "
            f"frozen kernel, got {size} to split; choose another mesh, or a recipe with one scale a tensor"
        )


def _place_of(path: tuple, shape: tuple[int, ...], by_path: Mapping[LayerPath, ParamPlace]) -> ParamPlace | None:
    """The place of the param whose names end the path, if it has this shape."""
    names = [name for key in path if (name := getattr(key, "key", None)) is not None]
    for first in range(len(names)):
        place = by_path.get(tuple(names[first:]))
        if place is not None:
            return place if place.shape == tuple(shape) else None
    return None


def _is_place(node: object) -> bool:
    return isinstance(node, ParamPlace)
