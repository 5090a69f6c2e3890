"""An einsum of an input and a kernel in FP8, as one product of matrices."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer

from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.lora import Lora
from jax_fp8.core.recipe import Recipe
from jax_fp8.nnx.checks import check_fields, check_has_no_targets, check_sharding
from jax_fp8.nnx.layers import DELAYED
from jax_fp8.nnx.product import LECUN, NOTHING, ZEROS, Dims, LinearParams, Metadata, Product
from jax_fp8.ops.einsum_dims import EinsumDims, Label


class Einsum(LinearParams):
    """`jnp.einsum(einsum_str, x, kernel) + bias` in FP8, in the place of `nnx.Einsum`.

    Variables: `kernel` of shape `kernel_shape` and `bias` of shape `bias_shape`. With a kernel (in, out) the state and
    the weight cache are those of a `Linear`. Otherwise the state lies in `fp8["~product"]`, weight caches leave the
    kernel out, and a kernel whose contracted dims are not its first ones is transposed before its cast.

    Args:
      einsum_str: "input,kernel->result". Labels that only the input has, or "...", are rows; labels of both are
        contracted; labels that only the kernel has are columns. A label in all three is refused.
      kernel_shape: sizes by the labels of the kernel. The product of contracted ones, and of the columns, must be a
        multiple of 16, unless `recipe` is None.
      bias_shape: sizes of the columns, in the order of the result; None has no bias.
      dtype, param_dtype, recipe, recompute, rngs, kernel_metadata, bias_metadata, lora: as in `Linear`. An adapter has
        the sizes of the kernel as a matrix.
      kernel_init, bias_init: initializers, which get these shapes.
      kernel_name: of the attribute that holds the kernel. With another name, weight caches leave the kernel out.

    Raises:
      ValueError: if an argument is not valid, or the einsum is no such product of matrices.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> layer = jax_fp8.nnx.Einsum("BTD,NDH->BTNH", (4, 32, 8), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 8, 32))).shape
      (2, 8, 4, 8)
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Dims,
        bias_shape: Dims | None = None,
        *,
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
        kernel_name: str = "kernel",
    ):
        self._layer = f'Einsum("{einsum_str}", {tuple(kernel_shape)})'
        dims = self._dims = _parsed(self._layer, einsum_str, tuple(kernel_shape))
        self.split_dims(tuple(kernel_shape), dims.order, len(dims.contracted))
        k, n = self.matrix_shape
        check_fields(
            self._layer, {"in_features": k, "out_features": n}, recipe, dtype, param_dtype, recompute=recompute
        )
        check_has_no_targets(self._layer, lora)
        if bias_shape is not None and tuple(bias_shape) != self._sizes(dims.columns):
            raise ValueError(
                f"{self._layer}: bias_shape must have the columns of the kernel, {self._sizes(dims.columns)}, got "
                f"{tuple(bias_shape)}; pass them in the order of the result"
            )
        self.kernel_name = kernel_name
        kernel = nnx.Param(kernel_init(rngs.params(), tuple(kernel_shape), param_dtype), **kernel_metadata)
        bias = None if bias_shape is None else bias_init(rngs.params(), tuple(bias_shape), param_dtype)
        self.hold(kernel, None if bias is None else nnx.Param(bias, **bias_metadata), param_dtype, lora, rngs)
        self.einsum_str, self.kernel_shape, self.bias_shape = dims.text, tuple(kernel_shape), bias_shape
        self.dtype, self.recompute = dtype, recompute
        self.begin_state(recipe)

    def __call__(self, x: jax.Array, einsum_str: None = None, out_sharding: None = None) -> jax.Array:
        """Compute the einsum, and add the bias.

        Args:
          x: an array with the dims of the input.
          einsum_str: must be None: the layer has its own.
          out_sharding: must be None, as in `Linear`.

        Returns:
          The result of the einsum in `dtype`.

        Raises:
          ValueError: if `x` has another shape, or another argument is not None.
        """
        check_sharding(self._layer, out_sharding)
        if einsum_str is not None:
            raise ValueError(
                f"{self._layer} has its einsum from its constructor, got another one, {einsum_str!r}; leave it out"
            )
        rows_of, contracted, result = self._dims_of(x)
        rows = jnp.transpose(x, [*rows_of, *contracted]).reshape(*(x.shape[dim] for dim in rows_of), -1)
        product = Product.of(self._layer, self.gemm_state, self)
        dtype = self.result_dtype(x) if self.dtype is None else self.dtype
        with jax.named_scope(product.scope()):
            y = product.multiply(rows, dtype, recompute=self.recompute)
        return jnp.transpose(y.reshape(*rows.shape[:-1], *self._sizes(self._dims.columns)), result)

    def _sizes(self, labels: tuple[Label, ...]) -> Dims:
        """The sizes of labels of the kernel."""
        return tuple(self.dims[self._dims.kernel.index(label)] for label in labels)

    def _dims_of(self, x: jax.Array) -> tuple[list[int], list[int], list[int]]:
        wanted = self._sizes(self._dims.contracted)
        try:
            if is_array(x) and x.size:
                rows, contracted, result = self._dims.of_input(x.ndim)
                if tuple(x.shape[dim] for dim in contracted) == wanted:
                    return rows, contracted, result
        except ValueError:
            pass  # the same sentence as for wrong sizes
        named = ", ".join(f"{label}={size}" for label, size in zip(self._dims.contracted, wanted, strict=True))
        raise ValueError(
            f'{self._layer} needs an array of the dims "{self._dims.text.split(",")[0]}" with {named}, got '
            f"{describe(x)}; reshape or transpose it"
        )


def _parsed(layer: str, einsum_str: str, kernel_shape: Dims) -> EinsumDims:
    if not isinstance(einsum_str, str):
        raise ValueError(f"{layer}: einsum_str must be a str, got {describe(einsum_str)}; pass input,kernel->result")
    try:
        dims = EinsumDims.parse(einsum_str)
    except ValueError as error:
        raise ValueError(f"{layer}: {error}; use nnx.Einsum, or another einsum") from None
    if len(dims.kernel) != len(kernel_shape):
        raise ValueError(
            f'{layer}: kernel_shape must have a size for each of "{"".join(map(str, dims.kernel))}", got '
            f"{kernel_shape}; pass as many"
        )
    return dims
