"""Dense layers: a GEMM, alone or behind a norm."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, PrecisionLike

from jax_fp8.core.shards import DIM_OF, ParamSharding, SplitDim, declare_sharding
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.norm import NormParameters, check_norm
from jax_fp8.nn.checks import check_has_no_own_product, check_layer, check_tensor_split
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.gemm import Fp8Module, declare_gemm
from jax_fp8.nn.names import named
from jax_fp8.ops.norm_linear import norm_linear
from jax_fp8.ops.unfused import norm_then


class Dense(Fp8Module):
    """`y = x · kernel + bias` in FP8; a drop-in for `flax.linen.Dense`.

    Variables: `params/kernel` (in, features), `params/bias` (features,), and under delayed scaling `fp8/scale` f32[3]
    and `fp8/amax_history` f32[3, L]. `recipe=None` is a plain product in `dtype` with the same parameters.

    Args:
      features: of the result; with a recipe a multiple of 16, as the features of `x`.
      use_bias: add a bias.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8:
        less memory where something else keeps `x`.
      tensor_split: in a step on shards, how the axis `tensor` splits the kernel: by "columns" in the first of two
        layers, whose result stays split, and by "rows" in the second, which takes that result. None: every device has
        the whole layer.
      precision, dot_general, dot_general_cls: Flax's fields for a product of one's own. This layer multiplies by its
        own GEMM, so anything but their defaults is refused.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((4, 8, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y = layer.apply(variables, x)
      >>> y.shape, y.dtype.name
      ((4, 8, 32), 'bfloat16')
    """

    features: int
    use_bias: bool = True
    tensor_split: SplitDim | None = None
    precision: PrecisionLike = None
    dot_general: Callable | None = None
    dot_general_cls: Callable | None = None

    @nn.compact
    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Multiply by the kernel, and add the bias and the residual.

        Args:
          x: (..., in), real numbers of any dtype.
          residual: (..., features), added by the GEMM itself; None adds nothing.

        Returns:
          (..., features) in `dtype`.

        Raises:
          ValueError: if a field is not valid, or sizes are not multiples of 16 with a recipe; if an array has another
            shape or dtype; or if the variables lack the state of the recipe.
        """
        check_layer(self, x, ("features",))
        check_has_no_own_product(self)
        check_tensor_split(self, self.tensor_split, ("columns", "rows"))
        sharding = ParamSharding(self.tensor_split and DIM_OF[self.tensor_split])
        gemm = declare_gemm(self, x.shape[-1], self.features, self.use_bias, sharding)
        return gemm.multiply(x, self.dtype, residual, self.recompute)


class NormVariables(nn.Module):
    """The parameters of a norm, named as Flax names them: `scale`, and `bias` for LayerNorm.

    `of_heads`: the norm is of single heads. In a step on shards each device has heads of its own, and so the gradient
    of these parameters is a sum over devices.
    `zero_centered_scale`: the parameter is the scale minus 1.
    """

    norm: str
    param_dtype: Dtype = jnp.float32
    logical_axes: bool = False
    of_heads: bool = False
    zero_centered_scale: bool = False

    @nn.compact
    def __call__(self, features: int) -> NormParameters:
        check_norm(self.norm)
        for name in ("scale", "bias"):
            declare_sharding((*self.path, name), ParamSharding(is_shared=self.of_heads))
        names = ("head_dim",) if self.of_heads else ("norm",)
        ones, zeros = (
            named(init, names, self.logical_axes)
            for init in (nn.initializers.ones_init(), nn.initializers.zeros_init())
        )
        scale = self.param("scale", zeros if self.zero_centered_scale else ones, (features,), self.param_dtype)
        scale = 1 + scale.astype(jnp.float32) if self.zero_centered_scale else scale
        if self.norm == "rmsnorm":
            return NormParameters(scale, None)
        return NormParameters(scale, self.param("bias", zeros, (features,), self.param_dtype))


class LayerNormDense(Fp8Module):
    """`Dense(norm(x))` as one differentiable op, in FP8; the parameters of the norm are `params/norm`.

    Args:
      features: of the result; with a recipe a multiple of 16, as the features of `x`.
      norm: "layernorm" (https://arxiv.org/abs/1607.06450) or "rmsnorm" (https://arxiv.org/abs/1910.07467).
      use_bias: add a bias to the product.
      epsilon: added to the variance, or to the mean square.
      return_input: return `(y, x)`. Where the residual branch continues with this `x`, the norm's backward pass adds
        the branch's gradient itself.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.
      tensor_split: in a step on shards, "columns" splits the kernel by columns over the axis `tensor`, and the result
        stays split for a `Dense` by "rows". None: every device has the whole layer.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.LayerNormDense(32, norm="rmsnorm"), jnp.ones((4, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape
      (4, 32)
    """

    features: int
    norm: str = "layernorm"
    use_bias: bool = True
    epsilon: float = 1e-6
    return_input: bool = False
    tensor_split: Literal["columns"] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:  # an array for most, whose type checker would ask which it is
        """Normalize, multiply by the kernel, and add the bias.

        Args:
          x: (..., in), real numbers of any dtype.

        Returns:
          (..., features) in `dtype`; with `return_input` a pair of that and `x`.

        Raises:
          ValueError: if a field is not valid, sizes are not multiples of 16 with a recipe, `x` is not such an array, or
            the variables lack the state of the recipe.
        """
        check_layer(self, x, ("features",))
        check_tensor_split(self, self.tensor_split, ("columns",))
        norm = NormVariables(self.norm, self.param_dtype, self.logical_axes, name="norm")(x.shape[-1])
        sharding = ParamSharding(self.tensor_split and DIM_OF[self.tensor_split])
        gemm = declare_gemm(self, x.shape[-1], self.features, self.use_bias, sharding)
        return norm_multiply(self, x, norm, gemm, self.return_input)


def norm_multiply(
    module: Fp8Module, x: jax.Array, norm: NormParameters, gemm: DeclaredGemm, return_input: bool
) -> PyTree:
    """The GEMM of the normalized `x`, with its adapters; stages the amaxes.

    Returns:
      The product, of kernels side by side a tuple; with `return_input` a pair of it and `x`.
    """
    epsilon, dtype = module.epsilon, module.dtype  # type: ignore[attr-defined]
    if gemm.adapters:  # which read the normalized `x` too
        multiply = partial(gemm.multiply, dtype=dtype, recompute=module.recompute)
        return norm_then(multiply, x, norm, epsilon, dtype, return_input)
    out, amaxes = norm_linear(
        x,
        norm,
        gemm.parameters,
        gemm.fp8,
        epsilon,
        dtype,
        return_input=return_input,
        recompute=module.recompute,
        tensor=gemm.tensor,
    )
    gemm.stage(amaxes)
    return out
