"""The variables of one GEMM: `params/{kernel, bias}`, under delayed scaling `fp8/{scale, amax_history}`, and `fp8_cache/kernel` if there is one."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.core.recorder import RECORDER, register_gemm
from jax_fp8.core.scaling import GemmScaling
from jax_fp8.core.state import initial_state, stage
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.ops.linear import LinearParameters


@dataclass(frozen=True)
class Gemm:
    """What a layer hands to a composite op, and the door through which the amaxes come back."""

    parameters: LinearParameters
    scaling: GemmScaling | None
    amax_history: nn.Variable | None  # None unless the collection is mutable

    def stage(self, amaxes: jax.Array | None) -> None:
        """Stage the forward amaxes f32[2] wherever this call may: in a mutable collection, and in `value_and_grad`'s record.

        The backward records them too, so this matters to layers that no gradient reaches. A layer under `nn.scan` relies on its backward:
        Flax's scan refuses a body that writes.
        """
        if amaxes is None or self.scaling is None:
            return
        amaxes = lax.stop_gradient(amaxes)
        if self.scaling.slot is None:
            self.scaling.record(amaxes)
        if self.amax_history is not None:
            self.amax_history.value = stage(self.amax_history.value, amaxes)


def declare_gemm(module: nn.Module, in_features: int, features: int, recipe: Recipe | None) -> Gemm:
    """Declare the variables of a GEMM in `module`, whose fields say the rest: `use_bias`, `param_dtype`, `kernel_init`, `bias_init`."""
    check_recipe(recipe)
    layer = "/".join(module.path) or type(module).__name__
    if recipe is not None:
        _check_multiple_of_16(layer, "in", in_features)
        _check_multiple_of_16(layer, "out", features)
    kernel = module.param("kernel", module.kernel_init, (in_features, features), module.param_dtype)
    bias = module.param("bias", module.bias_init, (features,), module.param_dtype) if module.use_bias else None
    parameters = LinearParameters(kernel, bias)
    if recipe is None:
        return Gemm(parameters, None, None)
    register_gemm(module.path)
    if not isinstance(recipe, DelayedScaling):
        recorder = module.get_variable("fp8", RECORDER)  # there while gradients are added up
        weight = _cached_weight(module, layer, parameters, recipe)
        gradient = recorder and recorder.gradient
        return Gemm(parameters, GemmScaling(recipe, layer, from_current=True, weight=weight, gradient=gradient), None)
    return _with_delayed_state(module, layer, parameters, recipe)


def _with_delayed_state(module, layer, parameters, recipe):
    if not module.is_initializing() and not module.has_variable("fp8", "scale"):
        raise ValueError(
            f'{layer}: delayed scaling needs the collection "fp8", which these variables lack; '
            'pass {"params": ..., "fp8": ...} as model.init returned them'
        )
    initial = initial_state(recipe, amax_reference(parameters.kernel)) if module.is_initializing() else {}
    scale = module.variable("fp8", "scale", lambda: initial["scale"])
    history = module.variable("fp8", "amax_history", lambda: initial["amax_history"])
    recorder = module.get_variable("fp8", RECORDER)  # there while value_and_grad runs
    scaling = GemmScaling(
        recipe,
        layer,
        from_current=recorder is not None and recorder.from_current,
        scale=scale.value,
        amax_ref=recorder and recorder.amax_ref,
        slot=recorder and recorder.slot,
        weight=_cached_weight(module, layer, parameters, recipe),
        gradient=recorder and recorder.gradient,
    )
    staging = module.is_mutable_collection("fp8") and not module.is_initializing()
    return Gemm(parameters, scaling, history if staging else None)


def _cached_weight(module, layer, parameters, recipe) -> Fp8Pair | None:
    cached = module.get_variable("fp8_cache", "kernel")
    if cached is None:
        return None
    shape, dtype = parameters.kernel.shape, recipe.fp8_format.forward
    if (cached.rowwise.shape, cached.columnwise.shape, cached.rowwise.dtype) != (shape, shape[::-1], dtype):
        raise ValueError(
            f"{layer}: the weight cache must hold {jnp.dtype(dtype).name} of shape {shape} and its transpose, got {cached.rowwise.dtype} of shapes "
            f"{cached.rowwise.shape} and {cached.columnwise.shape}; make it with cast_weights from these variables"
        )
    return cached


def _check_multiple_of_16(layer, side, size):
    if size % 16:
        raise ValueError(
            f"{layer}: FP8 needs {side} features divisible by 16, got {size}; pad them, or leave this layer in bfloat16 with recipe=None"
        )
