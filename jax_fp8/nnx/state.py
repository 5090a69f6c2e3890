"""The FP8 state of an NNX model: two variables per GEMM, and the same as one nested dict.

    model.mlp.up.fp8.{scale, amax_history}, Fp8State ─fp8_state→ {"mlp": {"up": {"scale", "amax_history"}}}

The dict has the form of a Linen model's collection "fp8", so every function that takes such a collection also takes the
state of an NNX model.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax import lax

from jax_fp8.core.batching import shared_amaxes
from jax_fp8.core.formats import KERNEL
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.paths import LayerPath, at_path, check_gemm_path, check_layer_name, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import RECORDER, register_gemm
from jax_fp8.core.state import stage
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.quantize import Matrices, as_tuple
from jax_fp8.kernels.update_state import update_state as update_collection
from jax_fp8.ops.layer_gemm import first_state, layer_gemm
from jax_fp8.ops.parameters import LinearParameters

OWN_NAME = "fp8"  # the attribute of a layer that holds its GEMMs


class Fp8State(nnx.Variable):
    """A variable of the FP8 state: a scale f32[..., 3], or an amax history f32[..., 3, L].

    Rows are input, kernel and output gradient. The constructor is that of `nnx.Variable`, and filters select these
    variables by their type.

    Example:
      >>> from flax import nnx
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> sorted(nnx.state(layer, jax_fp8.nnx.Fp8State)["fp8"])
      ['amax_history', 'scale']
    """


class FrozenWeight(nnx.Variable):
    """The kernels of a GEMM, frozen in FP8: an `Fp8Pair` with their transpose, side by side."""


class GemmState(nnx.Module):
    """The state of one GEMM.

    Variables under a recipe with state: `scale` f32[3] and `amax_history` f32[3, L], with leading dims where layers are
    stacked. Once the kernels are frozen also `frozen`, a `FrozenWeight`. For one trace, `attach` adds `recorder` where
    gradients are taken, and `weight` where weights are cached.

    Args:
      recipe: of its layer.
      kernels: (..., k, n_i), side by side.
    """

    frozen: FrozenWeight

    def __init__(self, recipe: Recipe, kernels: Matrices):
        self.recipe = recipe
        self.path: LayerPath | None = None
        # As in `nnx.BatchNorm`, `model.train()` sets this to False. A forward pass then stages its amaxes itself.
        self.use_running_average = True
        if recipe.has_state:
            state = _first_state(recipe, as_tuple(kernels))
            self.scale, self.amax_history = Fp8State(state["scale"]), Fp8State(state["amax_history"])

    def set_view(self, use_running_average: bool | None = None) -> None:
        """For `nnx.view`.

        Args:
          use_running_average: False lets a forward pass stage its amaxes.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def gemm(self, layer: str, parameters: LinearParameters) -> tuple[LinearParameters, Fp8Gemm]:
        """Parameters and GEMM as the layer's op takes them. Messages name the layer by its path where that is known."""
        recorder, weight = (getattr(self, name).get_value() if hasattr(self, name) else None for name in ATTACHED)
        weight = self.frozen.get_value() if hasattr(self, "frozen") else weight
        if self.path is not None:
            marked = register_gemm(self.path, self.recipe, parameters.kernel, weight is not None)
            parameters = replace(parameters, kernel=marked)
            layer = "/".join(self.path) or layer
        scales = self.scale.get_value() if self.recipe.has_state else None
        return parameters, layer_gemm(layer, self.recipe, parameters, scales, recorder, weight)

    def begin_again(self, kernels: Matrices) -> None:
        """Give kernels that were replaced the scale of new ones, and no history."""
        if self.recipe.has_state:
            first = _first_state(self.recipe, as_tuple(kernels))["scale"]
            self.scale.set_value(self.scale.get_value().at[..., KERNEL].set(first[..., KERNEL]))
            self.amax_history.set_value(self.amax_history.get_value().at[..., KERNEL, :].set(0))

    def stage(self, gemm: Fp8Gemm, amaxes: jax.Array) -> None:
        """Stage the amaxes f32[2] of a forward pass, in its record or, in training mode, in the state itself."""
        gemm.record_forward(amaxes)
        if self.recipe.has_state and not gemm.is_recorded and not self.use_running_average:
            history = self.amax_history.get_value()
            self.amax_history.set_value(stage(history, shared_amaxes(history, lax.stop_gradient(amaxes))))


ATTACHED = RECORDER, "weight"


