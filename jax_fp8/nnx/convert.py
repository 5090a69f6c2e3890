"""Swap the linear layers of an NNX model for FP8 layers, in one call."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from flax.nnx import filterlib
from flax.nnx.nn import dtypes

from jax_fp8.core.checks import describe
from jax_fp8.core.lora import Lora, check_lora
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, recipe_at, step_recipe
from jax_fp8.core.types import PyTree
from jax_fp8.nn.checks import own_product
from jax_fp8.nnx.foreign_einsum import einsum_in_fp8, matrix_shape, why_no_product
from jax_fp8.nnx.layers import DELAYED, Linear
from jax_fp8.nnx.linear_general import LinearGeneral
from jax_fp8.nnx.product import LinearParams

SWAPPED = nnx.Linear, nnx.LinearGeneral, nnx.Einsum
NORMS = nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm  # no products, though stacked scales have two dims
QWIX_MARKS = "qwix_path", "qwix_rngs", "disable_quant_stats_update"  # of a model that qwix has taken up
OWN = ("kernel", "bias")  # variables of the layers that are swapped
Sizes = int | tuple[int, ...]


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, by paths such as "layers/0/up"; it prints as a list.

    Args:
      converted: layers that are in FP8 now.
      left: layers that convert did not change, each with the reason.

    Example:
      >>> from jax_fp8.nnx import Conversion
      >>> print(Conversion(("up", "down"), {"head": "not asked for"}))
      2 layers in FP8
      head: left as it is, not asked for
    """

    converted: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        reasons = [f"{path}: left as it is, {why}" for path, why in self.left.items()]
        count = len(self.converted)
        return "\n".join([f"{count} layer{'' if count == 1 else 's'} in FP8", *reasons])


def convert(
    model: nnx.Module,
    recipe: RecipeOrRules = DELAYED,
    where: filterlib.Filter = ...,
    *,
    lora: Lora | None = None,
    rngs: nnx.Rngs | None = None,
) -> Conversion:
    """Swap the linear layers of a model for FP8 layers, in place and with the same parameters.

    Every `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum` becomes the FP8 layer of that name. The projections of
    `nnx.MultiHeadAttention` are `nnx.LinearGeneral`, so they are swapped too. So are layers of other libraries that
    have an `einsum_str` and one param, and compute `jnp.einsum` of both and nothing else, such as those of Tunix's
    models; their trace tells. The `nnx.Param` objects and their paths stay the same, so earlier optimizers and
    checkpoints still fit. A layer keeps its dtype: one that computes in float32 returns float32.

    Args:
      model: holds the layers, and is itself none of them.
      recipe: of the layers. Rules, a dict of regular expressions of paths, give each layer a recipe of its own, or
        None to leave it.
      where: an NNX filter, or a function of path and layer, that selects the layers to swap.
      lora: adapters of the swapped layers, `nnx.LoRAParam` of the layer's `param_dtype`; targets are names such as
        "up". None has none.
      rngs: for `lora`: has the stream "params", for the first matrices.

    Returns:
      The paths of the swapped layers, and of all other modules with a param of two dims or more, with reasons. A reason
      is the filter, sizes that are not multiples of 16, an einsum that is no product of matrices, settings or variables
      that the FP8 layer does not have, such as adapters, or another class. A class derived from one of Flax's counts as
      another one.

    Raises:
      ValueError: if `model` is not a model with layers inside, `recipe` is not a recipe, `lora` comes without `rngs`,
        or a name among its targets is that of no swapped layer.

    Example:
      >>> from flax import nnx
      >>> import jax_fp8.nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 10, rngs=rngs))
      >>> print(jax_fp8.nnx.convert(model))
      1 layer in FP8
      layers/2: left as it is, FP8 needs features divisible by 16, got 32 to 10
    """
    if step_recipe(recipe) is None and not isinstance(recipe, Mapping):
        raise ValueError("convert needs a recipe, got None; leave the model as it is")
    if not isinstance(model, nnx.Module) or type(model) in SWAPPED:
        raise ValueError(
            f"convert swaps the layers inside of a model, got {type(model).__name__}; make a jax_fp8.nnx.Linear instead"
        )
    _check_adapters(lora, rngs)
    is_wanted = filterlib.to_predicate(where)
    in_fp8: dict[int, nnx.Module] = {}  # by the id of the layer that each replaces
    converted, left = [], {}
    layers = {path: layer for path, layer in nnx.iter_modules(model) if _multiplies(layer)}
    for path, layer in layers.items():
        name = "/".join(map(str, path))
        reason = "not asked for" if not is_wanted(path, layer) else _why_not(layer)
        if reason is not None:
            left[name] = reason
            continue
        own_recipe = recipe_at(recipe, tuple(map(str, path)))
        if own_recipe is None:
            left[name] = "left by the rules"
            continue
        own = lora if lora is not None and lora.is_for(str(path[-1])) else None
        new = in_fp8[id(layer)] = _in_fp8(layer, own_recipe, own and replace(own, targets=None), rngs)
        for mark in QWIX_MARKS:
            if hasattr(layer, mark):
                setattr(new, mark, getattr(layer, mark))
        converted.append(name)
    unknown = set(lora.targets or () if lora else ()) - {path.split("/")[-1] for path in converted}
    if unknown:
        raise ValueError(
            f"targets of lora must be names of layers that convert swaps, got {', '.join(sorted(unknown))}; they are "
            f"{', '.join(sorted({path.split('/')[-1] for path in converted})) or 'none'}"
        )
    for _, module in list(nnx.iter_modules(model)):
        for attribute, value in list(vars(module).items()):
            new = _swapped(value, in_fp8)
            if new is not value:
                setattr(module, attribute, new if isinstance(new, nnx.Module) else nnx.data(new))
    return Conversion(tuple(converted), left)


