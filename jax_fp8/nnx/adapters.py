"""Fine-tuning of NNX models with adapters: kernels that are frozen in FP8, and adapters merged into them.

model ─convert(lora=...)→ adapters ─freeze_kernels→ kernels in FP8 ─train `nnx.LoRAParam`, merge_adapters→ model
"""

from collections.abc import Iterator

import jax
from flax import nnx
from flax.nnx import filterlib

from jax_fp8.core.checks import describe
from jax_fp8.core.paths import joined_name
from jax_fp8.kernels.quantize import as_tuple
from jax_fp8.nnx.einsum import Einsum
from jax_fp8.nnx.layers import LayerNormLinear, Linear
from jax_fp8.nnx.linear_general import LinearGeneral
from jax_fp8.nnx.mlp import LayerNormMLP
from jax_fp8.nnx.product import LinearParams, beside
from jax_fp8.nnx.state import FrozenWeight, GemmState
from jax_fp8.ops.weights import frozen_weight
from jax_fp8.state.frozen_kernels import merged_kernel, thawed_kernels

Gemm = tuple[GemmState | None, tuple[LinearParams, ...]]


def freeze_kernels(model: nnx.Module, where: filterlib.Filter = ...) -> tuple[str, ...]:
    """Freeze the kernels of the FP8 layers of a model, in place: cast them to FP8 once, in place of the params.

    A frozen kernel takes one byte an element, and has no gradient. Each is scaled by its own amax. Train adapters
    (`lora`) in its place: `nnx.LoRAParam` selects them. Make optimizers after this call, because the `kernel` of a
    frozen layer is None.

    Args:
      model: holds layers of this package, or is one.
      where: an NNX filter, or a function of path and layer, that selects layers.

    Returns:
      The paths of the layers whose kernels are frozen now, such as "layers/0".

    Raises:
      ValueError: if `model` is no NNX module, no layer in FP8 is selected, or a selected layer is stacked.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.Linear(64, 32, lora=fp8.Lora(rank=4), rngs=nnx.Rngs(0))
      >>> model = nnx.Sequential(layer)
      >>> jax_fp8.nnx.freeze_kernels(model), layer.kernel, layer.fp8.frozen.get_value().columnwise.shape
      (('layers/0',), None, (32, 64))
      >>> sorted(nnx.state(layer, nnx.LoRAParam)), model(jnp.ones((16, 64))).shape
      (['lora_a', 'lora_b'], (16, 32))
    """
    is_wanted, frozen = filterlib.to_predicate(where), []
    for path, layer, gemms in _layers("freeze_kernels", model):
        name = "/".join(map(str, path))
        in_fp8 = [(state, params) for state, params in gemms if state is not None]
        if not in_fp8 or not is_wanted(path, layer):
            continue
        for state, params in in_fp8:
            _check_is_not_stacked(name, params)
            if not hasattr(state, "frozen"):
                kernels = as_tuple(beside(params).kernel)
                state.frozen = FrozenWeight(frozen_weight(state.recipe, kernels))
                for each in params:
                    each.set_kernel(None)
        frozen.append(name)
    if not frozen:
        raise ValueError(
            f"freeze_kernels must find layers of jax_fp8.nnx with a recipe, got {type(model).__name__} without one "
            "that where selects; convert the model first, or change where"
        )
    return tuple(frozen)


def merge_adapters(model: nnx.Module) -> None:
    """Merge adapters into their kernels, in place: `kernel + (alpha / rank) · a · b`, in float32, rounded once.

    Frozen kernels are params again, dequantized, in the `param_dtype` of their layer. The layers have no adapters then,
    and with delayed scaling the scales of their kernels begin again.

    Args:
      model: holds layers of this package, or is one.

    Raises:
      ValueError: if `model` is no NNX module.

    Example:
      >>> from flax import nnx
      >>> import jax_fp8 as fp8
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.Linear(64, 32, lora=fp8.Lora(rank=4), rngs=nnx.Rngs(0))
      >>> _ = jax_fp8.nnx.freeze_kernels(layer)
      >>> jax_fp8.nnx.merge_adapters(layer)
      >>> layer.kernel.shape, layer.lora_a
      ((64, 32), None)
    """
    for path, _, gemms in _layers("merge_adapters", model):
        for state, params in gemms:
            is_frozen = hasattr(state, "frozen")
            if not is_frozen and all(each.lora is None for each in params):
                continue
            _check_is_not_stacked("/".join(map(str, path)), params)
            if is_frozen:
                assert state is not None
                kernels = thawed_kernels(state.frozen.get_value(), [each.matrix_shape[1] for each in params])
                del state.frozen
            else:
                kernels = as_tuple(beside(params).kernel)
            for each, kernel in zip(params, kernels, strict=True):
                _set_merged(each, kernel)
            if state is not None:
                state.begin_again(beside(params).kernel)


def _set_merged(params: LinearParams, kernel: jax.Array) -> None:
    own = params.own_kernel
    dtype = params.param_dtype if own is None else own[...].dtype
    if params.adapter is not None:
        kernel = merged_kernel(kernel, params.adapter.a, params.adapter.b, params.adapter.scaling, dtype)
    kernel = params.from_matrix(kernel.astype(dtype))
    if own is None:
        params.set_kernel(nnx.Param(kernel))
    else:
        own[...] = kernel
    params.lora, params.lora_a, params.lora_b = None, nnx.data(None), nnx.data(None)


def _layers(caller: str, model: nnx.Module) -> Iterator[tuple[tuple, nnx.Module, list[Gemm]]]:
    """The layers of this package in a model, with their paths and their GEMMs."""
    if not isinstance(model, nnx.Module):
        raise ValueError(f"{caller} needs an NNX module, got {describe(model)}; pass the model")
    for path, layer in list(nnx.iter_modules(model)):
        if isinstance(layer, LayerNormMLP):
            into = tuple(getattr(layer, name) for name in layer.into)
            states = layer.fp8 or {}
            yield path, layer, [(states.get(joined_name(layer.into)), into), (states.get("down"), (layer.down,))]
        elif isinstance(layer, Linear | LayerNormLinear | LinearGeneral | Einsum):
            yield path, layer, [(layer.gemm_state, (layer,))]


def _check_is_not_stacked(name: str, params: tuple[LinearParams, ...]) -> None:
    for each in params:
        if each.own_kernel is not None and each.own_kernel[...].ndim != len(each.dims):
            raise ValueError(
                f"{name or type(each).__name__}: kernels of stacked layers are neither frozen nor merged, got one of "
                f"shape {each.own_kernel[...].shape}; leave it out with where, or make the layers one by one"
            )
