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
from jax_fp8.core.lora import Lora
from jax_fp8.core.recipe import Recipe
from jax_fp8.nnx.checks import check_fields, check_has_no_targets, check_sharding
from jax_fp8.nnx.layers import DELAYED
from jax_fp8.nnx.product import LECUN, NOTHING, ZEROS, LinearParams, Metadata, Product

Dims = int | Sequence[int]


class LinearGeneral(LinearParams):
    """A linear map from some dims of `x` to others in FP8, in the place of `nnx.LinearGeneral`.

    Variables: `kernel` of shape `(*in, *out)` and `bias` of shape `(*out,)`. With a kernel of two dims the state and
    the weight cache are those of a `Linear`. With more dims the state lies in `fp8["~product"]`, and weight caches
    leave the kernel out.

    Args:
      in_features, out_features: sizes. The product of each must be a multiple of 16, unless `recipe` is None.
      axis: the dims of `x` that are contracted, one for each of `in_features`, in ascending order.
      use_bias, dtype, param_dtype, recipe, recompute, rngs, kernel_metadata, bias_metadata, lora: as in `Linear`. An
        adapter has the sizes of the kernel as a matrix.
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
        lora: Lora | None = None,
    ):
        self.in_features, self.out_features, self.axis = map(_as_tuple, (in_features, out_features, axis))
        self._layer = f"LinearGeneral({self.in_features}, {self.out_features})"
        if len(self.in_features) != len(self.axis):
            raise ValueError(f"{self._layer}: axis must have a dim for each of in_features, got {self.axis}")
        sizes = {"in_features": math.prod(self.in_features), "out_features": math.prod(self.out_features)}
        check_fields(self._layer, sizes, recipe, dtype, param_dtype, use_bias=use_bias, recompute=recompute)
        check_has_no_targets(self._layer, lora)
        super().__init__(
            self.in_features,
            self.out_features,
            use_bias=use_bias,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            lora=lora,
        )
        self.use_bias, self.dtype, self.recompute = use_bias, dtype, recompute
        self.begin_state(recipe)

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
        rows = jnp.transpose(x, [*leading, *contracted]).reshape(*(x.shape[dim] for dim in leading), -1)
        product = Product.of(self._layer, self.gemm_state, self)
        dtype = self.result_dtype(x) if self.dtype is None else self.dtype
        with jax.named_scope(product.scope()):
            y = product.multiply(rows, dtype, recompute=self.recompute)
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
