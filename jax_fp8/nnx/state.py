"""The FP8 state of an NNX model: two variables per GEMM, and what they are called in one nested dict.

    model.mlp.up.fp8.{scale, amax_history}, Fp8State ─fp8_state→ {"mlp": {"up": {"scale", "amax_history"}}}

The dict is what the collection "fp8" is to a Linen model, so all that knows such a collection knows an NNX model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax import lax

from jax_fp8.core.batching import shared_amaxes
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.paths import LayerPath, at_path, check_gemm_path, check_layer_name, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import RECORDER, register_gemm
from jax_fp8.core.state import stage
from jax_fp8.kernels.quantize import as_tuple
from jax_fp8.kernels.update_state import update_state as update_collection
from jax_fp8.ops.layer_gemm import first_state, layer_gemm
from jax_fp8.ops.parameters import LinearParameters

OWN_NAME = "fp8"  # the attribute of a layer that holds its GEMMs


class Fp8State(nnx.Variable):
    """A scale f32[..., 3] or an amax history f32[..., 3, L]: rows are input, kernel and output gradient."""


class GemmState(nnx.Module):
    """The state of one GEMM.

    Variables under a recipe with state: `scale` f32[3] and `amax_history` f32[3, L], with leading dims where layers are
    stacked. While gradients are taken there is `recorder`, too, and while weights are cached `weight`; both are put
    there by `attach`, for one trace.

    Args:
      recipe: of its layer.
      kernels: (..., k, n_i), side by side.
    """

    def __init__(self, recipe: Recipe, kernels: Any):
        self.recipe = recipe
        self.path: LayerPath | None = None
        # As of `nnx.BatchNorm`: False, which `model.train()` sets, lets a forward pass stage its amaxes by itself.
        self.use_running_average = True
        if recipe.has_state:
            state = _first_state(recipe, as_tuple(kernels))
            self.scale, self.amax_history = Fp8State(state["scale"]), Fp8State(state["amax_history"])

    def set_view(self, use_running_average: bool | None = None):
        """For `nnx.view`.

        Args:
          use_running_average: False lets a forward pass stage its amaxes.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def gemm(self, layer: str, parameters: LinearParameters) -> tuple[LinearParameters, Fp8Gemm]:
        """What the layer hands to its op; messages call it by its path, if that is known."""
        recorder, weight = (getattr(self, name).get_value() if hasattr(self, name) else None for name in ATTACHED)
        if self.path is not None:
            marked = register_gemm(self.path, self.recipe, parameters.kernel, weight is not None)
            parameters = replace(parameters, kernel=marked)
            layer = "/".join(self.path) or layer
        scales = self.scale.get_value() if self.recipe.has_state else None
        return parameters, layer_gemm(layer, self.recipe, parameters, scales, recorder, weight)

    def stage(self, gemm: Fp8Gemm, amaxes: jax.Array) -> None:
        """Stage the amaxes f32[2] of a forward pass where this pass may: in its record, or in the state itself."""
        gemm.record_forward(amaxes)
        if self.recipe.has_state and not gemm.is_recorded and not self.use_running_average:
            history = self.amax_history.get_value()
            self.amax_history.set_value(stage(history, shared_amaxes(history, lax.stop_gradient(amaxes))))


ATTACHED = RECORDER, "weight"


def _first_state(recipe: Any, kernels) -> dict[str, jax.Array]:
    first: Callable = partial(first_state, recipe)
    for _ in kernels[0].shape[:-2]:
        first = jax.vmap(first)
    return first(kernels)


def gemms_of(node: Any) -> dict[LayerPath, GemmState]:
    """All GEMMs of a model, or of a tree of them, by the path of their layer; a list's numbers are names, too."""
    found = {}
    for path, module in nnx.iter_modules(node):
        if isinstance(module, GemmState):
            last = max(place for place, name in enumerate(path) if name == OWN_NAME)
            names = names_of((*path[:last], *path[last + 1 :]))
            check_gemm_path(names)
            if last == len(path) - 1:  # the layer has one GEMM, which has its name
                check_layer_name(names)
            found[names] = module
    return found


def names_of(path: tuple) -> LayerPath:
    return tuple(map(str, path))


def fp8_state(model: Any) -> dict:
    """The scales and amax histories of a model as nested dicts, by the paths of its layers: for `fp8.count_amaxes`, and
    to look at.
    """
    return state_of(gemms_of(model))


def state_of(gemms: Mapping[LayerPath, GemmState], recipe: Recipe | None = None) -> dict:
    """The state of these GEMMs, or of those with one recipe."""
    tree: dict = {}
    for path, gemm in gemms.items():
        if gemm.recipe.has_state and recipe in (None, gemm.recipe):
            leaves = {"scale": gemm.scale.get_value(), "amax_history": gemm.amax_history.get_value()}
            put_at_path(tree, path, leaves)
    return tree


def write(gemms: Mapping[LayerPath, GemmState], state: Mapping) -> None:
    """Put a state, or a part of it, into the model."""
    for path, gemm in gemms.items():
        leaves = at_path(state, path) if gemm.recipe.has_state else None
        if leaves:
            gemm.scale.set_value(leaves["scale"])
            gemm.amax_history.set_value(leaves["amax_history"])


def update_state(model: Any) -> None:
    """Finish an optimizer step: turn the amaxes that were staged in a model into the scales of the next one, in place.

    Call it once per step, after the optimizer. One fused computation serves all GEMMs of a recipe. It changes nothing
    of GEMMs of which nothing was staged.
    """
    finish_step(gemms_of(model))


def finish_step(gemms: Mapping[LayerPath, GemmState]) -> None:
    """`update_state` of these GEMMs, for each recipe with state; as a rule there is one."""
    for recipe in dict.fromkeys(gemm.recipe for gemm in gemms.values() if gemm.recipe.has_state):
        write(gemms, update_collection(state_of(gemms, recipe), recipe))


def attach(gemms: Mapping[LayerPath, GemmState], recorded: Mapping, cache: Mapping = MappingProxyType({})) -> None:
    """Put recorders and cached weights beside the state, where `GemmState.gemm` finds them, and say where that is.

    They are variables of the state's type: what transformations do to these, they do to them.
    """
    for path, gemm in gemms.items():
        gemm.path = path
        for name, value in zip(
            ATTACHED, (at_path(recorded, (*path, RECORDER)), at_path(cache, (*path, "kernel"))), strict=True
        ):
            if value is not None:
                setattr(gemm, name, Fp8State(value))


def detach(gemms: Mapping[LayerPath, GemmState]) -> None:
    """Take away what `attach` has put there."""
    for gemm in gemms.values():
        gemm.path = None
        for name in ATTACHED:
            if hasattr(gemm, name):
                delattr(gemm, name)
