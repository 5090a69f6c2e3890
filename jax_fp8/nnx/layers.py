"""NNX layers with one FP8 GEMM: parameters, state and wiring, as in the Linen layers of the same names. No numerics."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jax_fp8.core.lora import Lora
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.kernels.norm import NormParameters, check_norm
from jax_fp8.nnx.checks import check_fields, check_has_no_targets, check_input, check_sharding
from jax_fp8.nnx.product import LECUN, NOTHING, ZEROS, LinearParams, Metadata, Product
from jax_fp8.ops.norm_linear import norm_linear
from jax_fp8.ops.unfused import norm_then

DELAYED = DelayedScaling()


class NormParams(nnx.Module):
    """Scale (features,), and for LayerNorm bias (features,)."""

    def __init__(self, features: int, norm: str, param_dtype: Dtype):
        check_norm(norm)
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros((features,), param_dtype)) if norm == "layernorm" else None)

    @property
    def parameters(self) -> NormParameters:
        return NormParameters(self.scale[...], None if self.bias is None else self.bias[...])


class Linear(LinearParams):
    """`y = x · kernel + bias` in FP8, in the place of `nnx.Linear`.

    Variables: `kernel` (in, out) and `bias` (out,), `nnx.Param`; and under delayed scaling `fp8.scale` f32[3] and
    `fp8.amax_history` f32[3, L], `Fp8State`.

    Args:
      in_features, out_features: multiples of 16, unless `recipe` is None.
      use_bias: have a bias.
      dtype: of the result; None is the result type of input and kernel, as in `nnx.Linear`.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers.
      recipe: how tensors are quantized; None is a plain product in `dtype`.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8.
      rngs: has the stream "params", which gives the keys of initializers.
      kernel_metadata, bias_metadata: of the variables.
      lora: the adapter, `nnx.LoRAParam` `lora_a` (in, rank) and `lora_b` (rank, out); None has none. A layer does not
        know its name, so a `Lora` with targets is refused; `convert` takes one.

    Raises:
      ValueError: if an argument is not valid, or a size is not a multiple of 16 with a recipe.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 16))).shape, layer.fp8.amax_history.shape
      ((4, 32), (3, 1024))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = jnp.bfloat16,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        recipe: Recipe | None = DELAYED,
        recompute: bool = False,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NOTHING,
        bias_metadata: Metadata = NOTHING,
        lora: Lora | None = None,
    ):
        self._layer = f"Linear({in_features}, {out_features})"
        sizes = {"in_features": in_features, "out_features": out_features}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, use_bias=use_bias, recompute=recompute)
        check_has_no_targets(self._layer, lora)
        super().__init__(
            (in_features,),
            (out_features,),
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            lora=lora,
        )
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.dtype = use_bias, dtype
        self.recompute = recompute
        self.begin_state(recipe)

    def __call__(self, x: jax.Array, out_sharding: None = None, *, residual: jax.Array | None = None) -> jax.Array:
        """Multiply by the kernel, and add the bias and the residual.

        Args:
          x: (..., in).
          out_sharding: must be None, and is here because Flax passes it. The sharding of the result follows from those
            of `x` and kernel.
          residual: (..., out), added by the GEMM itself; None adds nothing.

        Returns:
          (..., out) in `dtype`.

        Raises:
          ValueError: if `x` or `residual` has another shape, or `out_sharding` is not None.
        """
        check_sharding(self._layer, out_sharding)
        check_input(self._layer, x, self.in_features)
        product = Product.of(self._layer, self.fp8, self)
        dtype = self.result_dtype(x) if self.dtype is None else self.dtype
        with jax.named_scope(product.scope()):
            return product.multiply(x, dtype, residual, self.recompute)


class LayerNormLinear(LinearParams):
    """`Linear(norm(x))` as one differentiable op; parameters of the norm are in `norm`.

    Args:
      in_features, out_features, use_bias, dtype, param_dtype, kernel_init, bias_init, recipe, rngs, lora: as in
        `Linear`.
      norm: "layernorm" (https://arxiv.org/abs/1607.06450) or "rmsnorm" (https://arxiv.org/abs/1910.07467).
      epsilon: of the norm.
      return_input: return `(y, x)`. Where the residual branch continues with this `x`, the norm's backward pass adds
        the branch's gradient itself.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.

    Raises:
      ValueError: if an argument is not valid, or a size is not a multiple of 16 with a recipe.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.LayerNormLinear(16, 32, norm="rmsnorm", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 16))).shape
      (4, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: str = "layernorm",
        use_bias: bool = True,
        epsilon: float = 1e-6,
        return_input: bool = False,
        dtype: Dtype = jnp.bfloat16,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        recipe: Recipe | None = DELAYED,
        recompute: bool = False,
        rngs: nnx.Rngs,
        lora: Lora | None = None,
    ):
        self._layer = f"LayerNormLinear({in_features}, {out_features})"
        sizes = {"in_features": in_features, "out_features": out_features}
        check_fields(
            self._layer,
            sizes,
            recipe,
            dtype,
            param_dtype,
            epsilon,
            use_bias=use_bias,
            recompute=recompute,
            return_input=return_input,
        )
        check_has_no_targets(self._layer, lora)
        self.norm = NormParams(in_features, norm, param_dtype)
        super().__init__(
            (in_features,),
            (out_features,),
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            lora=lora,
        )
        self.in_features, self.out_features = in_features, out_features
        self.epsilon, self.dtype, self.return_input, self.recompute = epsilon, dtype, return_input, recompute
        self.begin_state(recipe)

    def __call__(self, x: jax.Array) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Normalize, multiply by the kernel, and add the bias.

        Args:
          x: (..., in).

        Returns:
          (..., out) in `dtype`; with `return_input` a pair of that and `x`.

        Raises:
          ValueError: if `x` has another shape.
        """
        check_input(self._layer, x, self.in_features)
        product, norm = Product.of(self._layer, self.fp8, self), self.norm.parameters
        with jax.named_scope(product.scope()):
            if product.adapters:  # which read the normalized `x` too
                multiply = partial(product.multiply, dtype=self.dtype, recompute=self.recompute)
                return norm_then(multiply, x, norm, self.epsilon, self.dtype, self.return_input)
            y, amaxes = norm_linear(
                x,
                norm,
                product.parameters,
                product.fp8,
                self.epsilon,
                self.dtype,
                return_input=self.return_input,
                recompute=self.recompute,
            )
        product.stage(amaxes)
        return y
