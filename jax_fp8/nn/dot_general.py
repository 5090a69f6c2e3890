"""FP8 inside of Flax's own layers: what `nn.Dense` and `nn.DenseGeneral` call to multiply by their kernel.

    x (..., in)   kernel (in..., out...) ─as matrices→ (rows, k) · (k, n) ─linear→ (..., out...)

Any dims are contracted, and none is shared by both. Where these are the last of `x` and the first of the kernel, as in
Flax's layers, matrices are the same bytes and nothing is moved.

The kernel of `nn.Dense` and `nn.DenseGeneral` is read as it is in the params, before Flax casts it. If it is a matrix,
the GEMM is that layer's: state and weight cache lie where those of `fp8.Dense` do. Otherwise the GEMM has a name of its
own, which leads to no kernel (core/paths.py), and so it has in other layers, which may have changed theirs before.
"""

import inspect
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax

from jax_fp8.core.checks import check_bool
from jax_fp8.core.paths import UNNAMED, check_layer_name
from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.nn.checks import check_dtype
from jax_fp8.nn.gemm import DeclaredGemm, GemmState, declare_state
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

DimensionNumbers = tuple[tuple[Any, Any], tuple[Any, Any]]


class DotGeneral(nn.Module):
    """A product with a kernel in FP8, in the place of `lax.dot_general`:

        nn.Dense(features, dot_general_cls=functools.partial(fp8.DotGeneral, recipe=recipe))

    Also for `nn.DenseGeneral`, and as `qkv_dot_general_cls` and `out_dot_general_cls` of Flax's attention. The layer
    adds its bias afterwards, in its dtype. State is in the collection "fp8", as that of all layers here.

    Args:
      recipe: how tensors are quantized; None is `lax.dot_general`.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8.
    """

    recipe: Recipe | None = DelayedScaling()
    recompute: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """As `lax.dot_general`; the second operand is the kernel, and no dims are batch dims."""
        check_recipe(self.recipe)
        check_bool(f"{self._layer}: recompute", self.recompute)
        if self.recipe is None:
            return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
        contracted, of_kernel = self._contracted(x, kernel, dimension_numbers)
        self._check_precision(precision)
        dtype = jnp.result_type(x, kernel) if preferred_element_type is None else preferred_element_type
        check_dtype(f"{self._layer}: dtype", dtype)
        kept = [dim for dim in range(x.ndim) if dim not in contracted]
        columns = [dim for dim in range(kernel.ndim) if dim not in of_kernel]
        rows = _moved(x, [*kept, *contracted]).reshape(*(x.shape[dim] for dim in kept), -1)
        gemm = self._declared(kernel, of_kernel, columns)
        y, amaxes = linear(rows, gemm.parameters, gemm.fp8, dtype, recompute=self.recompute)
        gemm.stage(amaxes)
        return y.reshape(*rows.shape[:-1], *(kernel.shape[dim] for dim in columns))

    def _declared(self, kernel, contracted, columns) -> DeclaredGemm:
        own = _own_kernel(self.parent)
        if own is not None and own.shape == kernel.shape:
            kernel = own
            if kernel.ndim == 2 and contracted == [0]:
                check_layer_name(self.path[:-1])
                parameters = LinearParameters(kernel, None)
                return declare_state(self.parent, parameters, self.recipe, None)  # type: ignore[arg-type]
        k = math.prod(kernel.shape[dim] for dim in contracted)
        matrix = _moved(kernel, [*contracted, *columns]).reshape(k, -1)
        product = GemmState(self.recipe, self._layer, name=UNNAMED)
        return product(LinearParameters(matrix, None), None)

    @property
    def _layer(self) -> str:
        """The layer that this is in, for messages."""
        return "/".join(self.path[:-1]) or type(self.parent or self).__name__

    def _contracted(self, x, kernel, dimension_numbers) -> tuple[list[int], list[int]]:
        """The dims of both operands, in an order in which those of the kernel ascend."""
        (of_x, of_kernel), (batch, _) = dimension_numbers
        if len(batch):
            raise ValueError(
                f"{self._layer}: an FP8 product has no batch dims, got {dimension_numbers} for {x.shape} and "
                f"{kernel.shape}; leave dot_general_cls out of this layer"
            )
        pairs = sorted((b % kernel.ndim, a % x.ndim) for a, b in zip(of_x, of_kernel, strict=True))
        if not pairs:
            raise ValueError(
                f"{self._layer}: an FP8 product contracts at least one dim, got {dimension_numbers}; "
                "leave dot_general_cls out of this layer"
            )
        return [dim for _, dim in pairs], [dim for dim, _ in pairs]

    def _check_precision(self, precision):
        if precision not in (None, "default", lax.Precision.DEFAULT):
            raise ValueError(
                f"{self._layer}: precision must be None where the product is in FP8, got {precision!r}; leave it out, "
                "and say how GEMMs accumulate in the recipe's split_accumulator"
            )


def _own_kernel(layer: Any) -> jax.Array | None:
    """The kernel of a Flax layer as it is in the params; None of any other layer, also of one that overrides how Flax's
    is called.
    """
    calls = [inspect.unwrap(cls.__call__) for cls in (nn.Dense, nn.DenseGeneral)]
    if not callable(layer) or inspect.unwrap(type(layer).__call__) not in calls:
        return None
    return meta.unbox(layer.get_variable("params", "kernel"))


def _moved(x: jax.Array, order: list[int]) -> jax.Array:
    return x if order == [*range(x.ndim)] else jnp.transpose(x, order)
