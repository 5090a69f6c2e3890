"""The checks of a pipeline: of the loss when the step is made, and of the layers when they are traced.

All stages run one program. So layers on different stages may differ in their variables, and in nothing else.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from jax_fp8.core.checks import describe
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.placement import Placement
from jax_fp8.parallel.stages import Stages
from jax_fp8.state.train_state import TrainState


def check_pipeline(
    parallel: Parallelism, loss_fn: Callable, microbatches: int, cache_weights: bool, has_aux: bool = False
) -> None:
    """Raise unless there is a pipeline for this loss."""
    if has_aux:
        raise ValueError(
            "a pipeline computes its loss in pieces, which return no aux, got has_aux=True with a mesh that has the "
            "axis pipe; leave out one of them"
        )
    if not isinstance(loss_fn, LayeredLoss):
        raise ValueError(
            "a pipeline needs the layers of a loss, a LayeredLoss as next_token_loss(GPT(...)) returns it, "
            f"got {describe(loss_fn)}; make one, or leave out the axis pipe"
        )
    twice = [name for number, name in enumerate(loss_fn.layers) if name in loss_fn.layers[:number]]
    if twice:
        raise ValueError(
            f"the layers of a pipeline must be different ones, got {twice[0]!r} twice among {loss_fn.layers}; "
            "give each its own params, or leave out the axis pipe"
        )
    parallel.schedule_of(microbatches)  # raises where there is none
    Stages(loss_fn.layers, parallel.stages, parallel.num_chunks)
    if not cache_weights:
        raise ValueError(
            "a pipeline casts its weights once a step, got cache_weights=False; leave it out, or the axis pipe"
        )


def check_has_no_collections(state: TrainState) -> None:
    """Raise where a model has variables that stages do not pass on."""
    if state.collections:
        raise ValueError(
            "a pipeline carries the params and the FP8 state of a model, got a state with the collections "
            f"{sorted(state.collections)}; normalize without batch statistics, or leave out the axis pipe"
        )


def check_first(first: Collection[LayerPath], gemms: Mapping[LayerPath, Recipe]) -> None:
    """Raise where a GEMM before the layers has FP8 state, for a pipeline does not record its amaxes."""
    with_state = ["/".join(gemm) for gemm in first if gemms[gemm].has_state]
    if with_state:
        raise ValueError(
            "a pipeline records no amaxes of what comes before its layers, so no GEMM there may have FP8 state, "
            f"got {with_state[0]} with delayed scaling; give it CurrentScaling() or None, or make it a part of a layer"
        )


def check_states(layers: Sequence[str], gemms: Collection[LayerPath], fp8_state: Mapping) -> None:
    """Raise where a layer has FP8 state that belongs to no GEMM with kernels: stages record amaxes only for those."""
    paths: list[LayerPath] = []
    map_gemms_with_path(lambda path, _: paths.append(path), fp8_state)
    unknown = [path for path in paths if path[0] in layers and path not in gemms and not kernel_paths(path)]
    if unknown:
        raise ValueError(
            "the FP8 state of a layer of a pipeline must be that of GEMMs by its own kernels, got "
            f"{'/'.join(unknown[0])}; attend with fp8_attention=False, multiply by params, or leave out the axis pipe"
        )


def check_layers(
    stages: Stages,
    kinds: Mapping[str, str],
    placement: Placement,
    gemms: Mapping[LayerPath, Recipe],
    in_fp8: Mapping[LayerPath, Recipe],
) -> None:
    """Raise unless one program can run the layers of all stages.

    Args:
      kinds: for each layer the first one that computes the same.
      gemms: all GEMMs in FP8; `in_fp8` are those whose weights are cast once.
    """
    _check_are_alike(stages.layers, placement, gemms, in_fp8)
    for chunk in range(stages.chunks):
        for number in range(stages.chunk_size):
            _check_compute_alike(stages.at(chunk, number), kinds)
    for gemm in gemms:
        dims = len(placement.by_path[kernel_paths(gemm)[0]].shape)
        if gemm[0] in stages.layers and dims != 2:  # stages exchange weights, and record amaxes, of one kernel
            raise ValueError(
                "a GEMM in a layer of a pipeline must have kernels of two dims, not stacked by nn.scan or nn.vmap, "
                f"got {'/'.join(gemm)} with {dims} dims; let each of them be a layer of the loss, or write them out"
            )


def _check_are_alike(layers: Sequence[str], placement: Placement, *recipes: Mapping[LayerPath, Recipe]) -> None:
    """Raise unless all layers have the same params in the same places, in FP8 by the same recipes."""
    described: dict[str, list[dict]] = {name: [{} for _ in (placement, *recipes)] for name in layers}
    for number, by_path in enumerate((placement.by_path, *recipes)):
        for path, value in by_path.items():
            if path[0] in described:
                described[path[0]][number][path[1:]] = value
    first, *others = layers
    for name in others:
        if described[name] != described[first]:
            raise ValueError(
                "the layers of a pipeline must be alike, with params of the same shapes, places and recipes, "
                f"got {name} unlike {first}; make them alike, or leave out the axis pipe"
            )


def _check_compute_alike(layers: Sequence[str], kinds: Mapping[str, str]) -> None:
    """Raise unless these layers, which have the same number on their stages, compute the same."""
    first, *others = layers
    for name in others:
        if kinds[name] != kinds[first]:
            raise ValueError(
                "all stages of a pipeline run the program of stage 0, so layers with the same number on their stages "
                f"must compute the same, got {name} unlike {first}; let no layer compute by its name or number, or "
                "leave out the axis pipe"
            )


def check_is_on_device(kept: list[jax.Array]) -> None:
    """Raise where a layer's forward puts what it keeps in the host's memory: slots are on the device."""
    if any(jax.typeof(array).memory_space == jax.memory.Space.Host for array in kept):
        raise ValueError(
            "the layers of a pipeline must keep what their backward needs on the device, got one that keeps some of it "
            "on the host; take another remat than offload, or leave out the axis pipe"
        )
