"""What is to be known of a loss before a step runs it on shards: whether all devices have one loss, and which weights
can be cast where they lie and gathered in FP8. Nothing is computed.

    LossTrace, Placement ─can_be_gathered→ GEMMs ─trace_on_shards→ those whose layers find their weights in a cache
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8.core.paths import LayerPath, is_of_experts, kernel_paths, names_of
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import listing
from jax_fp8.grads.loss_trace import LossTrace, checked, shapes_of
from jax_fp8.jaxprs.replication import which_differ
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.mesh import TENSOR, describe_mesh
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.transfers import can_be_gathered_in_fp8, cuts_squares


def check_rows_are_split(trace: LossTrace, placement: Placement) -> None:
    """Raise unless rows are split from the embedding on: the gradient of a param is a sum over `tensor` only where each
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


def can_be_gathered(placement: Placement, trace: LossTrace, fp8_state: Mapping) -> dict[LayerPath, Recipe]:
    """The GEMMs whose weights can be cast where they lie and gathered in FP8, and their recipes: all of their kernels
    lie alike, and are params as they are. Others are gathered as they are, and cast by the layer. In a pipeline, these
    are all that stages exchange in FP8, also where a kernel cannot be split. A device's rows of experts are not beside
    each other in the whole.
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
            "each device must have whole tiles of a kernel, or it is gathered as it is, and not in FP8: "
            f"{describe_mesh(parallel.mesh)} cuts those of {', '.join('/'.join(gemm) for gemm in sorted(cut))}; "
            "make kernels larger or the mesh smaller, or take a recipe with one scale a tensor",
            stacklevel=2,
        )
    return {gemm: recipe for gemm, recipe in gemms.items() if gemm not in cut}


def trace_on_shards(
    placement: Placement,
    loss_fn: Callable,
    variables: Mapping,
    batch: Any,
    in_fp8: Mapping[LayerPath, Recipe],
    has_aux: bool = False,
) -> dict[LayerPath, Recipe]:
    """Those of the GEMMs `in_fp8` that find their weights in a cache. The loss is traced as each device computes it;
    raises unless all devices of `tensor` have one loss, and one aux.
    """
    parallel = placement.parallel
    if parallel.tensor is None and not in_fp8:
        return {}
    cached: list[LayerPath] = []

    def local_loss(variables: Mapping, batch: Any) -> Any:
        with placement.shards.active(), listing() as gemms:
            cache = cast_gemms(variables["params"], {}, in_fp8)
            loss = checked(loss_fn, has_aux)({**variables, "fp8_cache": cache} if cache else variables, batch)
        cached.extend(path for path, gemm in gemms.items() if gemm.is_cached)
        return loss

    def own_rows(x: Any) -> jax.ShapeDtypeStruct:
        rows = [size // parallel.batch_parts for size in jnp.shape(x)[:1]]
        return jax.ShapeDtypeStruct((*rows, *jnp.shape(x)[1:]), jnp.result_type(x))

    def own_part(param: Any, place: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(place.shape_without_fsdp(parallel.size(TENSOR)), param.dtype)

    params = jax.tree.map(own_part, variables["params"], placement.places)
    own = {**shapes_of(variables), "params": params}, jax.tree.map(own_rows, batch)
    # To this shard_map all arrays are whole: they are shapes alone, and already those of a device.
    on_device = jax.shard_map(
        local_loss, mesh=parallel.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    program = jax.make_jaxpr(on_device)(*own)
    check_is_whole(placement, program.jaxpr, own, has_aux)
    return found_in_cache(in_fp8, cached)


def check_is_whole(placement: Placement, jaxpr: Any, args: Sequence[Any], has_aux: bool) -> None:
    """Raise unless all devices of `tensor` have one loss, and one aux.

    Args:
      jaxpr: of the loss as a device computes it.
      args: what it takes: the variables of a device first.
    """
    parallel = placement.parallel
    if parallel.tensor is not None and any(which_differ(jaxpr, TENSOR, _are_split(placement, args))):
        raise ValueError(
            f"the loss{' and its aux' if has_aux else ''} must be the same on all devices of "
            f"{TENSOR}={parallel.size(TENSOR)}, got one of what is split over "
            'them; after a layer with tensor_split="columns" put one with "rows", and let nothing but its layer read a '
            "param that is split"
        )


def found_in_cache(in_fp8: Mapping[LayerPath, Recipe], cached: Collection[LayerPath]) -> dict[LayerPath, Recipe]:
    """Those of the GEMMs whose layers have found their weights in a cache; warns of others."""
    blind = ["/".join(gemm) for gemm in in_fp8 if gemm not in cached]
    if blind:
        warnings.warn(
            "layers must see the weight cache, or fsdp gathers their kernels as they are, and not in FP8: "
            f"{', '.join(blind)} do not; give nn.scan or nn.vmap 'fp8_cache' the axis of 'params'",
            stacklevel=2,
        )
    return {gemm: recipe for gemm, recipe in in_fp8.items() if gemm in cached}


def _are_split(placement: Placement, args: Sequence[Any]) -> list[bool]:
    """Whether each leaf of what a device's loss takes is a part over `tensor`: of params, and of weights in FP8."""
    split = {path for path, place in placement.by_path.items() if place.tensor_dim is not None}

    def is_split(path: tuple) -> bool:
        argument, names = path[0].idx, names_of(path[1:])
        if argument != 0 or names[0] not in ("params", "fp8_cache"):
            return False
        if names[0] == "params":
            return names[1:] in split
        return "kernel" in names and not split.isdisjoint(kernel_paths(names[1 : names.index("kernel")]))

    return [is_split(path) for path, _ in jax.tree_util.tree_leaves_with_path(tuple(args))]
