"""NNX layers with FP8 GEMMs: parameters, state and wiring, as in the Linen layers of the same names. No numerics."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from flax.typing import Dtype, Initializer

from jax_fp8.core.checks import check_flags, check_integer, check_number, describe, is_array
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.paths import joined_name
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.norm import NormParameters, check_norm
from jax_fp8.nn.checks import check_dtype
from jax_fp8.nnx.state import GemmState
from jax_fp8.ops.layer_gemm import check_multiples_of_16
from jax_fp8.ops.linear import linear
from jax_fp8.ops.norm_linear import norm_linear
from jax_fp8.ops.norm_mlp import norm_mlp
from jax_fp8.ops.parameters import LinearParameters

DELAYED = DelayedScaling()
LECUN, ZEROS = initializers.lecun_normal(), initializers.zeros_init()
NOTHING: Mapping[str, Any] = MappingProxyType({})


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
        kernel_metadata: Mapping[str, Any] = NOTHING,
        bias_metadata: Mapping[str, Any] = NOTHING,
    ):
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, **kernel_metadata)
        bias = bias_init(rngs.params(), (out_features,), param_dtype) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias, **bias_metadata))

    @property
    def parameters(self) -> LinearParameters:
        return LinearParameters(self.kernel[...], None if self.bias is None else self.bias[...])


class NormParams(nnx.Module):
    """Scale and, of LayerNorm, bias, each (features,)."""

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
      dtype: of the result; None as in `nnx.Linear`, by the dtypes of input and kernel.
      param_dtype: of the parameters.
      kernel_init, bias_init: initializers.
      recipe: how tensors are quantized; None is a plain product in `dtype`.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8.
      rngs: where keys come from, the stream "params".
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
        kernel_metadata: Mapping[str, Any] = NOTHING,
        bias_metadata: Mapping[str, Any] = NOTHING,
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
        """(..., in) to (..., out); a residual (..., out) is added by the GEMM itself. The result is split as `x` and
        kernel say: `out_sharding` is there as Flax passes it, and must be None.
        """
        check_sharding(self._layer, out_sharding)
        check_input(self._layer, x, self.in_features)
        parameters, gemm = gemm_of(self._layer, self.fp8, self.parameters)
        dtype = jnp.result_type(x, self.kernel[...]) if self.dtype is None else self.dtype
        with jax.named_scope(scope_of(self._layer, gemm)):
            y, amaxes = linear(x, parameters, gemm, dtype, residual=residual, recompute=self.recompute)
        stage_in(self.fp8, gemm, amaxes)
        return y


class LayerNormLinear(LinearParams):
    """`Linear(norm(x))` as one differentiable op; parameters of the norm are in `norm`.

    Args:
      in_features, out_features, use_bias, dtype, param_dtype, kernel_init, bias_init, recipe, rngs: as of `Linear`.
      norm: "layernorm" or "rmsnorm".
      epsilon: of the norm.
      return_input: return `(y, x)`. A residual branch that goes on with this `x` has its gradient added in the norm's
        backward pass.
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
        flags = {"use_bias": use_bias, "recompute": recompute, "return_input": return_input}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, epsilon, **flags)
        self.norm = NormParams(in_features, norm, param_dtype)
        inits: Any = {"kernel_init": kernel_init, "bias_init": bias_init}
        super().__init__(in_features, out_features, use_bias=use_bias, param_dtype=param_dtype, rngs=rngs, **inits)
        self.in_features, self.out_features = in_features, out_features
        self.epsilon, self.dtype, self.return_input, self.recompute = epsilon, dtype, return_input, recompute
        self.fp8 = nnx.data(None if recipe is None else GemmState(recipe, self.kernel[...]))

    def __call__(self, x: jax.Array) -> Any:  # (..., in) -> (..., out), and with `return_input` (..., in)
        check_input(self._layer, x, self.in_features)
        parameters, gemm = gemm_of(self._layer, self.fp8, self.parameters)
        options: Any = {"return_input": self.return_input, "recompute": self.recompute}
        with jax.named_scope(scope_of(self._layer, gemm)):
            y, amaxes = norm_linear(x, self.norm.parameters, parameters, gemm, self.epsilon, self.dtype, **options)
        stage_in(self.fp8, gemm, amaxes)
        return y


