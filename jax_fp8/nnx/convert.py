"""An NNX model whose `nnx.Linear` layers are swapped for those in FP8, in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flax import nnx
from flax.nnx import filterlib
from flax.nnx.nn import dtypes
from jax import lax

from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.nnx.layers import DELAYED, Linear

MULTIPLIES = nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.LoRALinear  # by a kernel of their own


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, by paths such as "layers/0/up".

    Args:
      converted: layers that are in FP8 now.
      left: layers that are as they were, and why.
    """

    converted: tuple[str, ...]
    left: Mapping[str, str] = MappingProxyType({})

    def __str__(self) -> str:
        reasons = [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        return "\n".join([f"{len(self.converted)} layers in FP8", *reasons])


def convert(model: nnx.Module, recipe: Recipe = DELAYED, where: Any = ...) -> Conversion:
    """Swap every `nnx.Linear` of a model for `jax_fp8.nnx.Linear`, in place, with the same parameters.

        print(jax_fp8.nnx.convert(model, recipe, where=nnx.Not(nnx.PathContains("head"))))

    The `nnx.Param` objects are the same, at the same paths, so that optimizers and checkpoints made before stay right.
    A layer's dtype is kept: one that computes in float32 hands on float32.

    Args:
      model: with the layers somewhere inside; itself no `nnx.Linear`.
      recipe: of the layers.
      where: an NNX filter, or a function of path and layer: which layers are asked for.

    Returns:
      The paths that were converted, and those of layers that multiply and were not, with reasons: the filter, sizes
      that are no multiples of 16, settings that FP8 has not, or another class than `nnx.Linear` itself.
    """
    check_recipe(recipe)
    if recipe is None:
        raise ValueError("convert needs a recipe, got None; leave the model as it is")
    if not isinstance(model, nnx.Module) or type(model) is nnx.Linear:
        raise ValueError(
            f"convert swaps the layers inside of a model, got {type(model).__name__}; make a jax_fp8.nnx.Linear instead"
        )
    is_wanted = filterlib.to_predicate(where)
    made: dict[int, Linear] = {}
    converted, left = [], {}
    layers = {path: layer for path, layer in nnx.iter_modules(model) if isinstance(layer, MULTIPLIES)}
    for path, layer in layers.items():
        name = "/".join(map(str, path))
        reason = "not asked for" if not is_wanted(path, layer) else _why_not(layer)
        if reason is not None:
            left[name] = reason
            continue
        made[id(layer)] = _in_fp8(layer, recipe)
        converted.append(name)
    for _, module in list(nnx.iter_modules(model)):
        for attribute, value in list(vars(module).items()):
            new = _swapped(value, made)
            if new is not value:
                setattr(module, attribute, new if isinstance(new, Linear) else nnx.data(new))
    return Conversion(tuple(converted), left)


def _why_not(layer) -> str | None:
    """Why FP8 does not have this layer."""
    if type(layer) is not nnx.Linear:
        return f"its class is {type(layer).__name__}, not nnx.Linear"
    odd = [size for size in (layer.in_features, layer.out_features) if size % 16]
    if odd:
        return f"FP8 needs features divisible by 16, got {layer.in_features} to {layer.out_features}"
    own = {
        "precision": layer.precision in (None, "default", lax.Precision.DEFAULT),
        "dot_general": layer.dot_general is lax.dot_general,
        "promote_dtype": layer.promote_dtype is dtypes.promote_dtype,
        "preferred_element_type": layer.preferred_element_type is None,
    }
    settings = [name for name, is_default in own.items() if not is_default]
    return f"has its own {' and '.join(settings)}" if settings else None


def _in_fp8(layer: Any, recipe: Recipe) -> Linear:
    made = Linear(
        layer.in_features,
        layer.out_features,
        use_bias=False,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=lambda *_: layer.kernel[...],
        recipe=recipe,
        rngs=nnx.Rngs(0),
    )
    made.kernel, made.bias, made.use_bias = layer.kernel, layer.bias, layer.use_bias
    return made


def _swapped(value: Any, made: Mapping[int, Linear]) -> Any:
    """The same value with other layers in it, or itself."""
    if id(value) in made:
        return made[id(value)]
    if type(value) in (list, tuple):
        new = [_swapped(item, made) for item in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
    if type(value) is dict:
        new = {key: _swapped(item, made) for key, item in value.items()}
        return value if all(new[key] is item for key, item in value.items()) else new
    return value
