"""The products of NNX layers: parameters with their adapters, and a product of them with its FP8 state.

LinearParams, GemmState ─Product.of→ Product ─multiply→ result; amaxes staged in the state
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import initializers
from flax.typing import Dtype, Initializer

from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.frozen import FrozenKernel
from jax_fp8.core.lora import FIRST_MATRIX, SECOND_MATRIX, Lora
from jax_fp8.core.types import PyTree
from jax_fp8.nnx.state import GemmState
from jax_fp8.ops.adapters import Adapter, Adapters, adapted_linear
from jax_fp8.ops.parameters import LinearParameters

LECUN, ZEROS = initializers.lecun_normal(), initializers.zeros_init()
Dims = tuple[int, ...]
Metadata = Mapping[str, Any]  # of an `nnx.Variable`
NOTHING: Metadata = MappingProxyType({})


class LinearParams(nnx.Module):
    """The parameters of one linear map.

    Variables: `kernel` (*in_dims, *out_dims) and `bias` (*out_dims,), `nnx.Param`, or None; with an adapter `lora_a`
    (in, rank) and `lora_b` (rank, out), `nnx.LoRAParam`. Stacked layers have leading dims. A kernel is None, too, once
    it is frozen in FP8 (nnx/adapters.py).
    """

    kernel: PyTree  # an nnx.Param or None, as the others
    lora_a: PyTree
    lora_b: PyTree

    def __init__(
        self,
        in_dims: Dims,
        out_dims: Dims,
        *,
        use_bias: bool,
        param_dtype: Dtype,
        kernel_init: Initializer,
        bias_init: Initializer,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NOTHING,
        bias_metadata: Metadata = NOTHING,
        lora: Lora | None = None,
    ):
        self.dims, self.matrix_shape = (*in_dims, *out_dims), (math.prod(in_dims), math.prod(out_dims))
        k, n = self.matrix_shape
        self.param_dtype, self.lora = param_dtype, lora
        kernel = kernel_init(rngs.params(), (k, n), param_dtype)
        stacked = kernel.shape[:-2]
        self.kernel = nnx.data(nnx.Param(kernel.reshape(*stacked, *self.dims), **kernel_metadata))
        bias = bias_init(rngs.params(), (n,), param_dtype).reshape(out_dims) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias, **bias_metadata))
        self.lora_a, self.lora_b = nnx.data(None), nnx.data(None)
        if lora is not None:
            self.lora_a = nnx.data(nnx.LoRAParam(FIRST_MATRIX(rngs.params(), (*stacked, k, lora.rank), param_dtype)))
            self.lora_b = nnx.data(nnx.LoRAParam(SECOND_MATRIX(rngs.params(), (*stacked, lora.rank, n), param_dtype)))

    @property
    def parameters(self) -> LinearParameters:
        """As matrix and vector."""
        kernel: PyTree = FrozenKernel(self.matrix_shape)
        if self.kernel is not None:
            kernel = self.kernel[...]
            kernel = kernel if kernel.ndim == 2 else kernel.reshape(self.matrix_shape)
        bias = None if self.bias is None else self.bias[...]
        return LinearParameters(kernel, bias if bias is None or bias.ndim == 1 else bias.reshape(-1))

    @property
    def adapter(self) -> Adapter | None:
        if self.lora is None:
            return None
        return Adapter(self.lora_a[...], self.lora_b[...], self.lora.scaling)

    def result_dtype(self, x: jax.Array) -> Dtype:
        """The result type of input and kernel, as of Flax's layers."""
        return jax.numpy.result_type(x, self.param_dtype if self.kernel is None else self.kernel[...])


def beside(params: tuple[LinearParams, ...]) -> LinearParameters:
    """The parameters of layers whose kernels stand side by side in one product; of one layer its own."""
    first, *others = (each.parameters for each in params)
    return LinearParameters.beside(first, *others) if others else first


@dataclass(frozen=True)
class Product:
    """What a layer hands to a composite op, and `stage`, which takes the amaxes that the op returns.

    Args:
      layer: its name, until its path is known.
      state: None without FP8, as `fp8`.
    """

    layer: str
    state: GemmState | None
    parameters: LinearParameters
    fp8: Fp8Gemm | None
    adapters: Adapters

    @classmethod
    def of(cls, layer: str, state: GemmState | None, *params: LinearParams) -> "Product":
        """The product with these kernels, side by side."""
        parameters = beside(params)
        adapters = tuple(each.adapter for each in params)
        adapters = adapters if any(adapter is not None for adapter in adapters) else ()
        if state is None:
            return cls(layer, None, parameters, None, adapters)
        if hasattr(state, "qwix_path"):  # qwix marks the modules of a model that it has taken up
            _warn_of_qwix(layer)
        return cls(layer, state, *state.gemm(layer, parameters), adapters)

    def scope(self, inside: int = 0) -> str:
        """The scope in which a layer computes: its path where that is known, as for Linen modules, otherwise its name.

        `inside`: by how many names the path of the GEMM is longer than that of the layer.
        """
        names = (self.layer if self.fp8 is None else self.fp8.layer).split("/")
        return "/".join(names[: len(names) - inside]) or self.layer

    def multiply(
        self, x: jax.Array, dtype: Dtype, residual: jax.Array | None = None, recompute: bool = False
    ) -> PyTree:
        """`linear` of `x`, with the adapters; stages the amaxes."""
        y, amaxes = adapted_linear(
            x, self.parameters, self.fp8, dtype, self.adapters, residual=residual, recompute=recompute
        )
        self.stage(amaxes)
        return y

    def stage(self, amaxes: jax.Array | None) -> None:
        """Stage the forward amaxes that an op has returned; without FP8 there are none."""
        if self.state is not None and self.fp8 is not None and amaxes is not None:
            self.state.stage(self.fp8, amaxes)


@cache
def _warn_of_qwix(layer: str) -> None:
    warnings.warn(
        f"{layer} is in FP8, so qwix gives it no adapter and does not quantize it: apply qwix first, and then convert "
        "the layers that are left, or pass lora to convert",
        stacklevel=4,
    )
