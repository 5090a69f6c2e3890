"""FP8 inside of Flax's own layers: what `nn.Dense` and `nn.DenseGeneral` call to multiply by their kernel.

    x (..., in)   kernel (in..., out...) ─as matrices→ (rows, k) · (k, n) ─linear→ (..., out...)

Any dims may be contracted; batch dims are refused. Flax's layers contract the last dims of `x` with the first of the
kernel. Then the matrices are reshapes, and nothing moves in memory.

In `nn.Dense` and `nn.DenseGeneral` the kernel is read from the params, before Flax casts it. If it is a matrix, the
GEMM belongs to that layer: state and weight cache lie where those of `fp8.Dense` do. If it is not, the GEMM has a name
of its own that leads to no kernel (core/paths.py). The same holds in any other layer, which may have changed its kernel
before the product.

With `overwrite_with_gradient` the state lies where Flax's own FP8 has its own, in "_overwrite_with_gradient", and moves
as the gradient of itself (ops/carried_state.py). Train steps of other libraries know this collection.
"""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax

from jax_fp8.core.checks import check_bool
from jax_fp8.core.paths import UNNAMED, check_layer_name
from jax_fp8.core.recipe import DelayedScaling, Recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, as_field, recipe_at
from jax_fp8.core.state import LEAVES
from jax_fp8.nn.checks import check_dtype
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.gemm import GemmState, declare_state
from jax_fp8.ops.dot_general import DimensionNumbers, ProductDims, check_precision, init_state, product
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters


class DotGeneral(nn.Module):
    """A product with a kernel in FP8, in the place of `lax.dot_general` inside Flax's own layers.

        nn.Dense(features, dot_general_cls=functools.partial(fp8.DotGeneral, recipe=recipe))

    Also for `nn.DenseGeneral`, and as `qkv_dot_general_cls` and `out_dot_general_cls` of Flax's attention. The layer
    adds its bias afterwards, in its dtype. Like every layer here, this keeps its state in the collection "fp8".

    Args:
      recipe: how tensors are quantized; None is `lax.dot_general`. Rules are matched with the path of the layer.
      recompute: keep `x` for the backward and quantize it again, instead of keeping its transpose in FP8.
      overwrite_with_gradient: keep the state in Flax's collection "_overwrite_with_gradient", for a train step that
        takes gradients by it and puts them in its place. Without it, steps of this library carry the state.

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

    recipe: RecipeOrRules = DelayedScaling()
    recompute: bool = False
    overwrite_with_gradient: bool = False

    def __post_init__(self):
        as_field(self)
        super().__post_init__()

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
        recipe = recipe_at(self.recipe, self.path[:-1])
        check_bool(f"{self._layer}: recompute", self.recompute)
        check_bool(f"{self._layer}: overwrite_with_gradient", self.overwrite_with_gradient)
        if recipe is None:
            return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
        if self.overwrite_with_gradient:
            if self.recompute:
                raise ValueError(
                    f"{self._layer}: recompute must be False with overwrite_with_gradient, got both; leave one out, or "
                    "put nn.remat around the layer"
                )
            state = carried_state(self, recipe, kernel)
            return product(self._layer, x, kernel, dimension_numbers, precision, preferred_element_type, recipe, state)
        if len(dimension_numbers[1][0]):
            raise ValueError(
                f"{self._layer}: an FP8 product has no batch dims, got {dimension_numbers} for {x.shape} and "
                f"{kernel.shape}; leave dot_general_cls out of this layer"
            )
        dims = ProductDims.of(self._layer, x, kernel, dimension_numbers)
        check_precision(self._layer, precision)
        dtype = jnp.result_type(x, kernel) if preferred_element_type is None else preferred_element_type
        check_dtype(f"{self._layer}: dtype", dtype)
        gemm = self._declare(kernel, dims, recipe)
        y, amaxes = linear(dims.left(x), gemm.parameters, gemm.fp8, dtype, recompute=self.recompute)
        gemm.stage(amaxes)
        return y.reshape(dims.result)

    def _declare(self, kernel: jax.Array, dims: ProductDims, recipe: Recipe) -> DeclaredGemm:
        """The GEMM by this kernel, by its param where the layer is Flax's own."""
        layer = self.parent
        param = _kernel_param(layer)
        if param is not None and param.shape == kernel.shape:
            kernel = param
            if isinstance(layer, nn.Module) and dims.rhs == (0, 1):
                check_layer_name(self.path[:-1])
                return declare_state(layer, LinearParameters(kernel, None), recipe, None)
        own = GemmState(recipe, self._layer, name=UNNAMED)
        return own(LinearParameters(dims.right(kernel), None), None)

    @property
    def _layer(self) -> str:
        """The layer around this product, for messages."""
        return "/".join(self.path[:-1]) or type(self.parent or self).__name__


def carried_state(module: nn.Module, recipe: Recipe, kernel: jax.Array) -> dict[str, jax.Array]:
    """The state of a product in the collection "_overwrite_with_gradient" of a module, made in its first call."""
    if not recipe.has_state:
        return {}
    first = init_state(recipe, kernel) if module.is_initializing() else dict.fromkeys(LEAVES)
    # Variables that are there already keep their values.
    return {
        name: module.variable(OVERWRITE_WITH_GRADIENT, name, lambda value: value, value).value
        for name, value in first.items()
    }


def _kernel_param(layer: object) -> jax.Array | None:
    """The param `kernel` of `nn.Dense` or `nn.DenseGeneral`; None for other layers, and for subclasses that override
    `__call__`.
    """
    calls = [inspect.unwrap(cls.__call__) for cls in (nn.Dense, nn.DenseGeneral)]
    if not isinstance(layer, nn.Dense | nn.DenseGeneral) or inspect.unwrap(type(layer).__call__) not in calls:
        return None
    return meta.unbox(layer.get_variable("params", "kernel"))
