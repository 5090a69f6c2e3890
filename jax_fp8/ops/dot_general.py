"""Products in FP8 as functions, without layers: `dot_general` and `einsum`, with the state as an argument.

    lhs (batch.., rows.., k..) · rhs (batch.., k.., columns..)   ─as matrices→   linear; with batch dims grouped_linear

A product of matrices for each of some batch dims is one grouped GEMM: the matrices of `lhs` are its groups of rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import describe, is_array
from jax_fp8.core.formats import OUTPUT_GRADIENT
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.maxima import is_by_maximum
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.state import LEAVES
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.grouped_gemm import GROUP_ROWS
from jax_fp8.ops.carried_state import FIRST_SCALES, CarriedGemm
from jax_fp8.ops.einsum_dims import EinsumDims
from jax_fp8.ops.expert_rows import ExpertRows
from jax_fp8.ops.grouped_linear import grouped_linear
from jax_fp8.ops.layer_gemm import check_multiples_of_16, first_state
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

Dims = Sequence[int]
DimensionNumbers = tuple[tuple[Dims, Dims], tuple[Dims, Dims]]  # ((contracted dims of both), (batch dims of both))
State = Mapping[str, jax.Array]
DTYPES = jnp.bfloat16, jnp.float16, jnp.float32


def init_state(recipe: Recipe, kernel: jax.Array | None = None) -> dict[str, jax.Array]:
    """The state of a product before its first step.

    Args:
      recipe: of the product.
      kernel: its second operand, whose scale is then right from the start; None begins with a scale of 1.

    Returns:
      A dict of "scale", f32[3], and "amax_history", f32[3, L], with rows for input, kernel and output gradient; {} for
      a recipe without state. The first scale of the output gradient is 2**-22, for losses that are means over tokens.

    Raises:
      ValueError: if `recipe` is not a recipe.

    Example:
      >>> import jax
      >>> import jax_fp8 as fp8
      >>> jax.tree.map(lambda leaf: leaf.shape, fp8.init_state(fp8.DelayedScaling(amax_history_len=16)))
      {'amax_history': (3, 16), 'scale': (3,)}
    """
    _check_recipe("init_state", recipe)
    if not recipe.has_state:
        return {}
    kernels = () if kernel is None else kernel.reshape(-1, 1)
    first = first_state(recipe, kernels)  # type: ignore[arg-type] - it has state
    return first | {"scale": first["scale"].at[OUTPUT_GRADIENT].set(FIRST_SCALES[OUTPUT_GRADIENT])}


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe,
    state: State | None = None,
) -> jax.Array:
    """`lax.dot_general` in FP8, with gradients in FP8.

    A recipe with state, `DelayedScaling`, needs `state`. Its new value is its gradient: take gradients by the state as
    by params, and put the gradient in the place of the state. Where no gradient by the state is taken, every tensor is
    scaled by its own amax.

    Args:
      lhs: the input. The product of its contracted dims must be a multiple of 16, and so must that of its other dims
        in a gradient.
      rhs: the kernel. The product of its columns, which are neither contracted nor batch dims, must be one too.
      dimension_numbers: as of `lax.dot_general`. With batch dims it is a grouped GEMM.
      precision: None, or another form of the default.
      preferred_element_type: of the result, bfloat16, float16 or float32; None is the result type of both operands.
      recipe: how tensors are quantized.
      state: of `init_state`, or its gradient in the last step.

    Returns:
      The batch dims, the other dims of `lhs`, then those of `rhs`, as of `lax.dot_general`.

    Raises:
      ValueError: if an operand is not an array of floating point numbers, sizes are not multiples of 16, no dims are
        contracted, the recipe needs a state and there is none, or another one, or `precision` is not the default.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> recipe = fp8.DelayedScaling(amax_history_len=4)
      >>> x, kernel = jnp.full((16, 32), 896.0), jnp.ones((32, 48))
      >>> def loss_fn(kernel, state):
      ...     return jnp.mean(fp8.dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state))
      >>> gradient, state = jax.grad(loss_fn, (0, 1))(kernel, fp8.init_state(recipe, kernel))
      >>> gradient.shape, state["scale"][0].item()
      ((32, 48), 2.0)
    """
    return product("dot_general", lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe, state)


def einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    recipe: Recipe,
    state: State | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`jnp.einsum` of an input and a kernel in FP8, with gradients in FP8.

    Args:
      subscripts: "lhs,rhs->result". Labels of both operands that the result lacks are contracted; for labels of all
        three there is a product each. Other sums are refused. "..." may stand in `lhs` and the result.
      lhs, rhs, recipe, state, precision, preferred_element_type: as of `dot_general`.

    Returns:
      The result of the einsum.

    Raises:
      ValueError: as `dot_general`, or if the einsum is no product of matrices, or the operands have other dims.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> x, kernels = jnp.ones((2, 16, 4, 32)), jnp.ones((4, 32, 64))  # rows for each of four experts
      >>> fp8.einsum("BTED,EDH->BETH", x, kernels, recipe=fp8.CurrentScaling()).shape
      (2, 4, 16, 64)
    """
    return einsum_of("einsum", subscripts, lhs, rhs, recipe, state, precision, preferred_element_type)


