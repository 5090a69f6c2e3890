"""Weight gradients in a call of their own, after the backward pass: what a pipeline's schedule may put off.

    variables ─value_and_grad(..., delay_wgrad_compute=True)→ loss, grads, fp8_state, deferred
    deferred  ─backward_dw→ the gradients that `grads` lacks

In between live the operands of the GEMMs that were not run, in FP8: xᵀ (k, m) and dyᵀ (n, m), each with its scale.
A backward pass leaves them through Refs, as it does amaxes; the refs' shapes are found by tracing it before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.deferral import Notes, OperandSearch, OperandStore, OperandStores
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import map_gemms_with_path
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
    """What `backward_dw` wants: a pytree of FP8 operands, to be carried through `jit`, `scan` or `cond`.

    Args:
      operands: of each GEMM xᵀ (..., k, m) and dyᵀ (..., n, m). Leading dims are layers, of those that are stacked by a
        scan, and calls, of layers that are called several times.
      products: what is made of them; static.
      params: shape and `ParamInfo` of every param; static.
      structure: of the params; static.
    """

    operands: tuple[tuple[Fp8Array, Fp8Array], ...]
    products: tuple[WeightProduct, ...] = field(metadata={"static": True})
    params: tuple[tuple[tuple[int, ...], ParamInfo], ...] = field(metadata={"static": True})
    structure: Any = field(metadata={"static": True})


@inside_its_mesh
def backward_dw(deferred: DeferredGradients) -> Any:
    """The weight gradients that `value_and_grad(..., delay_wgrad_compute=True)` has put off.

        grads = jax.tree.map(jnp.add, grads, fp8.backward_dw(deferred))

    Each is made by the GEMM that would have made it in the backward pass, and written in the dtype of its param.

    Args:
      deferred: of one pass; those of several microbatches are several values, and their gradients are added.

    Returns:
      A tree like `variables["params"]`, with zeros for what was not put off: the compiler adds no zeros.
    """
    if not isinstance(deferred, DeferredGradients):
        raise ValueError(
            f"backward_dw needs what value_and_grad(..., delay_wgrad_compute=True) returned last, "
            f"got {type(deferred).__name__}; pass the fourth of its results"
        )
    found: dict[int, Any] = {}
    for product, (x, dy) in zip(deferred.products, deferred.operands, strict=True):
        likes = tuple(deferred.params[param][1] for param in product.params)
        with jax.named_scope(f"{product.operands.name}/wgrad"):
            gradients = _gradients_of(product, likes, x, dy)
        for param, gradient in zip(product.params, gradients, strict=True):
            found[param] = found[param] + gradient if param in found else gradient
    leaves = [
        found[param] if param in found else jnp.zeros(shape, like.dtype)
        for param, (shape, like) in enumerate(deferred.params)
    ]
    return deferred.structure.unflatten(leaves)


def delayed_gradients(
    loss_fn: Callable, has_aux: bool = False, observe: Observed = ()
) -> Callable[..., tuple[PassResult, DeferredGradients]]:
    """`take_gradients` without the GEMMs of weight gradients, and what these GEMMs take."""

    @inside_its_mesh
    def run(variables: Mapping, *args: Any, **kwargs: Any) -> tuple[PassResult, DeferredGradients]:
        params, structure = jax.tree.flatten(variables["params"])
        program, trace = traced(checked(loss_fn, has_aux), variables, *args, **kwargs)
        gemms = _stacked(trace.gemms, variables)
        axes = varying_axes(variables, args, kwargs)

        def run_pass(params: Any, defer: Mapping[LayerPath, Any], observe: Observed = ()) -> PassResult:
            own = {**variables, "params": params}
            tape = GradientTape(own, gemms=gemms, defer=defer, observe=observe, axes=axes)
            return differentiate(tape, loss_fn, has_aux, *args, **kwargs)

        notes = Notes()

        def gradient(params: Any) -> tuple[Any, jax.Array]:
            searches = {path: OperandSearch(jax.new_ref(jnp.int32(0)), i, notes) for i, path in enumerate(gemms)}
            result = run_pass(params, searches)
            return result.grads, result.amaxes

        of_gradient = jax.make_jaxpr(gradient)(variables["params"]).jaxpr
        kernels = origins(program.jaxpr, origins_of_params(variables, *args))
        products = weight_products(notes.found, kernels, of_gradient, params, gemms)
        stores = [_make_store(product) for product in products]
        result = run_pass(variables["params"], _by_gemm([*gemms], products, stores), observe)
        called = [(product, store) for product, store in zip(products, stores, strict=True) if product.calls]
        operands = tuple(_read(store) for _, store in called)
        likes = tuple((leaf.shape, ParamInfo.from_arrays(leaf)) for leaf in params)
        return result, DeferredGradients(operands, tuple(made for made, _ in called), likes, structure)

    return run


def _stacked(traced_gemms: Iterable[LayerPath], variables: Mapping) -> dict[LayerPath, tuple[int, ...]]:
    """The FP8 GEMMs of a loss, and the dims of stacked layers that share a state."""
    gemms: dict[LayerPath, tuple[int, ...]] = {}
    map_gemms_with_path(lambda path, gemm: gemms.update({path: gemm["scale"].shape[:-1]}), fp8_state_of(variables))
    for path in with_kernels(traced_gemms, variables["params"]):
        gemms.setdefault(path, kernels_of(path, variables["params"])[0].shape[:-2])
    return gemms


def _by_gemm(
    gemms: list[LayerPath], products: list[WeightProduct], stores: list[OperandStore]
) -> dict[LayerPath, OperandStores]:
    """The stores of each GEMM that has any."""
    found: dict[LayerPath, OperandStores] = {}
    for product, store in zip(products, stores, strict=True):
        path = gemms[product.operands.gemm]
        found[path] = OperandStores((*(found[path].stores if path in found else ()), store))
    return found


def _make_store(product: WeightProduct) -> OperandStore:
    def room(of):
        empty = jnp.zeros((*product.leading, *of.shape), of.dtype)
        return jax.new_ref(vary(empty, varying_in([of])))

    layers = () if product.slots is None else (product.slots,)
    count = jax.new_ref(jnp.zeros(layers, jnp.int32)) if product.calls > 1 else None
    return OperandStore(tuple(map(room, product.operands.types)), count, product.operands.shapes)


def _read(store: OperandStore) -> tuple[Fp8Array, Fp8Array]:
    x, x_scale, dy, dy_scale = (ref[...] for ref in store.refs)
    return Fp8Array(x, x_scale), Fp8Array(dy, dy_scale)


def _gradients_of(product: WeightProduct, likes, x: Fp8Array, dy: Fp8Array) -> tuple[jax.Array, ...]:
    """Of the kernels of one product, as the params have them."""
    of_call = partial(kernel_gradients, likes=likes, accumulation=product.operands.accumulation, widths=product.widths)

    def summed(operands, leading):
        """Over calls, in the order in which the pass made them."""
        if not leading:
            return of_call(*operands)
        calls = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(leading) :]), operands)
        nothing = jax.tree.map(
            lambda of: jnp.full(of.shape, -0.0, of.dtype),
            jax.eval_shape(of_call, *jax.tree.map(lambda leaf: leaf[0], calls)),
        )
        return lax.scan(lambda total, call: (jax.tree.map(jnp.add, total, of_call(*call)), None), nothing, calls)[0]

    if not product.stacked:
        return summed((x, dy), product.leading)
    gradients = lax.map(lambda operands: summed(operands, product.leading[1:]), (x, dy))
    return tuple(gradient.reshape(*product.stacked, *gradient.shape[1:]) for gradient in gradients)