def _check_adapters(lora: Lora | None, rngs: nnx.Rngs | None) -> None:
    check_lora("convert", lora)
    if (lora is None) != (rngs is None):
        raise ValueError(
            f"convert needs rngs with lora, for the first matrices of adapters, and without lora none, got {lora} and "
            f"{describe(rngs)}; pass both or neither"
        )


def _multiplies(module: nnx.Module) -> bool:
    """Whether a module of Flax or of somebody else has a param that is, perhaps, a kernel."""
    if isinstance(module, (LinearParams, *NORMS)):
        return False
    return any(isinstance(value, nnx.Param) and value.ndim > 1 for value in vars(module).values())


def _why_not(layer: PyTree) -> str | None:
    """The reason not to swap this layer, or None."""
    is_flax = type(layer) in SWAPPED
    is_foreign_einsum = not isinstance(layer, SWAPPED) and isinstance(getattr(layer, "einsum_str", None), str)
    if not is_flax and not is_foreign_einsum:
        return f"its class is {type(layer).__name__}, none that convert knows"
    added = sorted(name for name, value in vars(layer).items() if name not in OWN and isinstance(value, nnx.Variable))
    if is_flax and added:
        return f"has variables that {type(layer).__name__} does not have, {' and '.join(added)}"
    if hasattr(layer, "einsum_str"):
        reason = why_no_product(layer)
        if reason is not None:
            return reason
    k, n = _matrix_shape(layer)
    if k % 16 or n % 16:
        return f"FP8 needs features divisible by 16, got {k} to {n}"
    if not is_flax:
        return None
    others = {
        "batch_axis": not getattr(layer, "batch_axis", None),
        "einsum_op": getattr(layer, "einsum_op", jnp.einsum) is jnp.einsum,
        "promote_dtype": layer.promote_dtype is dtypes.promote_dtype,
        "preferred_element_type": layer.preferred_element_type is None,
    }
    settings = own_product(layer) + [name for name, is_default in others.items() if not is_default]
    return f"has its own {' and '.join(settings)}" if settings else None


def _matrix_shape(layer: PyTree) -> tuple[int, int]:
    if hasattr(layer, "einsum_str"):
        return matrix_shape(layer)
    k, n = (math.prod(_as_tuple(sizes)) for sizes in (layer.in_features, layer.out_features))
    return k, n


def _in_fp8(layer: PyTree, recipe: Recipe, lora: Lora | None, rngs: nnx.Rngs | None) -> LinearParams:
    """The FP8 layer with the parameters of another one, which may have leading dims of stacked layers."""
    common = {"recipe": recipe, "rngs": rngs or nnx.Rngs(0), "lora": lora}
    if hasattr(layer, "einsum_str"):
        return einsum_in_fp8(layer, **common)
    kernel = layer.kernel[...]
    k, n = (_as_tuple(sizes) for sizes in (layer.in_features, layer.out_features))
    stacked = kernel.shape[: kernel.ndim - len(k) - len(n)]
    if isinstance(layer, nnx.LinearGeneral):
        swap = partial(LinearGeneral, layer.in_features, layer.out_features, axis=layer.axis)
    else:
        swap = partial(Linear, layer.in_features, layer.out_features)
    in_fp8 = swap(
        use_bias=False,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        kernel_init=lambda *_: kernel.reshape(*stacked, math.prod(k), math.prod(n)),
        **common,
    )
    in_fp8.kernel, in_fp8.bias, in_fp8.use_bias = layer.kernel, layer.bias, layer.use_bias
    return in_fp8


def _as_tuple(sizes: Sizes) -> tuple[int, ...]:
    return sizes if isinstance(sizes, tuple) else (sizes,)


def _swapped(value: object, in_fp8: Mapping[int, nnx.Module]) -> object:
    """An attribute with its layers swapped: a layer, or a list, tuple or dict of layers. Others return unchanged."""
    if id(value) in in_fp8:
        return in_fp8[id(value)]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        new = [_swapped(item, in_fp8) for item in value]
        return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
    if type(value) is dict:
        new = {key: _swapped(item, in_fp8) for key, item in value.items()}
        return value if all(new[key] is item for key, item in value.items()) else new
    return value
