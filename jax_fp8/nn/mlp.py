"""The MLP of a Transformer layer, norm included."""

import flax.linen as nn
import jax
from flax.typing import Initializer

from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding
from jax_fp8.kernels.activation import is_gated
from jax_fp8.nn.checks import check_layer
from jax_fp8.nn.dense import NormVariables
from jax_fp8.nn.dropout import drop, drops
from jax_fp8.nn.gemm import Fp8Module, declare_gemm_of
from jax_fp8.ops.norm_mlp import norm_mlp


class LayerNormMLP(Fp8Module):
    """`down(activation(up(norm(x))))` as one differentiable op, back to the width of `x`.

    Variables: `params/{norm, up, down}` and `fp8/{up, down}`. A gated activation ("swiglu", "geglu", "reglu") is
    `down(f(gate(norm(x))) * up(norm(x)))`: `params/gate` and `params/up` each (in, hidden_features), multiplied as one
    GEMM with the state `fp8/gate+up`. Columns of `gate` and `up` and rows of `down` can be split over devices without
    moving any.

    Args:
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.
      dropout_rate: how much of `down(...)` is dropped, by the random stream "dropout"; the residual is added afterwards
        then, in a pass of its own: see ops/dropout.py.
      deterministic: True drops nothing. It or the argument must be given where there is a dropout_rate.
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

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """(..., in) to (..., in); `deterministic` True drops nothing, None: the field says so."""
        check_layer(self, x, ("hidden_features",))
        features, hidden = x.shape[-1], self.hidden_features
        norm = NormVariables(self.norm, self.param_dtype, self.logical_axes, name="norm")(features)
        into = ("gate", "up") if is_gated(self.activation) else ("up",)
        by_columns = ParamSharding(COLUMNS, hidden, "hidden features")
        by_rows = ParamSharding(ROWS, hidden, "hidden features")
        up = declare_gemm_of(self, into, features, (hidden,) * len(into), (by_columns,) * len(into))
        own_hidden = up.parameters.widths[0]  # in a step on shards, those of this device
        down_init = self.down_init or self.kernel_init
        down = declare_gemm_of(self, ("down",), own_hidden, (features,), (by_rows,), kernel_init=down_init)
        gemms = (up.fp8, down.fp8) if up.fp8 and down.fp8 else None
        is_dropped = drops(self, deterministic)
        options = {"residual": self.residual and not is_dropped, "recompute": self.recompute, "tensor": up.tensor}
        parameters = norm, up.parameters, down.parameters
        y, amaxes = norm_mlp(x, *parameters, gemms, self.activation, self.epsilon, self.dtype, **options)
        if amaxes is not None:
            up.stage(amaxes[0])
            down.stage(amaxes[1])
        if is_dropped:
            return drop(self, y, self.dropout_rate, x.astype(self.dtype) if self.residual else None)
        return y