def einsum_of(
    layer: str,
    subscripts: str,
    lhs: jax.Array,
    rhs: jax.Array,
    recipe: Recipe,
    state: State | None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`einsum` of a layer with this name in messages."""
    try:
        dims = EinsumDims.parse(subscripts, batched=True)
        rows, contracted, result = dims.of_input(_ndim(layer, lhs))
        if _ndim(layer, rhs) != len(dims.kernel):
            raise ValueError(f"needs {len(dims.kernel)} dims of its kernel")
    except ValueError as error:
        raise ValueError(
            f"{layer} in FP8 takes a product of matrices, of an input and a kernel, but {error}, got "
            f"{describe(lhs)} and {describe(rhs)}; use jnp.einsum here"
        ) from None
    of_kernel, batch_of_kernel = (tuple(map(dims.kernel.index, labels)) for labels in (dims.contracted, dims.batch))
    numbers = (tuple(contracted), of_kernel), (tuple(rows[: len(batch_of_kernel)]), batch_of_kernel)
    y = product(layer, lhs, rhs, numbers, precision, preferred_element_type, recipe, state)
    # The columns of `product` are in the order of the kernel, those of the einsum in the order of its result.
    in_kernel = [label for label in dims.kernel if label in dims.columns]
    columns = [len(rows) + in_kernel.index(label) for label in dims.columns]
    return jnp.transpose(y, [[*range(len(rows)), *columns][dim] for dim in result])


def product(
    layer: str,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: jax.typing.DTypeLike | None,
    recipe: Recipe,
    state: State | None,
) -> jax.Array:
    """`dot_general` of a layer with this name in messages."""
    _check_recipe(layer, recipe)
    for operand in (lhs, rhs):
        _ndim(layer, operand)
    check_precision(layer, precision)
    dtype = jnp.dtype(jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type)
    if dtype not in DTYPES:
        raise ValueError(
            f"{layer}: the result of an FP8 product must be bfloat16, float16 or float32, got {dtype}; cast the "
            "operands, or pass preferred_element_type"
        )
    dims = ProductDims.of(layer, lhs, rhs, dimension_numbers)
    check_multiples_of_16(layer, dims.contracted, (dims.columns,))
    gemm = CarriedGemm(_MatrixProduct(dtype, dims.groups), recipe, layer)
    y = gemm((dims.left(lhs), dims.right(rhs)), _checked(layer, recipe, state))
    # A barrier: in a loop over layers that keeps results, XLA would run each GEMM twice, once for what is kept.
    return lax.optimization_barrier(y).reshape(dims.result)


@dataclass(frozen=True)
class ProductDims:
    """How operands of `lax.dot_general` become matrices.

    Args:
      lhs, rhs: the dims of both, in the order of batch, rows and contracted dims; batch, contracted dims and columns.
      groups: how many products there are; None without batch dims.
      rows: the sizes of the other dims of `lhs`.
      contracted, columns: the sizes of one product.
      result: the shape of the result.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    groups: int | None
    rows: tuple[int, ...]
    contracted: int
    columns: int
    result: tuple[int, ...]

    @classmethod
    def of(cls, layer: str, lhs: jax.Array, rhs: jax.Array, dimension_numbers: DimensionNumbers) -> "ProductDims":
        """The dims of a product; contracted ones in the order of the kernel, whose rows then often stay in place."""
        (of_lhs, of_rhs), (lhs_batch, rhs_batch) = dimension_numbers
        pairs = sorted((b % rhs.ndim, a % lhs.ndim) for a, b in zip(of_lhs, of_rhs, strict=True))
        if not pairs:
            raise ValueError(
                f"{layer}: an FP8 product contracts at least one dim, got {dimension_numbers}; use lax.dot_general here"
            )
        lhs_batch, rhs_batch = (tuple(dim % x.ndim for dim in of) for x, of in ((lhs, lhs_batch), (rhs, rhs_batch)))
        lhs_contracted, rhs_contracted = tuple(a for _, a in pairs), tuple(b for b, _ in pairs)
        rows = tuple(dim for dim in range(lhs.ndim) if dim not in (*lhs_batch, *lhs_contracted))
        columns = tuple(dim for dim in range(rhs.ndim) if dim not in (*rhs_batch, *rhs_contracted))
        of_left = [lhs.shape[dim] for dim in (*lhs_batch, *lhs_contracted)]
        if of_left != [rhs.shape[dim] for dim in (*rhs_batch, *rhs_contracted)]:
            raise ValueError(
                f"{layer}: dims that are contracted, and batch dims, must have equal sizes, got {dimension_numbers} of "
                f"{describe(lhs)} and {describe(rhs)}; transpose or reshape the operands"
            )
        shape = [lhs.shape[dim] for dim in (*lhs_batch, *rows)] + [rhs.shape[dim] for dim in columns]
        return cls(
            (*lhs_batch, *rows, *lhs_contracted),
            (*rhs_batch, *rhs_contracted, *columns),
            math.prod(lhs.shape[dim] for dim in lhs_batch) if lhs_batch else None,
            tuple(lhs.shape[dim] for dim in rows),
            math.prod(lhs.shape[dim] for dim in lhs_contracted),
            math.prod(rhs.shape[dim] for dim in columns),
            tuple(shape),
        )

    def left(self, lhs: jax.Array) -> jax.Array:
        """`lhs` as (rows.., k); with batch dims as (groups, rows, k)."""
        leading = self.rows if self.groups is None else (self.groups, math.prod(self.rows))
        return _transposed(lhs, self.lhs).reshape(*leading, self.contracted)

    def right(self, rhs: jax.Array) -> jax.Array:
        """`rhs` as (k, columns); with batch dims as (groups, k, columns)."""
        leading = () if self.groups is None else (self.groups,)
        return _transposed(rhs, self.rhs).reshape(*leading, self.contracted, self.columns)


@dataclass(frozen=True)
class _MatrixProduct:
    """The product of matrices in `dtype`, of one or of `groups`, as an op of a `CarriedGemm`."""

    dtype: jax.typing.DTypeLike
    groups: int | None

    def __call__(self, gemm: Fp8Gemm, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if self.groups is None:
            return linear(lhs, LinearParameters(rhs, None), gemm, self.dtype)[0]
        rows = lhs.shape[1]
        filled_up = -(-rows // GROUP_ROWS) * GROUP_ROWS
        flat = jnp.pad(lhs, ((0, 0), (0, filled_up - rows), (0, 0))).reshape(-1, lhs.shape[2])
        starts = jnp.arange(self.groups + 1, dtype=jnp.int32) * filled_up
        where = ExpertRows(starts[:0], starts[:0], starts)
        y, _ = grouped_linear(flat, LinearParameters(rhs, None), where, gemm, self.dtype)
        return y.reshape(self.groups, filled_up, -1)[:, :rows]


def _transposed(x: jax.Array, order: Sequence[int]) -> jax.Array:
    return x if [*order] == [*range(x.ndim)] else jnp.transpose(x, order)


def check_precision(layer: str, precision: lax.PrecisionLike) -> None:
    """Raise unless this is the default; how an FP8 product accumulates is said in its recipe."""
    if precision not in (None, "default", lax.Precision.DEFAULT):
        raise ValueError(
            f"{layer}: precision must be None where the product is in FP8, got {precision!r}; leave it out, "
            "and say how GEMMs accumulate in the recipe's split_accumulator"
        )


def _check_recipe(layer: str, recipe: Recipe) -> None:
    check_recipe(recipe)
    if recipe is None:
        raise ValueError(f"{layer} needs a recipe, got None; use lax.dot_general or jnp.einsum without FP8")


def _ndim(layer: str, operand: jax.Array) -> int:
    if not is_array(operand) or not jnp.issubdtype(operand.dtype, jnp.floating):
        raise ValueError(
            f"{layer}: operands must be arrays of floating point numbers, got {describe(operand)}; cast them"
        )
    return operand.ndim


def _checked(layer: str, recipe: Recipe, state: State | None) -> State:
    """The state of a product with this recipe."""
    if not recipe.has_state:
        if state:
            raise ValueError(f"{layer}: {recipe!r} keeps no state, got {describe(state)}; leave state out")
        return {}
    length = getattr(recipe, "amax_history_len", 0)
    shapes = {"scale": (3,), "amax_history": (3, length)}
    found: PyTree = {name: state.get(name) for name in LEAVES} if isinstance(state, Mapping) else {}
    for name, shape in shapes.items():
        leaf = found.get(name)
        is_float = getattr(leaf, "dtype", None) is not None and (is_by_maximum(leaf) or leaf.dtype == jnp.float32)
        if not is_float or leaf.shape != shape:
            raise ValueError(
                f"{layer}: the state of a product with {type(recipe).__name__} must have {name} float32{[*shape]}, got "
                f"{describe(state if leaf is None else leaf)}; pass init_state(recipe, kernel), or its gradient"
            )
    return found
