"""Weight gradients in a call of their own, after the backward pass: what a pipeline's schedule may put off.

    variables ─value_and_grad(..., delay_wgrad_compute=True)→ loss, grads, fp8_state, deferred
    deferred  ─backward_dw→ the gradients that `grads` lacks

In between live the operands of the GEMMs that were not run, in FP8: xᵀ (k, m) and dyᵀ (n, m), each with its scale.
A backward pass leaves them through Refs, as it does amaxes; the refs' shapes are found by tracing it before.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.deferral import Notes, OperandSearch, OperandStore, OperandStores
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.paths import LayerPath, at_path, put_at_path
from jax_fp8.core.recorder import RECORDER, ByIdentity, Cotangents, Recorder, listing
from jax_fp8.core.state import map_gemms_with_path, no_amaxes
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.varying import vary, varying_axes, varying_in
from jax_fp8.ops.parameters import ParamInfo
from jax_fp8.ops.passes import kernel_gradients
from jax_fp8.ops.weights import kernels_of
from jax_fp8.train.gradients import differentiate, fp8_state_of, loss_of_params, record_in, with_kernels
from jax_fp8.train.wgrad_calls import WeightProduct, weight_products


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


def delayed_gradients(loss_fn: Callable, has_aux: bool = False) -> Callable:
    """`value_grads_and_amaxes` without the GEMMs of weight gradients.

    Returns:
      A function of `(variables, *args, **kwargs)` that returns loss (and aux), gradients, amaxes f32[rows] and
      `DeferredGradients`.
    """

    @inside_its_mesh
    def run(variables, *args, **kwargs):
        params, structure = jax.tree.flatten(variables["params"])
        a_pass, products = TracedPass.of(loss_fn, has_aux, variables, args, kwargs).search()
        stores = [_make_store(product) for product in products]
        value, grads, amaxes = a_pass.differentiate(a_pass.by_gemm(products, stores), variables["params"])
        called = [(product, store) for product, store in zip(products, stores, strict=True) if product.calls]
        operands = tuple(_read(store) for _, store in called)
        likes = tuple((leaf.shape, ParamInfo.of(leaf)) for leaf in params)
        return value, grads, amaxes, DeferredGradients(operands, tuple(made for made, _ in called), likes, structure)

    return run


@dataclass(frozen=True)
class TracedPass:
    """A loss with what it takes, and its FP8 GEMMs by path, with the dims of stacked layers that share a state."""

    loss_fn: Callable
    has_aux: bool
    variables: Mapping
    args: tuple
    kwargs: Mapping
    gemms: Mapping[LayerPath, tuple[int, ...]]

    @classmethod
    def of(cls, loss_fn, has_aux, variables, args, kwargs) -> "TracedPass":
        """With the GEMMs that have a state; others only a trace can show."""
        gemms = {}
        map_gemms_with_path(lambda path, gemm: gemms.update({path: gemm["scale"].shape[:-1]}), fp8_state_of(variables))
        return cls(loss_fn, has_aux, variables, args, kwargs, gemms)

    def by_gemm(self, products: list[WeightProduct], stores: list[OperandStore]) -> dict[LayerPath, OperandStores]:
        """The stores of each GEMM that has any."""
        paths, found = list(self.gemms), {}
        for product, store in zip(products, stores, strict=True):
            path = paths[product.operands.gemm]
            found[path] = OperandStores((*(found[path].stores if path in found else ()), store))
        return found

    def search(self) -> "tuple[TracedPass, list[WeightProduct]]":
        """Trace the loss and its gradient for what is to be kept; and this with all of its GEMMs."""
        params, notes = self.variables["params"], Notes()
        a_pass, of_loss = self.trace_loss(notes)

        def gradient(params):
            return a_pass.differentiate(a_pass._searches(notes), params)[1:]

        of_gradient = jax.make_jaxpr(gradient)(params).jaxpr
        slots = [math.prod(stacked) if stacked else None for stacked in a_pass.gemms.values()]
        return a_pass, weight_products(notes.found, of_loss, of_gradient, jax.tree.leaves(params), slots)

    def trace_loss(self, notes: Notes) -> "tuple[TracedPass, Any]":
        """The jaxpr of the loss as a function of the params, with a mark at each kernel; and this with all GEMMs."""
        params = self.variables["params"]

        def loss(params):
            of_params: Any = self._with(self._searches(notes), params, loss_of_params)
            out = of_params(params, no_amaxes(fp8_state_of(self.variables)))
            return out[0] if self.has_aux else out

        with listing() as found:
            of_loss = jax.make_jaxpr(loss)(params).jaxpr
        new = {
            path: kernels_of(path, params)[0].shape[:-2]
            for path in with_kernels(found, params)
            if path not in self.gemms
        }
        return replace(self, gemms={**self.gemms, **new}).trace_loss(notes) if new else (self, of_loss)

    def _searches(self, notes: Notes) -> dict[LayerPath, OperandSearch]:
        return {path: OperandSearch(jax.new_ref(jnp.int32(0)), i, notes) for i, path in enumerate(self.gemms)}

    def differentiate(self, deferrals: Mapping[LayerPath, Any], params: Any) -> Any:
        """Loss (and aux), gradients of the params, and amaxes f32[rows]."""
        return self._with(deferrals, params, differentiate)

    def _with(self, deferrals, params, function: Callable) -> Any:
        """Call a function of train/gradients.py with a recorder beside each GEMM."""
        variables, cotangents = {**self.variables, "params": params}, Cotangents()
        axes = varying_axes(variables, self.args, self.kwargs)
        recorded = record_in(variables, cotangents, axes, deferrals=deferrals)
        for path, stacked in self.gemms.items():
            if path not in deferrals or at_path(recorded, (*path, RECORDER)):
                continue
            slot = jnp.arange(math.prod(stacked), dtype=jnp.int32).reshape(stacked) if stacked else None
            deferral = ByIdentity(deferrals[path])
            recorder = Recorder(None, (), 1.0, False, slot, cotangents, deferral=deferral)
            put_at_path(recorded, path, {RECORDER: recorder})
        return function(self.loss_fn, self.has_aux, variables, recorded, cotangents, self.args, self.kwargs)


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
