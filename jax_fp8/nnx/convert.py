"""An NNX model whose linear layers are swapped for those in FP8, in one call."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from flax.nnx import filterlib
from flax.nnx.nn import dtypes
from jax import lax

from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.nnx.layers import DELAYED, Linear
from jax_fp8.nnx.linear_general import LinearGeneral

SWAPPED: dict[type, Any] = {nnx.Linear: Linear, nnx.LinearGeneral: LinearGeneral}
MULTIPLIES = nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.LoRALinear  # by a kernel of their own


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, by paths such as "layers/0/up".

    Args:
      converted: layers that are in FP8 now.
      left: layers that are as they were, and why.
    """

    converted: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        reasons = [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        return "\n".join([f"{len(self.converted)} layers in FP8", *reasons])


def convert(model: nnx.Module, recipe: Recipe = DELAYED, where: Any = ...) -> Conversion:
    """Swap every `nnx.Linear` of a model for `jax_fp8.nnx.Linear`, in place, with the same parameters, and every
    `nnx.LinearGeneral`, as the projections of `nnx.MultiHeadAttention` are, for ours.

        print(jax_fp8.nnx.convert(model, recipe, where=nnx.Not(nnx.PathContains("head"))))

    The `nnx.Param` objects are the same, at the same paths, so that optimizers and checkpoints made before stay right.
    A layer's dtype is kept: one that computes in float32 hands on float32.

    Args:
      model: with the layers somewhere inside; itself no `nnx.Linear`.
      recipe: of the layers.
      where: an NNX filter, or a function of path and layer: which layers are asked for.

    Returns:
      The paths that were converted, and those of layers that multiply and were not, with reasons: the filter, sizes
      that are no multiples of 16, settings that FP8 has not, or another class, also one that is derived from these.
    """
    check_recipe(recipe)
    if recipe is None:
        raise ValueError("convert needs a recipe, got None; leave the model as it is")
    if not isinstance(model, nnx.Module) or type(model) in SWAPPED:
        raise ValueError(
            f"convert swaps the layers inside of a model, got {type(model).__name__}; make a jax_fp8.nnx.Linear instead"
        )
    is_wanted = filterlib.to_predicate(where)
    made: dict[int, Linear | LinearGeneral] = {}
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
                setattr(module, attribute, new if isinstance(new, nnx.Module) else nnx.data(new))
    return Conversion(tuple(converted), left)


def _why_not(layer) -> str | None:
    """Why FP8 does not have this layer."""
    if type(layer) not in SWAPPED:
        return f"its class is {type(layer).__name__}, none that convert knows"
    k, n = (math.prod(_as_tuple(sizes)) for sizes in (layer.in_features, layer.out_features))
    if k % 16 or n % 16:
        return f"FP8 needs features divisible by 16, got {k} to {n}"
    own = {
        "precision": layer.precision in (None, "default", lax.Precision.DEFAULT),
        "dot_general": layer.dot_general in (None, lax.dot_general),
        "dot_general_cls": getattr(layer, "dot_general_cls", None) is None,
        "batch_axis": not getattr(layer, "batch_axis", None),
        "promote_dtype": layer.promote_dtype is dtypes.promote_dtype,
        "preferred_element_type": layer.preferred_element_type is None,
    }
    settings = [name for name, is_default in own.items() if not is_default]
    return f"has its own {' and '.join(settings)}" if settings else None


def _in_fp8(layer: Any, recipe: Recipe) -> Linear | LinearGeneral:
    """Ours with the parameters of Flax's, which may be stacked."""
    kernel = layer.kernel[...]
    k, n = (_as_tuple(sizes) for sizes in (layer.in_features, layer.out_features))
    stacked = kernel.shape[: kernel.ndim - len(k) - len(n)]
    others: Any = {"axis": layer.axis} if isinstance(layer, nnx.LinearGeneral) else {}
    made = SWAPPED[type(layer)](
        layer.in_features,
        layer.out_features,
        use_bias=False,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=lambda *_: kernel.reshape(*stacked, math.prod(k), math.prod(n)),
        recipe=recipe,
        rngs=nnx.Rngs(0),
        **others,
    )
    made.kernel, made.bias, made.use_bias = layer.kernel, layer.bias, layer.use_bias
    return made


def _as_tuple(sizes: Any) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, tuple) else (sizes,)


def _swapped(value: Any, made: Mapping[int, Any]) -> Any:
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
