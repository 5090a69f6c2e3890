"""Products for layers that are called under `jax.vmap`, with their state as a node of the model.

Layers of Haliax and Equinox see one example. An FP8 GEMM for each would be slow, and its weight gradient, which
contracts over one row, impossible. So `product` is a primitive of jax, which `vmap` over examples makes a product of
more rows. Where it is differentiated, it becomes `dot_general` of this library.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fp8.core.maxima import is_by_maximum
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import LEAVES
from jax_fp8.ops.dot_general import DimensionNumbers, init_state
from jax_fp8.ops.dot_general import product as product_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CarriedState:
    """The state of one product, or of stacked ones; its gradient is its new value.

    Args:
      scale: f32[..., 3], of input, kernel and output gradient.
      amax_history: f32[..., 3, L].
      passes: f32[...], 1 as a pass returns it. Where a step adds up or divides gradients, the next pass divides by it.
    """

    scale: jax.Array
    amax_history: jax.Array
    passes: jax.Array

    @classmethod
    def first(cls, recipe: Recipe, kernel: jax.Array | None = None) -> "CarriedState | None":
        """The state before the first step; None for a recipe without state."""
        state = init_state(recipe, kernel)
        return cls(**state, passes=jnp.float32(1)) if state else None

    def of_one_pass(self) -> dict[str, jax.Array]:
        """Scale and history, divided by `passes`; its gradient is that of the result, with 1 for `passes`."""
        state = {"scale": self.scale, "amax_history": self.amax_history}
        if is_by_maximum(self.scale):
            return state
        # A trainer that casts the whole model to bfloat16 casts the state, too.
        return _divide(*jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (state, self.passes)))


@jax.custom_vjp
def _divide(state: dict[str, jax.Array], passes: jax.Array) -> dict[str, jax.Array]:
    divisor = jnp.where(passes > 0, passes, 1)  # 0 where the last step did not run the layer
    return jax.tree.map(lambda leaf: leaf / divisor.reshape(*divisor.shape, *(1,) * (leaf.ndim - divisor.ndim)), state)


_divide.defvjp(
    lambda state, passes: (_divide(state, passes), passes), lambda passes, new_state: (new_state, jnp.ones_like(passes))
)


def product(
    layer: str,
    recipe: Recipe,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    state: CarriedState | None,
    precision: lax.PrecisionLike = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`dot_general` by a `CarriedState`, under `jax.vmap` over examples one product, of a layer with this name."""
    contracted, batch = (tuple(map(tuple, pair)) for pair in dimension_numbers)
    values = {} if state is None else state.of_one_pass()
    dtype = jnp.dtype(jnp.result_type(lhs, rhs) if dtype is None else dtype)
    leaves, static = [values[name] for name in values and LEAVES], (layer, recipe, precision, dtype)
    return PRODUCT.bind(lhs, rhs, *leaves, numbers=(contracted, batch), static=static)


def _multiply(
    lhs: jax.Array, rhs: jax.Array, *leaves: jax.Array, numbers: DimensionNumbers, static: tuple[Any, ...]
) -> jax.Array:
    layer, recipe, precision, dtype = static
    state: dict[str, jax.Array] = dict(zip(LEAVES, leaves, strict=True)) if leaves else {}
    return product_of(layer, lhs, rhs, numbers, precision, dtype, recipe, state)


def _differentiate(primals: tuple[jax.Array, ...], tangents: tuple[Any, ...], **options: Any) -> tuple:
    # `dot_general` sees which operands are differentiated, for it warns where the state is not.
    active = [number for number, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def multiply(*values: jax.Array) -> jax.Array:
        operands = dict(enumerate(primals)) | dict(zip(active, values, strict=True))
        return _multiply(*operands.values(), **options)

    return jax.jvp(multiply, [primals[number] for number in active], [tangents[number] for number in active])


def _over_batch(
    operands: tuple[jax.Array, ...], dims: tuple[int | None, ...], *, numbers: DimensionNumbers, static: tuple[Any, ...]
) -> tuple[jax.Array, int]:
    """Examples become rows. With kernels or states of their own, they are products of their own."""
    if any(dim is not None for dim in dims[1:]):
        return jax.vmap(functools.partial(_multiply, numbers=numbers, static=static), dims)(*operands), 0
    contracted, batch = ((tuple(dim + 1 for dim in of_lhs), of_rhs) for of_lhs, of_rhs in numbers)
    lhs = jnp.moveaxis(operands[0], dims[0], 0)  # type: ignore[arg-type]
    return PRODUCT.bind(lhs, *operands[1:], numbers=(contracted, batch), static=static), len(batch[0])


PRODUCT = Primitive("jax_fp8_product")
PRODUCT.def_impl(_multiply)
PRODUCT.def_abstract_eval(
    lambda *avals, **options: jax.make_jaxpr(functools.partial(_multiply, **options))(*avals).out_avals[0]
)
ad.primitive_jvps[PRODUCT] = _differentiate
batching.primitive_batchers[PRODUCT] = _over_batch
mlir.register_lowering(PRODUCT, mlir.lower_fun(_multiply, multiple_results=False))
