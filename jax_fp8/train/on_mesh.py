"""A pass on every device of a mesh: one program in one `shard_map`, in which each device runs the model on its part of
the batch and of the params.

    shards of params ─cast, gather→ a state as of one device ─loss, backward→ gradients ─reduce→ those of the shards

What runs inside is the pass of one device. Layers know from `core/shards.py` how they are split; all else that moves
between devices is in `parallel/transfers.py`. The loss is that of the device's part, divided by the number of parts: so
output gradients are those of the mean over all, and amaxes, too.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.paths import LayerPath, at_path, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import listing
from jax_fp8.core.shards import TensorDim, offers
from jax_fp8.parallel.agreement import which_differ
from jax_fp8.parallel.mesh import TENSOR, Parallelism, describe_mesh
from jax_fp8.parallel.placement import Placement, place_params, put
from jax_fp8.parallel.transfers import (
    can_be_gathered_in_fp8,
    gather_params,
    gather_weight,
    reduce_gradients,
    whole_amaxes,
    whole_loss,
)
from jax_fp8.train.checks import check_loss
from jax_fp8.train.train_state import TrainState
from jax_fp8.train.weight_cache import cast_gemms

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Layers:
    """What layers say when they are traced as on one device: how their params may be split, and which GEMMs are in
    FP8, and which of these found their weights in a cache.
    """

    offers: dict[LayerPath, TensorDim]
    gemms: tuple[LayerPath, ...]
    cached: tuple[LayerPath, ...] = ()

    @classmethod
    def of(cls, function: Callable, *args: Any) -> "Layers":
        with offers() as found, listing() as gemms:
            jax.eval_shape(
                lambda *given: function(*given), *_shapes(args)
            )  # a new function, or jax need not trace it again
        in_fp8 = {kernel for gemm in gemms for kernel in kernel_paths(gemm)}
        # An FP8 kernel is cast from what it is; the dtype of its layer is that of results.
        of_params = {path: replace(of, dtype=None) if path in in_fp8 else of for path, of in found.items()}
        return cls(of_params, tuple(gemms), tuple(gemm for gemm, is_cached in gemms.items() if is_cached))

    def gemms_of(self, places: Mapping[LayerPath, Any]) -> tuple[LayerPath, ...]:
        """Those whose kernels are among the params by this path: a loss may apply a model to a part of the variables,
        and then its layers know other paths.
        """
        return tuple(gemm for gemm in self.gemms if all(kernel in places for kernel in kernel_paths(gemm)))


@dataclass(frozen=True)
class OnMesh:
    """A state on a mesh.

    Args:
      gemms: all in FP8.
      in_fp8: those whose weights are cast where they lie and gathered in FP8.
      once: weights are gathered once a step, and not once a microbatch.
    """

    placement: Placement
    loss_fn: Callable
    recipe: Recipe | None
    gemms: tuple[LayerPath, ...]
    in_fp8: tuple[LayerPath, ...]
    once: bool

    @classmethod
    def of(
        cls,
        how: Parallelism,
        loss_fn: Callable,
        recipe: Recipe | None,
        once: bool,
        microbatches: int,
        state: TrainState,
        batch: Any,
    ) -> "OnMesh":
        how.check_rows(batch, microbatches)
        layers = Layers.of(loss_fn, state.variables, batch)
        placement = place_params(how, state.params, layers.offers)
        if how.sequence:
            _check_rows_are_split(layers, placement)
        if state.cache and placement.splits_params:
            raise ValueError(
                "a state that carries a weight cache must have whole params on every device, "
                f"got a step on {describe_mesh(how.mesh)}; leave fp8_cache out of the variables: "
                "the step casts each shard once, and gathers it in FP8"
            )
        check_loss_is_whole(placement, loss_fn, state.variables, batch, microbatches)
        in_fp8 = gathered_in_fp8(placement, layers, loss_fn, recipe, state.variables, batch)
        return cls(placement, loss_fn, recipe, layers.gemms_of(placement.by_path), in_fp8, once)

    def gradients(self, local: Callable, state: TrainState, batch: Any) -> tuple[jax.Array, Any, jax.Array]:
        """Loss, gradients and amaxes of all devices, where each has `local(loss_fn, state_of, batch, gemms)`."""
        how = self.placement.how

        def finish(params, loss, gradients, amaxes):
            return whole_loss(how, loss), reduce_gradients(self.placement, gradients, params), whole_amaxes(how, amaxes)

        return self._run(local, finish, (WHOLE, self.placement.specs, WHOLE), state, batch, from_current=False)

    def first_amaxes(self, local: Callable, state: TrainState, batch: Any) -> jax.Array:
        """The amaxes of all devices; every tensor is scaled by its own."""

        def finish(_, amaxes):
            return whole_amaxes(self.placement.how, amaxes)

        return self._run(lambda *args: (local(*args),), finish, WHOLE, state, batch, from_current=True)

    def _run(self, local, finish, out_specs, state, batch, from_current) -> Any:
        how = self.placement.how

        def on_device(step, params, fp8, cache, batch):
            with self.placement.shards.active():
                state_of = partial(self._own_state, TrainState(step, params, fp8, None, cache), from_current)
                if self.once:
                    made = state_of()
                    state_of = lambda: made  # noqa: E731
                results = local(self._share, state_of, batch, self._stateless)
            return finish(params, *results)

        batch_specs = jax.tree.map(lambda x: how.batch_spec if jnp.ndim(x) else WHOLE, batch)
        specs = WHOLE, self.placement.specs, WHOLE, WHOLE, batch_specs
        on_all = jax.shard_map(on_device, mesh=how.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        batch = put(batch, jax.tree.map(partial(NamedSharding, how.mesh), batch_specs))
        state = self.constrain(state)
        return on_all(state.step, state.params, state.fp8, state.cache, batch)

    def constrain(self, state: TrainState) -> TrainState:
        """The state where it belongs."""
        return put(state, self.placement.shardings(state))

    @property
    def _stateless(self) -> list[LayerPath]:
        """The GEMMs of which no state says that they are in FP8."""
        return [] if self.recipe is None or self.recipe.has_state else list(self.gemms)

    def _share(self, variables, batch):
        """The device's share of the mean over all parts."""
        loss, parts = self.loss_fn(variables, batch), self.placement.how.batch_parts
        return loss if parts == 1 else loss / parts

    def _own_state(self, shards: TrainState, from_current: bool) -> TrainState:
        """What a device computes with."""
        cache = shards.cache
        if self.in_fp8:
            places, scales = self.placement.by_path, {} if from_current else shards.fp8
            kernels = {gemm: [places[kernel] for kernel in kernel_paths(gemm)] for gemm in self.in_fp8}
            gather = {gemm: partial(gather_weight, of) for gemm, of in kernels.items()}
            cache = cast_gemms(shards.params, scales, self.recipe, gather)
        not_gathered = [kernel for gemm in self.in_fp8 for kernel in kernel_paths(gemm)]
        return replace(shards, params=gather_params(self.placement, shards.params, not_gathered), cache=cache)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _check_rows_are_split(layers, placement):
    """Raise unless rows are split from the embedding on: the gradient of a param is a sum over `tensor` only where each
    device has its own rows.
    """
    if not any(offer.splits_rows for offer in layers.offers.values()):
        raise ValueError(
            "sequence parallelism needs a model whose embedding splits rows, as fp8.GPT's does, got a loss without "
            "one; leave sequence_parallel out"
        )
    unknown = ["/".join(path) for path in placement.by_path if path not in layers.offers]
    if unknown:
        raise ValueError(
            "sequence parallelism must know whether a layer has the rows of all devices, and knows it of fp8.GPT "
            f"alone, got also the param {unknown[0]}; leave sequence_parallel out, or this param"
        )


