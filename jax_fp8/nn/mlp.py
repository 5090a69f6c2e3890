"""The MLP of a Transformer layer, norm included."""

from functools import partial

import flax.linen as nn
import jax
from flax.typing import Initializer

from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.norm import NormParameters
from jax_fp8.nn.branch import check_branch, end_branch, ends_in_gemm, norm_before
from jax_fp8.nn.checks import check_layer
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.dense import NormVariables
from jax_fp8.nn.gemm import Fp8Module, declare_gemm_of, shared_fields
from jax_fp8.ops.norm_mlp import norm_mlp
from jax_fp8.ops.unfused import mlp_by_parts


class LayerNormMLP(Fp8Module):
    """An MLP with its norm, `down(activation(up(norm(x))))`, as one differentiable op; the result is as wide as `x`.

    Variables: `params/{norm, up, down}` and `fp8/{up, down}`. A gated activation ("swiglu", "geglu", "reglu") is
    `down(f(gate(norm(x))) * up(norm(x)))` (https://arxiv.org/abs/2002.05202): `params/gate` and `params/up` each
    (in, hidden_features), multiplied as one GEMM with the state `fp8/gate+up`. Devices can split the columns of `gate`
    and `up` and the rows of `down`, and nothing moves.

    Args:
      hidden_features: of the activation; with a recipe a multiple of 16, as the features of `x`.
      activation: "gelu" (by tanh), "gelu_exact", "silu", "relu", "squared_relu", or a gated one.
      norm, use_bias, epsilon: as in `LayerNormDense`.
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.
      dropout_rate: the fraction of `down(...)` that is dropped, by the random stream "dropout". The residual is then
        added afterwards, in a pass of its own: see ops/dropout.py.
      norm_placement, zero_centered_scale, residual_multiplier: as in `SelfAttention`. Without a norm before it, the MLP
        is not one op, but one for each part.
      deterministic: True turns dropout off. With a dropout_rate, either this field or the argument must be set.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.LayerNormMLP(64, activation="swiglu"), jnp.ones((4, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> variables["params"]["gate"]["kernel"].shape, layer.apply(variables, x).shape
      ((16, 64), (4, 16))
    """

    hidden_features: int
    activation: str = "gelu"
    norm: str = "layernorm"
    use_bias: bool = True
    epsilon: float = 1e-6
    down_init: Initializer | None = None
    residual: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    norm_placement: str = "before"
    zero_centered_scale: bool = False
    residual_multiplier: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """Compute the MLP.

        Args:
          x: (..., in), real numbers of any dtype.
          deterministic: as in the fields; None leaves the choice to the field.

        Returns:
          (..., in) in `dtype`.

        Raises:
          ValueError: if a field is not valid, sizes are not multiples of 16 with a recipe, `x` is not such an array, or
            the variables lack the state of the recipe; or if a layer with dropout has `deterministic` twice, or not at
            all.
        """
        check_layer(self, x, ("hidden_features",))
        check_branch(self)
        features = x.shape[-1]
        has_norm = norm_before(self) is not None
        norm = NormVariables(**shared_fields(self, NormVariables), name="norm")(features) if has_norm else None
        up, down = declare_mlp(self, features, self.hidden_features)
        is_last = ends_in_gemm(self, deterministic)
        y = multiply_mlp(self, x, norm, up, down, self.residual and is_last)
        return y if is_last else end_branch(self, y, x.astype(self.dtype) if self.residual else None, deterministic)


def declare_mlp(module: Fp8Module, features: int, hidden: int) -> tuple[DeclaredGemm, DeclaredGemm]:
    """The GEMMs of gate and up, and of down, in a module with the fields of `LayerNormMLP`."""
    names, use_bias = ("gate", "up") if is_gated(module.activation) else ("up",), module.use_bias
    by_columns = ParamSharding(COLUMNS, hidden, "hidden features")
    by_rows = ParamSharding(ROWS, hidden, "hidden features")
    widths, shardings = (hidden,) * len(names), (by_columns,) * len(names)
    up = declare_gemm_of(module, names, features, widths, shardings, use_bias=use_bias)
    own_hidden = up.parameters.widths[0]  # in a step on shards, those of this device
    down = declare_gemm_of(
        module, ("down",), own_hidden, (features,), (by_rows,), use_bias=use_bias, kernel_init=module.down_init
    )
    return up, down


def multiply_mlp(
    module: Fp8Module, x: jax.Array, norm: NormParameters | None, up: DeclaredGemm, down: DeclaredGemm, residual: bool
) -> jax.Array:
    """`down(activation(up(norm(x))))`, with `residual` plus `x`: one op. With adapters or without a norm it is an op
    for each part. So it is where only one of both GEMMs is in FP8.
    """
    activation, epsilon, dtype, recompute = module.activation, module.epsilon, module.dtype, module.recompute
    if norm is None or up.adapters or down.adapters or (up.fp8 is None) != (down.fp8 is None):
        multiply_up = partial(up.multiply, dtype=dtype, recompute=recompute)

        def multiply_down(rows: jax.Array, added: jax.Array | None) -> jax.Array:
            return down.multiply(rows, dtype, added, recompute)

        return mlp_by_parts(multiply_up, multiply_down, x, norm, activation, epsilon, dtype, residual)
    y, amaxes = norm_mlp(
        x,
        norm,
        up.parameters,
        down.parameters,
        (up.fp8, down.fp8) if up.fp8 and down.fp8 else None,
        activation,
        epsilon,
        dtype,
        residual=residual,
        recompute=recompute,
        tensor=up.tensor,
    )
    if amaxes is not None:
        up.stage(amaxes[0])
        down.stage(amaxes[1])
    return y
