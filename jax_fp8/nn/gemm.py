"""The variables of one GEMM, and the fields that every FP8 module has.

    params/<layer>/{kernel, bias}               of each layer whose kernel it multiplies by
    params/<layer>/{lora_a, lora_b}             with adapters (nn/lora.py)
    fp8/<gemm>/{scale, amax_history}            under delayed scaling
    fp8_cache/<gemm>/kernel                     with a weight cache: the kernels in FP8, side by side
    fp8_frozen/<gemm or layer>/kernel           of frozen weights, in place of the kernels (core/frozen.py)

`<gemm>` is the layer, or the joined names of several layers that make one product (core/paths.py).
"""

import dataclasses
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.frozen import FROZEN, FrozenKernel, frozen_weight
from jax_fp8.core.lora import Lora
from jax_fp8.core.paths import check_gemm_path, check_layer_name, joined_name
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, as_field, recipe_at, recipe_of_all
from jax_fp8.core.recorder import RECORDER, register_gemm
from jax_fp8.core.shards import (
    COLUMNS,
    ROWS,
    ParamSharding,
    SplitDim,
    current_tensor,
    declare_sharding,
    parts_of,
    split_dim_of,
)
from jax_fp8.core.state import check_dtype
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.quantize import as_tuple
from jax_fp8.nn.checks import check_are_split_alike, layer_name
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.lora import declare_adapter
from jax_fp8.nn.names import named, names_of_linear
from jax_fp8.ops.adapters import Adapter, Adapters
from jax_fp8.ops.layer_gemm import check_frozen, check_multiples_of_16, first_state, layer_gemm
from jax_fp8.ops.parameters import LinearParameters


class Fp8Module(nn.Module, kw_only=True):
    """The fields of every layer with FP8 GEMMs.

    Args:
      recipe: how tensors are quantized; None computes in `dtype` with the same parameters. Rules, a dict of regular
        expressions of paths, give each layer inside a recipe of its own: see core/recipe_rules.py.
      dtype: of inputs, results and of products that are not in FP8: bfloat16, float16 or float32.
      param_dtype: of the parameters, one of these too.
      kernel_init, bias_init: initializers of kernels (in, features) and biases (features,).
      recompute: keep less for the backward, which then quantizes again; each layer says what it leaves out. Without a
        recipe, the results of products and collectives are kept, and everything else is computed again.
      logical_axes: `init` returns params with names for their dims, as `nn.with_logical_partitioning` makes them: see
        nn/names.py. An initializer may also give names itself.
      lora: adapters of the linear layers, a `Lora`; None has none.
    """

    recipe: RecipeOrRules = DelayedScaling()
    dtype: Dtype = jnp.bfloat16
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    recompute: bool = False
    logical_axes: bool = False
    lora: Lora | None = None

    def __post_init__(self):
        as_field(self)
        super().__post_init__()


def shared_fields(outer: object, cls: type[nn.Module]) -> dict[str, Any]:
    """The fields of a module, or of a config, that modules `cls` inside it have too. Equal names mean the same."""
    names = {field.name for field in dataclasses.fields(cls)} - {"name", "parent"}
    return {name: value for name, value in vars(outer).items() if name in names}


class LinearVariables(nn.Module):
    """The parameters of one linear map: `kernel` (in, features), and `bias` (features,) or None; and its adapter."""

    use_bias: bool
    dtype: Dtype
    param_dtype: Dtype
    kernel_init: Initializer
    bias_init: Initializer
    sharding: ParamSharding = ParamSharding()
    logical_axes: bool = False

    lora: Lora | None = None
    is_frozen: bool = False

    @nn.compact
    def __call__(self, in_features: int, features: int) -> tuple[LinearParameters, Adapter | None]:
        return declare_linear(self, in_features, features, self.use_bias, self.sharding, self.is_frozen)