class LayerNormMLP(nnx.Module):
    """`down(activation(up(norm(x))))` as one differentiable op, back to the width of `x`.

    Variables: those of `norm`, `up` and `down`, and of `gate` where the activation is gated ("swiglu", "geglu",
    "reglu"); gate and up are one GEMM. State: `fp8["up"]` or `fp8["gate+up"]`, and `fp8["down"]`.

    Args:
      in_features, hidden_features: multiples of 16, unless `recipe` is None.
      activation: "gelu", or another that `fp8.LayerNormMLP` knows.
      down_init: initializer of the kernel of `down`; None is `kernel_init`.
      residual: return `x + down(...)`, added by the last GEMM, and its gradient by the norm's backward.
      norm, use_bias, epsilon, dtype, param_dtype, kernel_init, bias_init, recipe, recompute, rngs: as of
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
        flags = {"use_bias": use_bias, "recompute": recompute, "residual": residual}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, epsilon, **flags)

        def linear_params(rows, columns, init):
            others: Any = {"use_bias": use_bias, "param_dtype": param_dtype, "bias_init": bias_init, "rngs": rngs}
            return LinearParams(rows, columns, kernel_init=init, **others)

        self.norm = NormParams(in_features, norm, param_dtype)
        self.into = ("gate", "up") if is_gated(activation) else ("up",)
        for name in self.into:
            setattr(self, name, linear_params(in_features, hidden_features, kernel_init))
        self.down = linear_params(hidden_features, in_features, down_init or kernel_init)
        self.in_features, self.hidden_features, self.activation = in_features, hidden_features, activation
        self.epsilon, self.dtype, self.residual, self.recompute = epsilon, dtype, residual, recompute
        kernels = {joined_name(self.into): tuple(getattr(self, name).kernel[...] for name in self.into)}
        kernels["down"] = (self.down.kernel[...],)
        gemms = {} if recipe is None else {name: GemmState(recipe, of) for name, of in kernels.items()}
        self.fp8 = nnx.data(nnx.Dict(gemms) if gemms else None)

    def __call__(self, x: jax.Array) -> jax.Array:  # (..., in) -> (..., in)
        check_input(self._layer, x, self.in_features)
        up = [getattr(self, name).parameters for name in self.into]
        into = up[0] if len(up) == 1 else LinearParameters.beside(*up)
        states = None if self.fp8 is None else (self.fp8[joined_name(self.into)], self.fp8["down"])
        up_state, down_state = states or (None, None)
        into, up_gemm = gemm_of(self._layer, up_state, into)
        down, down_gemm = gemm_of(self._layer, down_state, self.down.parameters)
        gemms = None if up_gemm is None or down_gemm is None else (up_gemm, down_gemm)
        options: Any = {"residual": self.residual, "recompute": self.recompute}
        parameters = self.norm.parameters, into, down
        with jax.named_scope(scope_of(self._layer, up_gemm, inside=1)):
            y, amaxes = norm_mlp(x, *parameters, gemms, self.activation, self.epsilon, self.dtype, **options)
        if amaxes is not None:
            stage_in(up_state, up_gemm, amaxes[0])
            stage_in(down_state, down_gemm, amaxes[1])
        return y


def gemm_of(
    layer: str, state: GemmState | None, parameters: LinearParameters
) -> tuple[LinearParameters, Fp8Gemm | None]:
    """What a layer hands to its op; no GEMM in FP8 without a state."""
    return (parameters, None) if state is None else state.gemm(layer, parameters)


def stage_in(state: GemmState | None, gemm: Fp8Gemm | None, amaxes: jax.Array | None) -> None:
    """Stage what an op has returned of its forward, if it is in FP8."""
    if state is not None and gemm is not None and amaxes is not None:
        state.stage(gemm, amaxes)


def scope_of(layer: str, gemm: Fp8Gemm | None, inside: int = 0) -> str:
    """The name of what a layer computes: its path, if it is known, as Flax's Linen modules have it; the GEMM may be so
    many names deeper.
    """
    names = (layer if gemm is None else gemm.layer).split("/")
    return "/".join(names[: len(names) - inside]) or layer


def check_fields(
    layer: str,
    sizes: Mapping[str, Any],
    recipe: Recipe | None,
    dtype: Any,
    param_dtype: Any,
    epsilon: Any = 0.0,
    **flags: Any,
) -> None:
    """Raise unless a layer can be made of this; `sizes` are rows and columns of its kernel."""
    for name, size in sizes.items():
        check_integer(f"{layer}: {name}", size)
    check_recipe(recipe)
    if recipe is not None:
        rows, columns = sizes.values()
        check_multiples_of_16(layer, rows, (columns,))
    if dtype is not None:
        check_dtype(f"{layer}: dtype", dtype)
    check_dtype(f"{layer}: param_dtype", param_dtype)
    check_number(f"{layer}: epsilon", epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
    check_flags(**{f"{layer}: {name}": flag for name, flag in flags.items()})


def check_sharding(layer: str, out_sharding: Any) -> None:
    """Raise where a result is asked to lie otherwise than its operands say."""
    if out_sharding is not None:
        raise ValueError(
            f"{layer}: out_sharding must be None where the product is in FP8, got {out_sharding!r}; use jax.reshard on "
            "the result"
        )


def check_input(layer: str, x: Any, features: int) -> None:
    """Raise unless this is an array of so many features."""
    if not is_array(x) or not x.ndim or x.shape[-1] != features or not x.size:
        raise ValueError(f"{layer} needs an array whose last dim is {features}, got {describe(x)}; reshape or cast it")