def check_loss_is_whole(
    placement: Placement, loss_fn: Callable, variables: Mapping, batch: Any, microbatches: int
) -> None:
    """Raise unless all devices of `tensor` have one loss; it is traced as each of them computes it."""
    how, parts = placement.how, placement.how.batch_parts * microbatches
    if how.tensor is None:
        return

    def local_loss(variables, batch):
        with placement.shards.active():
            loss = loss_fn(variables, batch)
        check_loss(loss, has_aux=False)
        return loss

    def own_rows(x):
        rows = [size // parts for size in jnp.shape(x)[:1]]
        return jax.ShapeDtypeStruct((*rows, *jnp.shape(x)[1:]), jnp.result_type(x))

    def own_part(param, place):
        return jax.ShapeDtypeStruct(place.shape_without_fsdp(how.size(TENSOR)), param.dtype)

    params = jax.tree.map(own_part, variables["params"], placement.places)
    own = {**_shapes(variables), "params": params}, jax.tree.map(own_rows, batch)
    is_split = jax.tree.map(lambda _, place: place.tensor_dim is not None, params, placement.places)
    of_all = jax.tree.map(lambda _: False, own)
    operands = jax.tree.leaves(({**of_all[0], "params": is_split}, of_all[1]))
    # To this shard_map all arrays are whole: they are shapes alone, and already those of a device.
    on_device = jax.shard_map(local_loss, mesh=how.mesh, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)
    traced = jax.make_jaxpr(on_device)(*own)
    if any(which_differ(traced.jaxpr, TENSOR, operands)):
        raise ValueError(
            f"the loss must be the same on all devices of {TENSOR}={how.size(TENSOR)}, got one of what is split over "
            'them; after a layer with tensor_split="columns" put one with "rows", and let nothing but its layer read a '
            "param that is split"
        )


def gathered_in_fp8(
    placement: Placement, layers: Layers, loss_fn: Callable, recipe: Recipe | None, variables: Mapping, batch: Any
) -> tuple[LayerPath, ...]:
    """The GEMMs whose weights can be cast where they lie and gathered in FP8: all of their kernels lie alike, the
    recipe of the step is that of the layer, and the layer finds a weight in the cache. Others are gathered as they are,
    and cast by the layer.
    """
    places = placement.by_path
    if recipe is None or all(place.fsdp_dim is None for place in places.values()):
        return ()
    # A layer without state in a step with delayed scaling has another recipe.
    known = [
        gemm for gemm in layers.gemms_of(places) if not recipe.has_state or at_path(variables["fp8"], gemm) is not None
    ]
    gemms = [gemm for gemm in known if can_be_gathered_in_fp8([places[kernel] for kernel in kernel_paths(gemm)])]
    if not gemms:
        return ()

    def with_cache(variables, batch):
        cache = cast_gemms(variables["params"], {}, recipe, dict.fromkeys(gemms))
        return loss_fn({**variables, "fp8_cache": cache}, batch)

    found = Layers.of(with_cache, variables, batch).cached
    blind = ["/".join(gemm) for gemm in gemms if gemm not in found]
    if blind:
        warnings.warn(
            "layers must see the weight cache, or fsdp gathers their kernels as they are, and not in FP8: "
            f"{', '.join(blind)} do not; give nn.scan or nn.vmap 'fp8_cache' the axis of 'params'",
            stacklevel=2,
        )
    return tuple(gemm for gemm in gemms if gemm in found)
