"""Einsum layers of Flax and of other libraries, for `convert`: whether one is a product of matrices, and that in FP8.

A layer of another library is known by what it has and does: an `einsum_str`, one param, and a call whose trace is
`jnp.einsum` of the input and this param.
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from jax_fp8.core.lora import Lora
from jax_fp8.core.promotion import implicit_promotion
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.types import PyTree
from jax_fp8.jaxprs.jaxpr_equality import compute_the_same
from jax_fp8.nnx.einsum import Einsum
from jax_fp8.ops.einsum_dims import EinsumDims

ROWS = 16  # of each dim of the input that is not contracted, in the trace


def why_no_product(layer: PyTree) -> str | None:
    """The reason why a layer with an `einsum_str` is no product of matrices that `Einsum` could compute, or None."""
    try:
        dims = EinsumDims.parse(layer.einsum_str)
    except ValueError as error:
        return str(error)
    if isinstance(layer, nnx.Einsum):
        return None
    params = [name for name, value in vars(layer).items() if isinstance(value, nnx.Variable)]
    if len(params) != 1 or type(getattr(layer, params[0])) is not nnx.Param:
        return f"its class is {type(layer).__name__}, with the variables {', '.join(params)} and not one param"
    if _casts_of_call(layer, params[0], dims) is None:
        return f"its class is {type(layer).__name__}, whose call is another one than its einsum of input and param"
    return None


def matrix_shape(layer: PyTree) -> tuple[int, int]:
    """The rows and columns of a layer that is such a product."""
    dims, shape = EinsumDims.parse(layer.einsum_str), _kernel_shape(layer)
    sizes = [shape[dim] for dim in dims.order]
    split = len(dims.contracted)
    return math.prod(sizes[:split]), math.prod(sizes[split:])


def einsum_in_fp8(layer: PyTree, recipe: Recipe, lora: Lora | None, rngs: nnx.Rngs) -> Einsum:
    """The FP8 layer with the variables and the other attributes of this one."""
    name = _param_name(layer)
    param = getattr(layer, name)
    in_fp8 = Einsum(
        layer.einsum_str,
        _kernel_shape(layer),
        dtype=_dtype_of(layer, name),
        param_dtype=param.get_value().dtype,
        kernel_init=lambda *_: param.get_value(),
        recipe=recipe,
        rngs=rngs,
        lora=lora,
        kernel_name=name,
    )
    in_fp8.set_kernel(param)
    if isinstance(layer, nnx.Einsum):
        in_fp8.bias, in_fp8.bias_shape = layer.bias, None if layer.bias_shape is None else tuple(layer.bias_shape)
        return in_fp8
    for attribute, value in vars(layer).items():
        if not attribute.startswith("_") and not hasattr(in_fp8, attribute):
            setattr(in_fp8, attribute, value)
    return in_fp8


def _param_name(layer: PyTree) -> str:
    if isinstance(layer, nnx.Einsum):
        return "kernel"
    return next(name for name, value in vars(layer).items() if isinstance(value, nnx.Param))


def _kernel_shape(layer: PyTree) -> tuple[int, ...]:
    """Without the dims of stacked layers."""
    shape = getattr(layer, _param_name(layer)).get_value().shape
    return tuple(shape[len(shape) - len(EinsumDims.parse(layer.einsum_str).kernel) :])


def _dtype_of(layer: PyTree, name: str) -> PyTree:
    """The dtype in which a layer computes; None for that of its operands."""
    if isinstance(layer, nnx.Einsum):
        return layer.dtype
    casts = _casts_of_call(layer, name, EinsumDims.parse(layer.einsum_str))
    assert casts is not None, "why_no_product has compared the traces"
    return casts[0]


def _casts_of_call(layer: PyTree, name: str, dims: EinsumDims) -> tuple[PyTree] | None:
    """The dtype to which the call of a layer casts before its einsum, or None within the tuple for no cast; None if its
    trace is not that of its einsum.
    """
    shape = _kernel_shape(layer)
    if len(shape) != len(dims.kernel):
        return None
    graphdef, state = nnx.split(layer)
    kernel = jax.ShapeDtypeStruct(shape, getattr(layer, name).get_value().dtype)
    state = jax.tree.map(lambda _: kernel, state)
    sizes = [shape[dims.kernel.index(label)] if label in dims.contracted else ROWS for label in dims.input]
    dtype = getattr(layer, "dtype", None)
    # A dtype from which a cast to `dtype` can be seen.
    x = jax.ShapeDtypeStruct(tuple(sizes), jnp.float32 if dtype == jnp.float16 else jnp.float16)

    def call(state: PyTree, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    def expected() -> Iterator:
        for cast in dict.fromkeys((None, dtype)):
            for read in (lambda variable: variable.get_value(), lambda variable: variable[...]):

                def plain(state: PyTree, x: jax.Array, cast: PyTree = cast, read: PyTree = read) -> jax.Array:
                    operands = x, read(getattr(nnx.merge(graphdef, state), name))
                    operands = operands if cast is None else tuple(array.astype(cast) for array in operands)
                    return jnp.einsum(dims.text, *operands)

                yield cast, plain

    with implicit_promotion():
        try:
            found = jax.make_jaxpr(call)(state, x)
        except Exception:  # whatever the layer of another library asks for beside an input
            return None
        for cast, plain in expected():
            if compute_the_same(found, jax.make_jaxpr(plain)(state, x)):
                return (cast,)
    return None
