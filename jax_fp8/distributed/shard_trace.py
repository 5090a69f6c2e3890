"""Checks of a loss before a step runs it on shards: whether all devices compute the same loss, and which weights can be
cast as shards and gathered in FP8. The loss is traced, and nothing is computed.

    LossTrace, TrainState ─place_state→ Placement
    LossTrace, Placement ─can_be_gathered→ GEMMs ─trace_on_shards→ those whose layers find their weights in a cache
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.paths import LayerPath, is_of_experts, kernel_paths, names_of
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import listing
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.grads.loss_trace import LossTrace, checked, shapes_of
from jax_fp8.jaxprs.replication import which_differ
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.mesh import TENSOR, Parallelism, describe_mesh
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.placement import Placement, place_params
from jax_fp8.parallel.tiles import check_sequence
from jax_fp8.parallel.transfers import can_be_gathered_in_fp8, cuts_squares
from jax_fp8.state.train_state import TrainState


def place_state(parallel: Parallelism, state: TrainState, trace: LossTrace) -> Placement:
    """Where the params of a state lie on a mesh; raises where its loss or its weight cache do not allow that."""
    placement = place_params(parallel, state.params, trace.declared, state.collections.get(FROZEN, {}))
    if parallel.sequence_parallel:
        check_sequence(trace.gemms.values())
        check_rows_are_split(trace, placement)
    if state.cache and placement.splits_params:
        raise ValueError(
            "a state that carries a weight cache must have whole params on every device, "
            f"got a step on {describe_mesh(parallel.mesh)}; leave fp8_cache out of the variables: "
            "the step casts each shard once, and gathers it in FP8"
        )
    return placement


def check_rows_are_split(trace: LossTrace, placement: Placement) -> None:
    """Raise unless rows are split from the embedding on. The gradient of a param is a sum over `tensor` only where each
    device has its own rows.
    """
    if not any(sharding.splits_rows for sharding in trace.declared.values()):
        raise ValueError(
            "sequence parallelism needs a model whose embedding splits rows, as fp8.GPT's does, got a loss without "
            "one; leave sequence_parallel out"
        )
    unknown = ["/".join(path) for path in placement.by_path if path not in trace.declared]
    if unknown:
        raise ValueError(
            "sequence parallelism must know whether a layer has the rows of all devices, and knows it of fp8.GPT "
            f"alone, got also the param {unknown[0]}; leave sequence_parallel out, or this param"
        )


def can_be_gathered(placement: Placement, trace: LossTrace, fp8_state: PyTree) -> dict[LayerPath, Recipe]:
    """The GEMMs whose weights can be cast as shards and gathered in FP8, with their recipes: all of their kernels lie
    alike, and the loss passes the params to them unchanged. Other kernels are gathered in their own dtype, and the
    layer casts them. A pipeline's stages exchange these weights in FP8, also where a kernel cannot be split. Experts
    are left out: a device's rows of a stack of experts are not adjacent in the whole stack.
    """
    places, parallel = placement.by_path, placement.parallel
    if parallel.stages == 1 and all(place.fsdp_dim is None for place in places.values()):
        return {}
    gemms = {
        gemm: recipe
        for gemm, recipe in trace.gemms_of(places, fp8_state).items()
        if not is_of_experts(gemm)
        and can_be_gathered_in_fp8([places[kernel] for kernel in kernel_paths(gemm)])
        and not {*kernel_paths(gemm)} & {*trace.changed}
    }
    cut = {
        gemm
        for gemm, recipe in gemms.items()
        if cuts_squares(parallel, [places[kernel] for kernel in kernel_paths(gemm)], recipe)
    }
    if cut:
        warnings.warn(
            "each device must have whole tiles of a kernel, or it is gathered in its own dtype, and not in FP8: "
            f"{describe_mesh(parallel.mesh)} cuts those of {', '.join('/'.join(gemm) for gemm in sorted(cut))}; "
            "make kernels larger or the mesh smaller, or take a recipe with one scale a tensor",
            stacklevel=2,
        )
    return {gemm: recipe for gemm, recipe in gemms.items() if gemm not in cut}


def trace_on_shards(
    placement: Placement,
    loss_fn: Callable,
    variables: Variables,
    batch: Batch,
    in_fp8: Mapping[LayerPath, Recipe],
    has_aux: bool = False,
) -> dict[LayerPath, Recipe]:
    """The GEMMs among `in_fp8` that find their weights in a cache. The loss is traced as each device computes it.
    Raises unless all devices of `tensor` have the same loss, and the same aux.
    """
    parallel = placement.parallel
    if parallel.tensor is None and not in_fp8:
        return {}
    cached: list[LayerPath] = []

    def local_loss(variables: Variables, batch: Batch) -> PyTree:
        with placement.shards.active(), listing() as gemms:
            cache = cast_gemms(variables["params"], {}, in_fp8)
            loss = checked(loss_fn, has_aux)({**variables, "fp8_cache": cache} if cache else variables, batch)
        cached.extend(path for path, gemm in gemms.items() if gemm.is_cached)
        return loss

    def own_rows(x: ArrayLike) -> jax.ShapeDtypeStruct:
        rows = [size // parallel.batch_parts for size in jnp.shape(x)[:1]]
        return jax.ShapeDtypeStruct((*rows, *jnp.shape(x)[1:]), jnp.result_type(x))

    def own_part(param: jax.Array, place: ParamPlace) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(place.shape_in_layer(parallel), param.dtype)

    shapes = shapes_of(variables)
    shapes["params"] = jax.tree.map(own_part, variables["params"], placement.places)
    if FROZEN in shapes:
        shapes[FROZEN] = jax.tree.map(_own_shape, shapes[FROZEN], placement.shardings_of_frozen(shapes[FROZEN]))
    own = shapes, jax.tree.map(own_rows, batch)
    # The shapes are those of one device already, so this shard_map splits nothing.
    on_device = jax.shard_map(
        local_loss, mesh=parallel.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    program = jax.make_jaxpr(on_device)(*own)
    check_is_whole(placement, program.jaxpr, own, has_aux)
    return found_in_cache(in_fp8, cached)


def check_is_whole(placement: Placement, jaxpr: Jaxpr, args: Sequence[PyTree], has_aux: bool) -> None:
    """Raise unless all devices of `tensor` have the same loss, and the same aux.

    Args:
      jaxpr: that of the loss as a device computes it.
      args: the arguments of the loss: the variables of a device first.
    """
    parallel = placement.parallel
    if parallel.tensor is not None and any(which_differ(jaxpr, TENSOR, _are_split(placement, args))):
        raise ValueError(
            f"the loss{' and its aux' if has_aux else ''} must be the same on all devices of "
            f"{TENSOR}={parallel.size(TENSOR)}, got one of what is split over "
            'them; after a layer with tensor_split="columns" put one with "rows", and let nothing but its layer read a '
            "param that is split"
        )


def _own_shape(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(shape.shape), shape.dtype)


def found_in_cache(in_fp8: Mapping[LayerPath, Recipe], cached: Collection[LayerPath]) -> dict[LayerPath, Recipe]:
    """The GEMMs among `in_fp8` whose layers have found their weights in a cache; warns of the others."""
    blind = ["/".join(gemm) for gemm in in_fp8 if gemm not in cached]
    if blind:
        warnings.warn(
            "layers must see the weight cache, or fsdp gathers their kernels in their own dtype, and not in FP8: "
            f"{', '.join(blind)} do not; give nn.scan or nn.vmap 'fp8_cache' the axis of 'params'",
            stacklevel=2,
        )
    return {gemm: recipe for gemm, recipe in in_fp8.items() if gemm in cached}


def _are_split(placement: Placement, args: Sequence[PyTree]) -> list[bool]:
    """Whether `tensor` splits each leaf of the loss's arguments: params, and weights in FP8."""
    split = {path for path, place in placement.by_path.items() if place.tensor_dim is not None}
    frozen = placement.shardings_of_frozen(args[0].get(FROZEN, {}))
    split_of_frozen = {path for path, own in jax.tree_util.tree_leaves_with_path(frozen) if any(own.spec)}

    def is_split(path: tuple) -> bool:
        argument, names = path[0].idx, names_of(path[1:])
        if argument != 0 or names[0] not in ("params", "fp8_cache", FROZEN):
            return False
        if names[0] == "params":
            return names[1:] in split
        if names[0] == FROZEN:
            return path[2:] in split_of_frozen
        return "kernel" in names and not split.isdisjoint(kernel_paths(names[1 : names.index("kernel")]))

    return [is_split(path) for path, _ in jax.tree_util.tree_leaves_with_path(tuple(args))]
