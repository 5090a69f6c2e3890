"""The MLP of a Transformer layer in NNX, norm included: parameters, state and wiring, as in nn/mlp.py. No numerics."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jax_fp8.core.lora import Lora, check_lora
from jax_fp8.core.paths import joined_name
from jax_fp8.core.recipe import Recipe
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.nnx.checks import check_fields, check_input
from jax_fp8.nnx.layers import DELAYED, NormParams
from jax_fp8.nnx.product import LECUN, ZEROS, LinearParams, Product
from jax_fp8.nnx.state import GemmState
from jax_fp8.ops.norm_mlp import norm_mlp
from jax_fp8.ops.unfused import mlp_by_parts


class LayerNormMLP(nnx.Module):
    """`down(activation(up(norm(x))))` as one differentiable op; the result is as wide as `x`.

    Variables: those of `norm`, `up` and `down`, and of `gate` where the activation is gated ("swiglu", "geglu",
    "reglu"); gate and up are one GEMM. State: `fp8["up"]` or `fp8["gate+up"]`, and `fp8["down"]`.

    Args:
      in_features, hidden_features: multiples of 16, unless `recipe` is None.
      activation: any that `fp8.LayerNormMLP` knows.
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      norm, use_bias, epsilon, dtype, param_dtype, recipe, recompute, rngs: as in `LayerNormLinear`.
      kernel_init, bias_init: initializers, as in `Linear`.
      lora: adapters of `gate`, `up` and `down`, or of those among its targets; None has none.

    Raises:
      ValueError: if an argument is not valid, or a size is not a multiple of 16 with a recipe.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.LayerNormMLP(16, 32, activation="swiglu", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 16))).shape, sorted(layer.fp8)
      ((4, 16), ['down', 'gate+up'])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str = "gelu",
        norm: str = "layernorm",
        use_bias: bool = True,
        epsilon: float = 1e-6,
        residual: bool = False,
        dtype: Dtype = jnp.bfloat16,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        down_init: Initializer | None = None,
        recipe: Recipe | None = DELAYED,
        recompute: bool = False,
        rngs: nnx.Rngs,
        lora: Lora | None = None,
    ):
        self._layer = f"LayerNormMLP({in_features}, {hidden_features})"
        sizes = {"in_features": in_features, "hidden_features": hidden_features}
        check_fields(
            self._layer,
            sizes,
            recipe,
            dtype,
            param_dtype,
            epsilon,
            use_bias=use_bias,
            recompute=recompute,
            residual=residual,
        )
        check_lora(self._layer, lora)

        def params(name: str, rows: int, columns: int, init: Initializer) -> LinearParams:
            return LinearParams(
                (rows,),
                (columns,),
                use_bias=use_bias,
                param_dtype=param_dtype,
                kernel_init=init,
                bias_init=bias_init,
                rngs=rngs,
                lora=lora if lora is not None and lora.is_for(name) else None,
            )

        self.norm = NormParams(in_features, norm, param_dtype)
        self.into = ("gate", "up") if is_gated(activation) else ("up",)
        for name in self.into:
            setattr(self, name, params(name, in_features, hidden_features, kernel_init))
        self.down = params("down", hidden_features, in_features, down_init or kernel_init)
        self.in_features, self.hidden_features, self.activation = in_features, hidden_features, activation
        self.epsilon, self.dtype, self.residual, self.recompute = epsilon, dtype, residual, recompute
        kernels = {joined_name(self.into): tuple(getattr(self, name).kernel[...] for name in self.into)}
        kernels["down"] = (self.down.kernel[...],)
        gemms = {} if recipe is None else {name: GemmState(recipe, each) for name, each in kernels.items()}
        self.fp8 = nnx.data(nnx.Dict(gemms) if gemms else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the MLP.

        Args:
          x: (..., in).

        Returns:
          (..., in) in `dtype`.

        Raises:
          ValueError: if `x` has another shape.
        """
        check_input(self._layer, x, self.in_features)
        states = (None, None) if self.fp8 is None else (self.fp8[joined_name(self.into)], self.fp8["down"])
        up = Product.of(self._layer, states[0], *(getattr(self, name) for name in self.into))
        down = Product.of(self._layer, states[1], self.down)
        norm, fields = self.norm.parameters, (self.activation, self.epsilon, self.dtype)
        with jax.named_scope(up.scope(inside=1)):
            if up.adapters or down.adapters:

                def multiply_down(rows: jax.Array, added: jax.Array | None) -> jax.Array:
                    return down.multiply(rows, self.dtype, added, self.recompute)

                multiply_up = partial(up.multiply, dtype=self.dtype, recompute=self.recompute)
                return mlp_by_parts(multiply_up, multiply_down, x, norm, *fields, self.residual)
            y, amaxes = norm_mlp(
                x,
                norm,
                up.parameters,
                down.parameters,
                (up.fp8, down.fp8) if up.fp8 and down.fp8 else None,
                *fields,
                residual=self.residual,
                recompute=self.recompute,
            )
        if amaxes is not None:
            up.stage(amaxes[0])
            down.stage(amaxes[1])
        return y