def declare_linear(
    module: LinearVariables | Fp8Module,
    in_features: int,
    features: int,
    use_bias: bool,
    sharding: ParamSharding,
    is_frozen: bool = False,
) -> tuple[LinearParameters, Adapter | None]:
    """Declare kernel, bias and adapter in `module`, with its dtypes and initializers.

    Args:
      in_features: of the input as it is here; in a step on shards, this device's part of it.
      features: of the whole kernel, over all devices.
      sharding: of the kernel; the sharding of the bias follows from it.
      is_frozen: the weight is among the frozen ones, so that there is no kernel to declare.
    """
    kernel_path, bias_path = (*module.path, "kernel"), (*module.path, "bias")
    is_by_columns = sharding.dim == COLUMNS
    pieces = sharding.pieces or (features if is_by_columns else in_features)
    sharding = replace(sharding, pieces=pieces, dtype=module.dtype, by_rule=(COLUMNS, ROWS))
    declare_sharding(kernel_path, sharding)
    _check_own_rows(module, in_features)
    columns = features // parts_of(kernel_path, COLUMNS)
    kernel_names, bias_names = names_of_linear(sharding)
    kernel_init = named(module.kernel_init, kernel_names, module.logical_axes)
    bias_init = named(module.bias_init, bias_names, module.logical_axes)
    shape = in_features, columns
    kernel: PyTree = (
        FrozenKernel(shape) if is_frozen else module.param("kernel", kernel_init, shape, module.param_dtype)
    )
    adapter = declare_adapter(module, module.lora, in_features, columns, sharding)
    if not use_bias:
        return LinearParameters(kernel, None), adapter
    dim = COLUMNS if is_by_columns else None
    declare_sharding(bias_path, replace(sharding, dim=dim, dtype=None, by_rule=(COLUMNS,), columns_of=kernel_path))
    return LinearParameters(kernel, module.param("bias", bias_init, (columns,), module.param_dtype)), adapter


class GemmVariables(LinearVariables, kw_only=True):
    """Parameters and FP8 state of a GEMM by one layer, in one module."""

    recipe: RecipeOrRules

    @nn.compact
    def __call__(self, in_features: int, features: int) -> DeclaredGemm:
        return declare_gemm(self, in_features, features, self.use_bias, self.sharding)


class GemmState(nn.Module):
    """The FP8 state of a GEMM that several layers share, that no layer owns, or that has no kernel. The module has the
    name of the GEMM. Messages call it `layer`, or by its path if that is None.
    """

    recipe: Recipe | None
    layer: str | None = None

    @nn.compact
    def __call__(
        self, parameters: LinearParameters, split_dim: SplitDim | None, frozen: Fp8Pair | None = None
    ) -> DeclaredGemm:
        return declare_state(self, parameters, self.recipe, split_dim, self.layer, frozen)


def declare_gemm(
    module: GemmVariables | Fp8Module, in_features: int, features: int, use_bias: bool, sharding: ParamSharding
) -> DeclaredGemm:
    """The GEMM of a layer that has one: parameters and state in `module` itself."""
    recipe = recipe_at(module.recipe, module.path)
    if recipe is not None:
        check_layer_name(module.path)
    frozen = frozen_weight(module.variables.get(FROZEN, {}), ())
    parameters, adapter = declare_linear(module, in_features, features, use_bias, sharding, frozen is not None)
    split_dim = split_dim_of((*module.path, "kernel"))
    declared = declare_state(module, parameters, recipe, split_dim, frozen=frozen)
    return replace(declared, adapters=() if adapter is None else (adapter,))


def declare_gemm_of(
    module: Fp8Module,
    names: tuple[str, ...],
    in_features: int,
    features: tuple[int, ...],
    shardings: tuple[ParamSharding, ...],
    *,
    use_bias: bool,
    kernel_init: Initializer | None = None,
) -> DeclaredGemm:
    """One GEMM by the kernels of these layers side by side, each a module of its name inside `module`.

    Args:
      shardings: of the layers' kernels.
      kernel_init: of all kernels; None is that of `module`.
    """
    own = {"use_bias": use_bias, "kernel_init": kernel_init or module.kernel_init}
    if len(names) == 1:
        fields = shared_fields(module, GemmVariables) | own
        return GemmVariables(**fields, sharding=shardings[0], name=names[0])(in_features, *features)
    fields = shared_fields(module, LinearVariables) | own
    frozen = frozen_weight(module.variables.get(FROZEN, {}), (joined_name(names),))
    _check_is_apart(module, names, frozen)
    layers = [
        LinearVariables(**fields, sharding=sharding, is_frozen=frozen is not None, name=name)(in_features, width)
        for name, width, sharding in zip(names, features, shardings, strict=True)
    ]
    parameters = LinearParameters.beside(*(parameters for parameters, _ in layers))
    adapters = tuple(adapter for _, adapter in layers)
    adapters = adapters if any(adapter is not None for adapter in adapters) else ()
    split_dim = split_dim_of((*module.path, names[0], "kernel"))
    always_split = [name for name, sharding in zip(names, shardings, strict=True) if not sharding.or_whole]
    check_are_split_alike(module, always_split)
    recipe = recipe_of_all(module.recipe, module.path, names)
    if recipe is None:
        return _without_recipe(module, parameters, split_dim, frozen, adapters)
    declared = GemmState(recipe, name=joined_name(names))(parameters, split_dim, frozen)
    return replace(declared, adapters=adapters)


