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
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import initializers
from flax.typing import Dtype, Initializer

from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.frozen import FrozenKernel
from jax_fp8.core.lora import FIRST_MATRIX, SECOND_MATRIX, Lora
from jax_fp8.core.paths import UNNAMED
from jax_fp8.core.recipe import Recipe
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

    Variables: `kernel` and `bias`, `nnx.Param`, or None; with an adapter `lora_a` (in, rank) and `lora_b` (rank, out),
    `nnx.LoRAParam`. Stacked layers have leading dims. A kernel is None, too, once it is frozen in FP8
    (nnx/adapters.py).

    The kernel has any dims. Those that are contracted, in one order, are the rows of a matrix, and the others its
    columns. In place of a layer of somebody else, it has the name that it has there, `kernel_name`.
    """

    kernel_name: str = "kernel"
    kernel: PyTree  # an nnx.Param or None, as the others
    bias: PyTree
    lora_a: PyTree
    lora_b: PyTree
    fp8: PyTree

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
        """A kernel (*in_dims, *out_dims) and a bias (*out_dims,), whose initializers get matrix and vector."""
        dims = (*in_dims, *out_dims)
        self.split_dims(dims, tuple(range(len(dims))), len(in_dims))
        kernel = kernel_init(rngs.params(), self.matrix_shape, param_dtype)
        param = nnx.Param(kernel.reshape(*kernel.shape[:-2], *dims), **kernel_metadata)
        bias = bias_init(rngs.params(), self.matrix_shape[1:], param_dtype).reshape(out_dims) if use_bias else None
        self.hold(param, None if bias is None else nnx.Param(bias, **bias_metadata), param_dtype, lora, rngs)

    def split_dims(self, dims: Dims, order: tuple[int, ...], contracted: int) -> None:
        """The sizes of the kernel's dims, and their order in the matrix: first so many that are contracted."""
        sizes = [dims[dim] for dim in order]
        self.dims, self.order = dims, order
        self.matrix_shape = math.prod(sizes[:contracted]), math.prod(sizes[contracted:])

    def hold(
        self, kernel: nnx.Param, bias: nnx.Param | None, param_dtype: Dtype, lora: Lora | None, rngs: nnx.Rngs
    ) -> None:
        """Take the variables, and make those of the adapter."""
        self.set_kernel(kernel)
        self.bias = nnx.data(bias)
        self.param_dtype, self.lora = param_dtype, lora
        self.lora_a, self.lora_b = nnx.data(None), nnx.data(None)
        if lora is not None:
            *stacked, k, n = self.as_matrix(kernel[...]).shape
            self.lora_a = nnx.data(nnx.LoRAParam(FIRST_MATRIX(rngs.params(), (*stacked, k, lora.rank), param_dtype)))
            self.lora_b = nnx.data(nnx.LoRAParam(SECOND_MATRIX(rngs.params(), (*stacked, lora.rank, n), param_dtype)))

    def begin_state(self, recipe: Recipe | None) -> None:
        """Make the FP8 state of a layer with one product. A kernel that is a matrix is found by its layer's path."""
        state = None if recipe is None else GemmState(recipe, self.as_matrix(self.own_kernel[...]))
        self.fp8 = nnx.data(state if self.has_path or state is None else nnx.Dict({UNNAMED: state}))

    @property
    def gemm_state(self) -> GemmState | None:
        return self.fp8[UNNAMED] if isinstance(self.fp8, nnx.Dict) else self.fp8

    @property
    def own_kernel(self) -> PyTree:
        return getattr(self, self.kernel_name)

    def set_kernel(self, kernel: nnx.Param | None) -> None:
        setattr(self, self.kernel_name, nnx.data(kernel))

    @property
    def has_path(self) -> bool:
        """Whether the path of the layer leads to its kernel, a matrix."""
        return self.order == (0, 1) and self.kernel_name == "kernel"

    def as_matrix(self, kernel: jax.Array) -> jax.Array:
        """The kernel as (k, n), of stacked layers with leading dims."""
        if self.order == (0, 1):
            return kernel
        stacked = kernel.ndim - len(self.dims)
        if self.order != tuple(range(len(self.dims))):
            kernel = jnp.transpose(kernel, [*range(stacked), *(stacked + dim for dim in self.order)])
        return kernel.reshape(*kernel.shape[:stacked], *self.matrix_shape)

    def from_matrix(self, matrix: jax.Array) -> jax.Array:
        """The kernel from its matrix (k, n)."""
        ordered = matrix.reshape([self.dims[dim] for dim in self.order])
        return jnp.transpose(ordered, [self.order.index(dim) for dim in range(len(self.dims))])

    @property
    def parameters(self) -> LinearParameters:
        """As matrix and vector."""
        own = self.own_kernel
        kernel: PyTree = FrozenKernel(self.matrix_shape) if own is None else self.as_matrix(own[...])
        bias = None if self.bias is None else self.bias[...]
        return LinearParameters(kernel, bias if bias is None or bias.ndim == 1 else bias.reshape(-1))

    @property
    def adapter(self) -> Adapter | None:
        if self.lora is None:
            return None
        return Adapter(self.lora_a[...], self.lora_b[...], self.lora.scaling)

    def result_dtype(self, x: jax.Array) -> Dtype:
        """The result type of input and kernel, as of Flax's layers."""
        return jnp.result_type(x, self.param_dtype if self.own_kernel is None else self.own_kernel[...])


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
