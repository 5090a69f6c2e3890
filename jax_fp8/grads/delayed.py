"""Delayed weight gradients: a call of their own computes them, after the backward pass, so that a pipeline's schedule
can put them into a bubble.

    variables ─value_and_grad(..., delay_wgrad_compute=True)→ loss, grads, fp8_state, deferred
    deferred  ─backward_dw→ the gradients that `grads` lacks

`deferred` holds the operands of the wgrad GEMMs in FP8: xᵀ (k, m) and dyᵀ (n, m), each with its scale. A backward pass
writes them to Refs, as it writes amaxes; a trace of the pass without stores finds the shapes of the Refs before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from jax_fp8.core.deferral import Deferral, Notes, OperandSearch, OperandStore, OperandStores
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.core.types import PyTree, TreeDef, Variables
from jax_fp8.grads.gradients import differentiate, with_kernels
from jax_fp8.grads.loss_trace import checked, origins_of_params, traced
from jax_fp8.grads.tape import GradientTape, Observed, PassResult, fp8_state_of
from jax_fp8.grads.wgrad_calls import WeightProduct, weight_products
from jax_fp8.jaxprs.named_values import origins
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.vma import vary, varying_axes, varying_in
from jax_fp8.ops.parameters import ParamInfo
from jax_fp8.ops.passes import kernel_gradients
from jax_fp8.ops.weights import kernels_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeferredGradients:
    """The input of `backward_dw`: a pytree of FP8 operands, which may go through `jit`, `scan` or `cond`.

    Args:
      operands: xᵀ (..., k, m) and dyᵀ (..., n, m) of each product. Leading dims are layers, where a scan stacks them,
        and calls, where a layer is called several times.
      products: the weight gradients that these operands give; static.
      params: shape and `ParamInfo` of every param; static.
      structure: of the params; static.
    """

    operands: tuple[tuple[Fp8Array, Fp8Array], ...]
    products: tuple[WeightProduct, ...] = field(metadata={"static": True})
    params: tuple[tuple[tuple[int, ...], ParamInfo], ...] = field(metadata={"static": True})
    structure: TreeDef = field(metadata={"static": True})


@inside_its_mesh
def backward_dw(deferred: DeferredGradients) -> PyTree:
    """Compute the weight gradients that `value_and_grad(..., delay_wgrad_compute=True)` has put off.

    The same GEMM computes each of them as in a backward pass, and writes it in the dtype of its param.

    Args:
      deferred: of one pass. Each of several microbatches has its own; add their gradients.

    Returns:
      A tree like `variables["params"]`, with zeros for gradients that were not put off. The compiler adds no zeros.

    Raises:
      ValueError: if `deferred` is not the fourth result of such a function.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(16, use_bias=False), jnp.ones((32, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> def loss_fn(variables, x):
      ...     return jnp.sum(layer.apply(variables, x))
      >>> loss, grads, fp8_state, deferred = fp8.value_and_grad(loss_fn, delay_wgrad_compute=True)(variables, x)
      >>> grads = jax.tree.map(jnp.add, grads, fp8.backward_dw(deferred))
      >>> grads["kernel"].shape, grads["kernel"][0, 0].item()
      ((16, 16), 32.0)
    """
    if not isinstance(deferred, DeferredGradients):
        raise ValueError(
            f"backward_dw needs what value_and_grad(..., delay_wgrad_compute=True) returned last, "
            f"got {type(deferred).__name__}; pass the fourth of its results"
        )
    by_param: dict[int, jax.Array] = {}
    for product, (x, dy) in zip(deferred.products, deferred.operands, strict=True):
        likes = tuple(deferred.params[param][1] for param in product.params)
        with jax.named_scope(f"{product.operands.name}/wgrad"):
            gradients = _gradients_of(product, likes, x, dy)
        for param, gradient in zip(product.params, gradients, strict=True):
            by_param[param] = by_param[param] + gradient if param in by_param else gradient
    leaves = [
        by_param[param] if param in by_param else jnp.zeros(shape, like.dtype)
        for param, (shape, like) in enumerate(deferred.params)
    ]
    return deferred.structure.unflatten(leaves)


def delayed_gradients(
    loss_fn: Callable, has_aux: bool = False, observe: Observed = ()
) -> Callable[..., tuple[PassResult, DeferredGradients]]:
    """`take_gradients` without the wgrad GEMMs, and the operands of these GEMMs."""

    @inside_its_mesh
    def run(variables: Variables, *args: PyTree, **kwargs: object) -> tuple[PassResult, DeferredGradients]:
        params, structure = jax.tree.flatten(variables["params"])
        program, trace = traced(checked(loss_fn, has_aux), variables, *args, **kwargs)
        gemms = _stacked(trace.gemms, variables)
        axes = varying_axes(variables, args, kwargs)

        def run_pass(params: PyTree, defer: Mapping[LayerPath, Deferral], observe: Observed = ()) -> PassResult:
            own = {**variables, "params": params}
            tape = GradientTape(own, gemms=gemms, defer=defer, observe=observe, axes=axes)
            return differentiate(tape, loss_fn, has_aux, *args, **kwargs)

        notes = Notes()

        def search(params: PyTree) -> tuple[PyTree, jax.Array]:
            searches = {path: OperandSearch(jax.new_ref(jnp.int32(0)), i, notes) for i, path in enumerate(gemms)}
            result = run_pass(params, searches)
            return result.grads, result.amaxes

        backward = jax.make_jaxpr(search)(variables["params"]).jaxpr
        kernels = origins(program.jaxpr, origins_of_params(variables, *args))
        products = weight_products(notes.found, kernels, backward, params, gemms)
        stores = [_make_store(product) for product in products]
        result = run_pass(variables["params"], _by_gemm([*gemms], products, stores), observe)
        called = [(product, store) for product, store in zip(products, stores, strict=True) if product.calls]
        operands = tuple(_read(store) for _, store in called)
        likes = tuple((leaf.shape, ParamInfo.from_arrays(leaf)) for leaf in params)
        return result, DeferredGradients(operands, tuple(made for made, _ in called), likes, structure)

    return run


def _stacked(traced_gemms: Iterable[LayerPath], variables: Variables) -> dict[LayerPath, tuple[int, ...]]:
    """The FP8 GEMMs of a loss, and the dims along which layers that share a state are stacked."""
    gemms: dict[LayerPath, tuple[int, ...]] = {}
    map_gemms_with_path(lambda path, gemm: gemms.update({path: gemm["scale"].shape[:-1]}), fp8_state_of(variables))
    for path in with_kernels(traced_gemms, variables["params"]):
        gemms.setdefault(path, kernels_of(path, variables["params"])[0].shape[:-2])
    return gemms


def _by_gemm(
    gemms: list[LayerPath], products: list[WeightProduct], stores: list[OperandStore]
) -> dict[LayerPath, OperandStores]:
    """The stores of each GEMM that has any."""
    by_gemm: dict[LayerPath, OperandStores] = {}
    for product, store in zip(products, stores, strict=True):
        path = gemms[product.operands.gemm]
        by_gemm[path] = OperandStores((*(by_gemm[path].stores if path in by_gemm else ()), store))
    return by_gemm


def _make_store(product: WeightProduct) -> OperandStore:
    def make_ref(operand: ShapedArray) -> jax.Ref:
        zeros = jnp.zeros((*product.leading, *operand.shape), operand.dtype)
        return jax.new_ref(vary(zeros, varying_in([operand])))

    layers = () if product.slots is None else (product.slots,)
    count = jax.new_ref(jnp.zeros(layers, jnp.int32)) if product.calls > 1 else None
    return OperandStore(tuple(map(make_ref, product.operands.types)), count, product.operands.shapes)


def _read(store: OperandStore) -> tuple[Fp8Array, Fp8Array]:
    x, x_scale, dy, dy_scale = (ref[...] for ref in store.refs)
    return Fp8Array(x, x_scale), Fp8Array(dy, dy_scale)


def _gradients_of(
    product: WeightProduct, likes: tuple[ParamInfo, ...], x: Fp8Array, dy: Fp8Array
) -> tuple[jax.Array, ...]:
    """The gradients of the kernels of one product, in the shapes of the params."""
    multiply = partial(kernel_gradients, likes=likes, accumulation=product.operands.accumulation, widths=product.widths)

    def summed(operands: tuple[Fp8Array, Fp8Array], leading: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """The sum over calls, in the order in which the pass made them."""
        if not leading:
            return multiply(*operands)
        calls = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(leading) :]), operands)
        # -0.0 + x has the bits of x for every x; 0.0 + -0.0 would be 0.0.
        start = jax.tree.map(
            lambda gradient: jnp.full(gradient.shape, -0.0, gradient.dtype),
            jax.eval_shape(multiply, *jax.tree.map(lambda leaf: leaf[0], calls)),
        )
        return lax.scan(lambda total, call: (jax.tree.map(jnp.add, total, multiply(*call)), None), start, calls)[0]

    if not product.stacked:
        return summed((x, dy), product.leading)
    gradients = lax.map(lambda operands: summed(operands, product.leading[1:]), (x, dy))
    return tuple(gradient.reshape(*product.stacked, *gradient.shape[1:]) for gradient in gradients)
