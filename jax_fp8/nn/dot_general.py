"""FP8 inside of Flax's own layers: what `nn.Dense` and `nn.DenseGeneral` call to multiply by their kernel.

    x (..., in)   kernel (in..., out...) ─as matrices→ (rows, k) · (k, n) ─linear→ (..., out...)

Any dims may be contracted; batch dims are refused. Flax's layers contract the last dims of `x` with the first of the
kernel. Then the matrices are reshapes, and nothing moves in memory.

In `nn.Dense` and `nn.DenseGeneral` the kernel is read from the params, before Flax casts it. If it is a matrix, the
GEMM belongs to that layer: state and weight cache lie where those of `fp8.Dense` do. If it is not, the GEMM has a name
of its own that leads to no kernel (core/paths.py). The same holds in any other layer, which may have changed its kernel
before the product.
"""

import inspect
import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax

from jax_fp8.core.checks import check_bool
from jax_fp8.core.paths import UNNAMED, check_layer_name
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.nn.checks import check_dtype
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.gemm import GemmState, declare_state
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

Dims = Sequence[int]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]  # ((contracted of x, of kernel), (batch dims))


class DotGeneral(nn.Module):
    """A product with a kernel in FP8, in the place of `lax.dot_general` inside Flax's own layers.

        nn.Dense(features, dot_general_cls=functools.partial(fp8.DotGeneral, recipe=recipe))

    Also for `nn.DenseGeneral`, and as `qkv_dot_general_cls` and `out_dot_general_cls` of Flax's attention. The layer
    adds its bias afterwards, in its dtype. Like every layer here, this keeps its state in the collection "fp8".

    Args:
      recipe: how tensors are quantized; None is `lax.dot_general`.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = nn.Dense(32, dot_general_cls=fp8.DotGeneral), jnp.ones((4, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> sorted(variables), layer.apply(variables, x).shape
      (['fp8', 'params'], (4, 32))
    """

    recipe: Recipe | None = DelayedScaling()
    recompute: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Multiply as `lax.dot_general`; the second operand is the kernel, and no dims are batch dims.

        Args:
          x: of any shape, whose contracted dims have a product that is a multiple of 16.
          kernel: of any shape; so has each product of its contracted and of its other dims.
          dimension_numbers: `((dims of x, dims of kernel), ((), ()))`, the dims that are contracted.
          precision: None, or another form of the default.
          preferred_element_type: of the result; None is the result type of both operands.

        Returns:
          The other dims of `x`, then those of `kernel`, in that dtype.

        Raises:
          ValueError: with a recipe, if there are batch dims or none are contracted, sizes are not multiples of 16, or
            `precision` or the dtype is another one.
        """
        check_recipe(self.recipe)
        check_bool(f"{self._layer}: recompute", self.recompute)
        if self.recipe is None:
            return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
        x_contracted, kernel_contracted = self._contracted(x, kernel, dimension_numbers)
        self._check_precision(precision)
        dtype = jnp.result_type(x, kernel) if preferred_element_type is None else preferred_element_type
        check_dtype(f"{self._layer}: dtype", dtype)
        leading = [dim for dim in range(x.ndim) if dim not in x_contracted]
        columns = [dim for dim in range(kernel.ndim) if dim not in kernel_contracted]
        rows = _transposed(x, [*leading, *x_contracted]).reshape(*(x.shape[dim] for dim in leading), -1)
        gemm = self._declare(kernel, kernel_contracted, columns)
        y, amaxes = linear(rows, gemm.parameters, gemm.fp8, dtype, recompute=self.recompute)
        gemm.stage(amaxes)
        return y.reshape(*rows.shape[:-1], *(kernel.shape[dim] for dim in columns))

    def _declare(self, kernel: jax.Array, contracted: list[int], columns: list[int]) -> DeclaredGemm:
        """The GEMM by this kernel, by its param where the layer is Flax's own."""
        layer = self.parent
        param = _kernel_param(layer)
        if param is not None and param.shape == kernel.shape:
            kernel = param
            if isinstance(layer, nn.Module) and kernel.ndim == 2 and contracted == [0]:
                check_layer_name(self.path[:-1])
                return declare_state(layer, LinearParameters(kernel, None), self.recipe, None)
        k = math.prod(kernel.shape[dim] for dim in contracted)
        matrix = _transposed(kernel, [*contracted, *columns]).reshape(k, -1)
        product = GemmState(self.recipe, self._layer, name=UNNAMED)
        return product(LinearParameters(matrix, None), None)

    @property
    def _layer(self) -> str:
        """The layer around this product, for messages."""
        return "/".join(self.path[:-1]) or type(self.parent or self).__name__

    def _contracted(
        self, x: jax.Array, kernel: jax.Array, dimension_numbers: DimensionNumbers
    ) -> tuple[list[int], list[int]]:
        """The contracted dims of both operands, in pairs, sorted by the dim of the kernel."""
        (x_dims, kernel_dims), (batch, _) = dimension_numbers
        if len(batch):
            raise ValueError(
                f"{self._layer}: an FP8 product has no batch dims, got {dimension_numbers} for {x.shape} and "
                f"{kernel.shape}; leave dot_general_cls out of this layer"
            )
        pairs = sorted((b % kernel.ndim, a % x.ndim) for a, b in zip(x_dims, kernel_dims, strict=True))
        if not pairs:
            raise ValueError(
                f"{self._layer}: an FP8 product contracts at least one dim, got {dimension_numbers}; "
                "leave dot_general_cls out of this layer"
            )
        return [dim for _, dim in pairs], [dim for dim, _ in pairs]

    def _check_precision(self, precision: lax.PrecisionLike) -> None:
        if precision not in (None, "default", lax.Precision.DEFAULT):
            raise ValueError(
                f"{self._layer}: precision must be None where the product is in FP8, got {precision!r}; leave it out, "
                "and say how GEMMs accumulate in the recipe's split_accumulator"
            )


def _kernel_param(layer: object) -> jax.Array | None:
    """The param `kernel` of `nn.Dense` or `nn.DenseGeneral`; None for other layers, and for subclasses that override
    `__call__`.
    """
    calls = [inspect.unwrap(cls.__call__) for cls in (nn.Dense, nn.DenseGeneral)]
    if not isinstance(layer, nn.Dense | nn.DenseGeneral) or inspect.unwrap(type(layer).__call__) not in calls:
        return None
    return meta.unbox(layer.get_variable("params", "kernel"))


def _transposed(x: jax.Array, order: list[int]) -> jax.Array:
    return x if order == [*range(x.ndim)] else jnp.transpose(x, order)
