"""What the layers of a loss say before it runs on a mesh: it is traced, as on one device or as one of many, and nothing
is computed.

    loss ─traced→ how params may be split, which GEMMs are in FP8 by which recipe
                  which of their weights can be gathered in FP8; whether all devices have one loss
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import listing
from jax_fp8.core.shards import ParamSharding, declared_shardings
from jax_fp8.ops.weights import cast_gemms
from jax_fp8.parallel.agreement import which_differ
from jax_fp8.parallel.mesh import TENSOR, describe_mesh
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.transfers import can_be_gathered_in_fp8, cuts_squares
from jax_fp8.train.checks import ALONE, ALONE_OR_PAIR, check_loss


@dataclass(frozen=True)
class Layers:
    """What layers say when they are traced as on one device: how their params may be split, which GEMMs are in FP8 by
    which recipe, and which of these found their weights in a cache.
    """

    declared: dict[LayerPath, ParamSharding]
    gemms: dict[LayerPath, Recipe]
    cached: tuple[LayerPath, ...] = ()

    @classmethod
    def of(cls, function: Callable, *args: Any) -> "Layers":
        with declared_shardings() as found, listing() as gemms:
            jax.eval_shape(
                lambda *given: function(*given), *_shapes(args)
            )  # a new function, or jax need not trace it again
        in_fp8 = {kernel for gemm in gemms for kernel in kernel_paths(gemm)}
        # An FP8 kernel is cast from what it is; the dtype of its layer is that of results.
        of_params = {path: replace(of, dtype=None) if path in in_fp8 else of for path, of in found.items()}
        recipes = {path: gemm.recipe for path, gemm in gemms.items()}
        return cls(of_params, recipes, tuple(path for path, gemm in gemms.items() if gemm.is_cached))

    def gemms_of(self, places: Mapping[LayerPath, Any], fp8_state: Mapping) -> dict[LayerPath, Recipe]:
        """Those whose kernels are among the params by this path, and their scales in the state: a loss may apply a
        model to a part of the variables, and then its layers know other paths.
        """
        return {
            gemm: recipe
            for gemm, recipe in self.gemms.items()
            if kernel_paths(gemm)
            and all(kernel in places for kernel in kernel_paths(gemm))
            and (not recipe.has_state or at_path(fp8_state, gemm))
        }


def check_rows_are_split(layers, placement):
    """Raise unless rows are split from the embedding on: the gradient of a param is a sum over `tensor` only where each
    device has its own rows.
    """
    if not any(sharding.splits_rows for sharding in layers.declared.values()):
        raise ValueError(
            "sequence parallelism needs a model whose embedding splits rows, as fp8.GPT's does, got a loss without "
            "one; leave sequence_parallel out"
        )
    unknown = ["/".join(path) for path in placement.by_path if path not in layers.declared]
    if unknown:
        raise ValueError(
            "sequence parallelism must know whether a layer has the rows of all devices, and knows it of fp8.GPT "
            f"alone, got also the param {unknown[0]}; leave sequence_parallel out, or this param"
        )


def check_loss_is_whole(
    placement: Placement, loss_fn: Callable, variables: Mapping, batch: Any, has_aux: bool = False
) -> None:
    """Raise unless all devices of `tensor` have one loss, and one aux; it is traced as each of them computes it."""
    parallel = placement.parallel
    if parallel.tensor is None:
        return

    def local_loss(variables, batch):
        with placement.shards.active():
            loss = loss_fn(variables, batch)
        check_loss(loss, has_aux, ALONE if isinstance(loss_fn, LayeredLoss) else ALONE_OR_PAIR)
        return loss

    def own_rows(x):
        rows = [size // parallel.batch_parts for size in jnp.shape(x)[:1]]
        return jax.ShapeDtypeStruct((*rows, *jnp.shape(x)[1:]), jnp.result_type(x))

    def own_part(param, place):
        return jax.ShapeDtypeStruct(place.shape_without_fsdp(parallel.size(TENSOR)), param.dtype)

    params = jax.tree.map(own_part, variables["params"], placement.places)
    own = {**_shapes(variables), "params": params}, jax.tree.map(own_rows, batch)
    is_split = jax.tree.map(lambda _, place: place.tensor_dim is not None, params, placement.places)
    of_all = jax.tree.map(lambda _: False, own)
    operands = jax.tree.leaves(({**of_all[0], "params": is_split}, of_all[1]))
    # To this shard_map all arrays are whole: they are shapes alone, and already those of a device.
    on_device = jax.shard_map(
        local_loss, mesh=parallel.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    traced = jax.make_jaxpr(on_device)(*own)
    if any(which_differ(traced.jaxpr, TENSOR, operands)):
        raise ValueError(
            f"the loss{' and its aux' if has_aux else ''} must be the same on all devices of "
            f"{TENSOR}={parallel.size(TENSOR)}, got one of what is split over "
            'them; after a layer with tensor_split="columns" put one with "rows", and let nothing but its layer read a '
            "param that is split"
        )


def gathered_in_fp8(
    placement: Placement, layers: Layers, loss_fn: Callable, variables: Mapping, batch: Any
) -> dict[LayerPath, Recipe]:
    """The GEMMs whose weights can be cast where they lie and gathered in FP8, and their recipes: all of their kernels
    lie alike, and the layer finds a weight in the cache. Others are gathered as they are, and cast by the layer. In a
    pipeline, these are all that stages exchange in FP8, also where a kernel cannot be split. A device's rows of
    experts are not beside each other in the whole.
    """
    places = placement.by_path
    if placement.parallel.stages == 1 and all(place.fsdp_dim is None for place in places.values()):
        return {}
    gemms = {
        gemm: recipe
        for gemm, recipe in layers.gemms_of(places, variables.get("fp8", {})).items()
        if not is_of_experts(gemm) and can_be_gathered_in_fp8([places[kernel] for kernel in kernel_paths(gemm)])
    }
    cut = {
        gemm
        for gemm, recipe in gemms.items()
        if cuts_squares(placement.parallel, [places[kernel] for kernel in kernel_paths(gemm)], recipe)
    }
    if cut:
        warnings.warn(
            "each device must have whole tiles of a kernel, or it is gathered as it is, and not in FP8: "
            f"{describe_mesh(placement.parallel.mesh)} cuts those of "
            f"{', '.join('/'.join(gemm) for gemm in sorted(cut))}; "
            "make kernels larger or the mesh smaller, or take a recipe with one scale a tensor",
            stacklevel=2,
        )
    gemms = {gemm: recipe for gemm, recipe in gemms.items() if gemm not in cut}
    if not gemms:
        return {}

    def with_cache(variables, batch):
        cache = cast_gemms(variables["params"], {}, gemms)
        return loss_fn({**variables, "fp8_cache": cache}, batch)

    found = Layers.of(with_cache, variables, batch).cached
    blind = ["/".join(gemm) for gemm in gemms if gemm not in found]
    if blind:
        warnings.warn(
            "layers must see the weight cache, or fsdp gathers their kernels as they are, and not in FP8: "
            f"{', '.join(blind)} do not; give nn.scan or nn.vmap 'fp8_cache' the axis of 'params'",
            stacklevel=2,
        )
    return {gemm: recipe for gemm, recipe in gemms.items() if gemm in found}


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)
