"""A linear map over several dims as one product of matrices; the projections of `nnx.MultiHeadAttention` are such maps.

x (..., in...)   kernel (in..., out...) ─as matrices→ (rows, k) · (k, n) ─linear→ (..., out...)
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.paths import UNNAMED
from jax_fp8.core.recipe import Recipe
from jax_fp8.nnx.checks import check_fields, check_sharding
from jax_fp8.nnx.layers import DELAYED, LECUN, NOTHING, ZEROS, Metadata
from jax_fp8.nnx.state import GemmState, prepare_gemm, scope_name, stage_in
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

Dims = int | Sequence[int]


class LinearGeneral(nnx.Module):
    """A linear map from some dims of `x` to others in FP8, in the place of `nnx.LinearGeneral`.

    Variables: `kernel` of shape `(*in, *out)` and `bias` of shape `(*out,)`. With a kernel of two dims the state and
    the weight cache are those of a `Linear`. With more dims the state lies in `fp8["~product"]`, and weight caches
    leave the kernel out.

    Args:
      in_features, out_features: sizes. The product of each must be a multiple of 16, unless `recipe` is None.
      axis: the dims of `x` that are contracted, one for each of `in_features`, in ascending order.
      use_bias, dtype, param_dtype, recipe, recompute, rngs, kernel_metadata, bias_metadata: as in `Linear`.
      kernel_init, bias_init: initializers, which get the shapes of the matrices.

    Raises:
      ValueError: if an argument is not valid, `axis` and `in_features` differ in length, or a product of sizes is not a
        multiple of 16 with a recipe.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.LinearGeneral((2, 8), (4, 8), axis=(-2, -1), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((3, 2, 8))).shape
      (3, 4, 8)
    """

    def __init__(
        self,
        in_features: Dims,
        out_features: Dims,
        *,
        axis: Dims = -1,
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
        self.in_features, self.out_features, self.axis = map(_as_tuple, (in_features, out_features, axis))
        self._layer = f"LinearGeneral({self.in_features}, {self.out_features})"
        if len(self.in_features) != len(self.axis):
            raise ValueError(f"{self._layer}: axis must have a dim for each of in_features, got {self.axis}")
        k, n = self._k, self._n = math.prod(self.in_features), math.prod(self.out_features)
        sizes = {"in_features": k, "out_features": n}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, use_bias=use_bias, recompute=recompute)
        kernel = kernel_init(rngs.params(), (k, n), param_dtype)
        dims = (*kernel.shape[:-2], *self.in_features, *self.out_features)
        self.kernel = nnx.Param(kernel.reshape(dims), **kernel_metadata)
        bias = bias_init(rngs.params(), (n,), param_dtype).reshape(self.out_features) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias, **bias_metadata))
        self.use_bias, self.dtype, self.param_dtype, self.recompute = use_bias, dtype, param_dtype, recompute
        state = None if recipe is None else GemmState(recipe, kernel)
        is_matrix = len(self.in_features) == len(self.out_features) == 1
        self.fp8 = nnx.data(state if is_matrix or state is None else nnx.Dict({UNNAMED: state}))

    def __call__(self, x: jax.Array, out_sharding: None = None) -> jax.Array:
        """Multiply by the kernel, and add the bias.

        Args:
          x: an array whose dims `axis` are `in_features`.
          out_sharding: must be None, as in `Linear`.

        Returns:
          The other dims of `x`, then `out_features`, in `dtype`.

        Raises:
          ValueError: if `x` has another shape, or `out_sharding` is not None.
        """
        check_sharding(self._layer, out_sharding)
        contracted = self._contracted(x)
        leading = [dim for dim in range(x.ndim) if dim not in contracted]
        rows = jnp.transpose(x, [*leading, *contracted]).reshape(*(x.shape[dim] for dim in leading), self._k)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...].reshape(self._n)
        state = self.fp8[UNNAMED] if isinstance(self.fp8, nnx.Dict) else self.fp8
        matrix = kernel.reshape(self._k, self._n)
        parameters, gemm = prepare_gemm(self._layer, state, LinearParameters(matrix, bias))
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        with jax.named_scope(scope_name(self._layer, gemm)):
            y, amaxes = linear(rows, parameters, gemm, dtype, recompute=self.recompute)
        stage_in(state, gemm, amaxes)
        return y.reshape(*rows.shape[:-1], *self.out_features)

    def _contracted(self, x: jax.Array) -> list[int]:
        """The dims of `x` that the kernel contracts, ascending."""
        fits = is_array(x) and x.size and x.ndim >= len(self.axis)
        dims = sorted(dim % x.ndim for dim in self.axis) if fits else []  # as Flax sorts them
        if not fits or tuple(x.shape[dim] for dim in dims) != self.in_features:
            raise ValueError(
                f"{self._layer} needs an array whose dims {self.axis} are {self.in_features}, got {describe(x)}; "
                "reshape or cast it"
            )
        return dims


def _as_tuple(sizes: Dims) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
