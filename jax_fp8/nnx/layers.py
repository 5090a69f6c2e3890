"""NNX layers with FP8 GEMMs: parameters, state and wiring, as in the Linen layers of the same names. No numerics."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from flax.typing import Dtype, Initializer

from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.paths import joined_name
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.norm import NormParameters, check_norm
from jax_fp8.nnx.checks import check_fields, check_input, check_sharding
from jax_fp8.nnx.state import GemmState
from jax_fp8.ops.linear import linear
from jax_fp8.ops.norm_linear import norm_linear
from jax_fp8.ops.norm_mlp import norm_mlp
from jax_fp8.ops.parameters import LinearParameters

DELAYED = DelayedScaling()
LECUN, ZEROS = initializers.lecun_normal(), initializers.zeros_init()
Metadata = Mapping[str, Any]  # of an `nnx.Variable`
NOTHING: Metadata = MappingProxyType({})


class LinearParams(nnx.Module):
    """Kernel (in, out) and bias (out,) of one linear map."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool,
        param_dtype: Dtype,
        kernel_init: Initializer,
        bias_init: Initializer,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NOTHING,
        bias_metadata: Metadata = NOTHING,
    ):
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias, **bias_metadata))

    @property
    def parameters(self) -> LinearParameters:
        return LinearParameters(self.kernel[...], None if self.bias is None else self.bias[...])


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
    ):
        self._layer = f"Linear({in_features}, {out_features})"
        sizes = {"in_features": in_features, "out_features": out_features}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, use_bias=use_bias, recompute=recompute)
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.dtype, self.param_dtype = use_bias, dtype, param_dtype
        self.recompute = recompute
        self.fp8 = nnx.data(None if recipe is None else GemmState(recipe, self.kernel[...]))

    def __call__(self, x: jax.Array, out_sharding: None = None, *, residual: jax.Array | None = None) -> jax.Array:
        """(..., in) to (..., out); a residual (..., out) is added by the GEMM itself. The sharding of the result
        follows from those of `x` and kernel. `out_sharding` must be None: it is an argument because Flax passes it.
        """
        check_sharding(self._layer, out_sharding)
        check_input(self._layer, x, self.in_features)
        parameters, gemm = prepare_gemm(self._layer, self.fp8, self.parameters)
        dtype = jnp.result_type(x, self.kernel[...]) if self.dtype is None else self.dtype
        with jax.named_scope(scope_name(self._layer, gemm)):
            y, amaxes = linear(x, parameters, gemm, dtype, residual=residual, recompute=self.recompute)
        stage_in(self.fp8, gemm, amaxes)
        return y