def _without_recipe(
    module: nn.Module,
    parameters: LinearParameters,
    split_dim: SplitDim | None,
    frozen: Fp8Pair | None,
    adapters: Adapters = (),
) -> DeclaredGemm:
    """A GEMM in the dtype of the module, which reads a frozen weight as it is."""
    if frozen is not None:
        check_frozen(layer_name(module), parameters, frozen)
        parameters = replace(parameters, weight=frozen)
    return _on_shards(DeclaredGemm(parameters, adapters=adapters), split_dim)


def _on_shards(declared: DeclaredGemm, split_dim: SplitDim | None) -> DeclaredGemm:
    return declared if split_dim is None else replace(declared, tensor=current_tensor(), split_dim=split_dim)


def _check_is_apart(module: nn.Module, names: tuple[str, ...], frozen: Fp8Pair | None) -> None:
    tensor = current_tensor()
    if tensor is not None and frozen is not None and not isinstance(frozen.columnwise, tuple):
        raise ValueError(
            f"{layer_name(module)}: to be split over {tensor.axis}={tensor.size}, the frozen kernels of "
            f"{', '.join(names)} must be apart, got one array; freeze them with freeze_kernels(..., apart=True)"
        )


def declare_state(
    module: nn.Module,
    parameters: LinearParameters,
    recipe: Recipe | None,
    split_dim: SplitDim | None,
    layer: str | None = None,
    frozen: Fp8Pair | None = None,
) -> DeclaredGemm:
    """Declare the state of a GEMM in `module`, if its recipe has any.

    Args:
      split_dim: the dim of its kernels that is split here.
      layer: what messages call it; None is its path.
      frozen: its weight, if that is frozen.
    """
    check_recipe(recipe)
    if recipe is None:
        return _without_recipe(module, parameters, split_dim, frozen)
    check_gemm_path(module.path)
    layer = layer or layer_name(module)
    kernels = as_tuple(parameters.kernel)
    if kernels:
        check_multiples_of_16(layer, kernels[0].shape[0], parameters.widths, split_dim and current_tensor())
    history, scales = None, None
    if recipe.has_state:
        scales, history = _delayed_state(module, layer, parameters, recipe)
    elif module.has_variable("fp8", "amax_history"):
        raise ValueError(
            f"{layer}: {recipe!r} keeps no state, but these variables hold amax histories of delayed scaling; "
            'leave the collection "fp8" out, or give the model the recipe that they were made with'
        )
    recorder = module.get_variable("fp8", RECORDER)  # None unless a GradientTape has put one there
    weight = frozen if parameters.is_frozen else module.get_variable("fp8_cache", "kernel")
    if kernels:
        marked = register_gemm(module.path, recipe, parameters.kernel, weight is not None)
        parameters = replace(parameters, kernel=marked)
    gemm = layer_gemm(layer, recipe, parameters, scales, recorder, weight)
    staging = module.is_mutable_collection("fp8") and not module.is_initializing()
    return _on_shards(DeclaredGemm(parameters, gemm, history if staging else None), split_dim)


def _delayed_state(
    module: nn.Module, layer: str, parameters: LinearParameters, recipe: Any
) -> tuple[jax.Array, nn.Variable]:
    """The scales f32[3], and the variable of the history. The recipe is `DelayedScaling`: no other has state."""
    if not module.is_initializing() and not module.has_variable("fp8", "scale"):
        raise ValueError(
            f'{layer}: delayed scaling needs the collection "fp8", which these variables lack; '
            'pass {"params": ..., "fp8": ...} as model.init returned them'
        )
    initial = first_state(recipe, parameters.kernel) if module.is_initializing() else {}
    scale = module.variable("fp8", "scale", lambda: initial["scale"])
    history = module.variable("fp8", "amax_history", lambda: initial["amax_history"])
    check_dtype(layer, scale=scale.value, amax_history=history.value)
    if history.value.shape[-1] != recipe.amax_history_len:
        raise ValueError(
            f"{layer}: the recipe's amax_history_len is {recipe.amax_history_len}, but these variables hold a history "
            f"of {history.value.shape[-1]} steps; pass the recipe that they were made with"
        )
    return scale.value, history


def _check_own_rows(module: nn.Module, in_features: int) -> None:
    """Raise where a device's part of a kernel has fewer or more rows than its input has features."""
    kernel = module.get_variable("params", "kernel") if current_tensor() is not None else None
    if kernel is not None and kernel.shape[-2] != in_features:
        raise ValueError(
            f"{'/'.join(module.path)}: a layer split by rows must follow one split by columns, and no other layer may, "
            f"got {in_features} features of the input and {kernel.shape[-2]} rows of the kernel on each device; "
            "set tensor_split, or the rules, of both"
        )