def _first_state(recipe: Any, kernels: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """By `DelayedScaling`: no other recipe has state."""
    make_state = partial(first_state, recipe)
    for _ in kernels[0].shape[:-2]:  # dims of stacked layers
        make_state = jax.vmap(make_state)
    return make_state(kernels)


def gemms_of(node: PyTree) -> dict[LayerPath, GemmState]:
    """All GEMMs of a model, or of a tree of models, by the paths of their layers. Positions in lists are names too."""
    gemms = {}
    for path, module in nnx.iter_modules(node):
        if isinstance(module, GemmState):
            names = gemm_path(path)
            check_gemm_path(names)
            if path[-1] == OWN_NAME:  # the layer has one GEMM, with the layer's name
                check_layer_name(names)
            gemms[names] = module
    return gemms


def gemm_path(path: tuple) -> LayerPath:
    """The path of a GEMM from that of its state, which a layer has under `OWN_NAME`."""
    last = max(position for position, name in enumerate(path) if name == OWN_NAME)
    return names_of((*path[:last], *path[last + 1 :]))


def names_of(path: Iterable[Hashable]) -> LayerPath:
    return tuple(map(str, path))


def fp8_state(model: PyTree) -> dict[str, PyTree]:
    """Read the scales and amax histories of a model as nested dicts, by the paths of its layers.

    Functions of a Linen model's collection "fp8" take them, such as `fp8.count_amaxes`.

    Args:
      model: an NNX module, or a tree of modules.

    Returns:
      For each GEMM its `scale` f32[..., 3] and `amax_history` f32[..., 3, L]; {} where no recipe has state.

    Raises:
      ValueError: if the name of an FP8 layer holds a "+" or begins with a "~", which are for names of GEMMs.

    Example:
      >>> from flax import nnx
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> model = nnx.Sequential(jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
      >>> jax.tree.map(jnp.shape, jax_fp8.nnx.fp8_state(model))
      {'layers': {'0': {'amax_history': (3, 1024), 'scale': (3,)}}}
    """
    return state_of(gemms_of(model))


def state_of(gemms: Mapping[LayerPath, GemmState], recipe: Recipe | None = None) -> dict[str, PyTree]:
    """The state of these GEMMs, or of those with this recipe."""
    tree: dict[str, PyTree] = {}
    for path, gemm in gemms.items():
        if gemm.recipe.has_state and recipe in (None, gemm.recipe):
            leaves = {"scale": gemm.scale.get_value(), "amax_history": gemm.amax_history.get_value()}
            put_at_path(tree, path, leaves)
    return tree


def write(gemms: Mapping[LayerPath, GemmState], state: Mapping[str, PyTree]) -> None:
    """Write a state, or a part of it, into the model."""
    for path, gemm in gemms.items():
        leaves = at_path(state, path) if gemm.recipe.has_state else None
        if leaves:
            gemm.scale.set_value(leaves["scale"])
            gemm.amax_history.set_value(leaves["amax_history"])


def update_state(model: PyTree) -> None:
    """Finish an optimizer step: turn the amaxes staged in a model into the scales of the next step, in place.

    Call it once per step, after the optimizer. One fused computation serves all GEMMs of a recipe. GEMMs without staged
    amaxes keep their state.

    Args:
      model: an NNX module, or a tree of modules.

    Raises:
      ValueError: if the name of an FP8 layer holds a "+" or begins with a "~", which are for names of GEMMs.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> model = jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x).astype(jnp.float32))
      >>> loss, grads = jax_fp8.nnx.value_and_grad(loss_fn)(model, jnp.full((16, 16), 896.0))
      >>> jax_fp8.nnx.update_state(model)
      >>> model.fp8.scale[0].item()
      2.0
    """
    finish_step(gemms_of(model))


def finish_step(gemms: Mapping[LayerPath, GemmState]) -> None:
    """`update_state` of these GEMMs, once for each recipe with state; most models have one recipe."""
    for recipe in dict.fromkeys(gemm.recipe for gemm in gemms.values() if gemm.recipe.has_state):
        write(gemms, update_collection(state_of(gemms, recipe), recipe))


def attach(
    gemms: Mapping[LayerPath, GemmState],
    recorded: Mapping[str, PyTree],
    cache: Mapping[str, PyTree] = MappingProxyType({}),
) -> None:
    """Put recorders and cached weights beside the state, where `GemmState.gemm` finds them, and tell each GEMM its
    path.

    They are `Fp8State` variables, so NNX transformations treat them like the state.
    """
    for path, gemm in gemms.items():
        gemm.path = path
        values = at_path(recorded, (*path, RECORDER)), at_path(cache, (*path, "kernel"))
        for name, value in zip(ATTACHED, values, strict=True):
            if value is not None:
                setattr(gemm, name, Fp8State(value))


def detach(gemms: Mapping[LayerPath, GemmState]) -> None:
    """Remove what `attach` added."""
    for gemm in gemms.values():
        gemm.path = None
        for name in ATTACHED:
            if hasattr(gemm, name):
                delattr(gemm, name)