class LayerNormLinear(LinearParams):
    """`Linear(norm(x))` as one differentiable op; parameters of the norm are in `norm`.

    Args:
      in_features, out_features, use_bias, dtype, param_dtype, kernel_init, bias_init, recipe, rngs: as in `Linear`.
      norm: "layernorm" or "rmsnorm".
      epsilon: of the norm.
      return_input: return `(y, x)`. Where the residual branch continues with this `x`, the norm's backward pass adds
        the branch's gradient itself.
      recompute: normalize and quantize again in the backward, instead of keeping the normalized input in FP8.
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
        self.norm = NormParams(in_features, norm, param_dtype)
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        self.in_features, self.out_features = in_features, out_features
        self.epsilon, self.dtype, self.return_input, self.recompute = epsilon, dtype, return_input, recompute
        self.fp8 = nnx.data(None if recipe is None else GemmState(recipe, self.kernel[...]))

    def __call__(self, x: jax.Array) -> Any:  # (..., in) -> (..., out), and with `return_input` (..., in)
        check_input(self._layer, x, self.in_features)
        parameters, gemm = prepare_gemm(self._layer, self.fp8, self.parameters)
        with jax.named_scope(scope_name(self._layer, gemm)):
            y, amaxes = norm_linear(
                x,
                self.norm.parameters,
                parameters,
                gemm,
                self.epsilon,
                self.dtype,
                return_input=self.return_input,
                recompute=self.recompute,
            )
        stage_in(self.fp8, gemm, amaxes)
        return y


class LayerNormMLP(nnx.Module):
    """`down(activation(up(norm(x))))` as one differentiable op; the result is as wide as `x`.

    Variables: those of `norm`, `up` and `down`, and of `gate` where the activation is gated ("swiglu", "geglu",
    "reglu"); gate and up are one GEMM. State: `fp8["up"]` or `fp8["gate+up"]`, and `fp8["down"]`.

    Args:
      in_features, hidden_features: multiples of 16, unless `recipe` is None.
      activation: any that `fp8.LayerNormMLP` knows.
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      norm, use_bias, epsilon, dtype, param_dtype, kernel_init, bias_init, recipe, recompute, rngs: as in
        `LayerNormLinear`.
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
        linear_params = partial(
            LinearParams, use_bias=use_bias, param_dtype=param_dtype, bias_init=bias_init, rngs=rngs
        )

        self.norm = NormParams(in_features, norm, param_dtype)
        self.into = ("gate", "up") if is_gated(activation) else ("up",)
        for name in self.into:
            setattr(self, name, linear_params(in_features, hidden_features, kernel_init=kernel_init))
        self.down = linear_params(hidden_features, in_features, kernel_init=down_init or kernel_init)
        self.in_features, self.hidden_features, self.activation = in_features, hidden_features, activation
        self.epsilon, self.dtype, self.residual, self.recompute = epsilon, dtype, residual, recompute
        kernels = {joined_name(self.into): tuple(getattr(self, name).kernel[...] for name in self.into)}
        kernels["down"] = (self.down.kernel[...],)
        gemms = {} if recipe is None else {name: GemmState(recipe, each) for name, each in kernels.items()}
        self.fp8 = nnx.data(nnx.Dict(gemms) if gemms else None)

    def __call__(self, x: jax.Array) -> jax.Array:  # (..., in) -> (..., in)
        check_input(self._layer, x, self.in_features)
        parts = [getattr(self, name).parameters for name in self.into]
        up = parts[0] if len(parts) == 1 else LinearParameters.beside(*parts)
        states = None if self.fp8 is None else (self.fp8[joined_name(self.into)], self.fp8["down"])
        up_state, down_state = states or (None, None)
        up, up_gemm = prepare_gemm(self._layer, up_state, up)
        down, down_gemm = prepare_gemm(self._layer, down_state, self.down.parameters)
        with jax.named_scope(scope_name(self._layer, up_gemm, inside=1)):
            y, amaxes = norm_mlp(
                x,
                self.norm.parameters,
                up,
                down,
                None if up_gemm is None or down_gemm is None else (up_gemm, down_gemm),
                self.activation,
                self.epsilon,
                self.dtype,
                residual=self.residual,
                recompute=self.recompute,
            )
        if amaxes is not None:
            stage_in(up_state, up_gemm, amaxes[0])
            stage_in(down_state, down_gemm, amaxes[1])
        return y


def prepare_gemm(
    layer: str, state: GemmState | None, parameters: LinearParameters
) -> tuple[LinearParameters, Fp8Gemm | None]:
    """Parameters and FP8 GEMM as the layer's op takes them; without a state there is no FP8 GEMM."""
    return (parameters, None) if state is None else state.gemm(layer, parameters)


def stage_in(state: GemmState | None, gemm: Fp8Gemm | None, amaxes: jax.Array | None) -> None:
    """Stage the forward amaxes that an op has returned; without FP8 there are none."""
    if state is not None and gemm is not None and amaxes is not None:
        state.stage(gemm, amaxes)


def scope_name(layer: str, gemm: Fp8Gemm | None, inside: int = 0) -> str:
    """The scope in which a layer computes: its path where that is known, as for Linen modules, otherwise `layer`.

    `inside`: by how many names the path of the GEMM is longer than that of the layer.
    """
    names = (layer if gemm is None else gemm.layer).split("/")
    return "/".join(names[: len(names) - inside]) or layer
