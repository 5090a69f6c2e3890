"""Gradients layer by layer, for a loss with layers that offload residuals to the host: when the copies run.

    forward    layer 0 ─ layer 1 ─ layer 2 │ layer 3 ─ layer 4 ─ layer 5 │ loss          0 and 3 are offloaded
               └ 0 leaves ─────────────────┘ └ 3 leaves ─────────────────┘
    backward   ... ─ layer 5 │ layer 4 ─ layer 3 ─ layer 2 │ layer 1 ─ layer 0
                             └ 3 comes back                └ 0 comes back

XLA's scheduler knows that a copy may run beside compute, but neither how long it takes nor that memory is short. Left
to itself it delays copies to the host until the backward, and starts a copy back when a layer needs it. But it keeps
the order of operations that depend on each other. So `lax.optimization_barrier` adds dependencies: in front of an
offloaded layer, and in front of the loss, x waits until the residuals of the offloaded layer before have left; and the
residuals of a layer begin to come back only when the backward of a layer above it begins.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.types import Batch, PyTree, Variables


@dataclass(frozen=True)
class ByLayer:
    """Differentiates a loss layer by layer.

    Args:
      loss: its pieces, and which layers are offloaded.
      variables: with recorders.
      read_rows: takes f32[rows], whose cotangents are maxima, whenever a piece is traced: `GradientTape.receive`.
      sums: by the path of a kernel, the Ref to which its GEMM adds the gradient instead of returning it.
    """

    loss: LayeredLoss
    variables: Variables
    read_rows: Callable[[jax.Array], None]
    sums: Mapping[LayerPath, jax.Ref]

    def value_and_grads(self, rows: jax.Array, batch: Batch) -> tuple[jax.Array, tuple[dict[str, PyTree], jax.Array]]:
        """The loss of a batch, and the gradients of params and of `rows`."""
        loss, params = self.loss, self.variables["params"]
        around = {name: tree for name, tree in params.items() if name not in loss.layers}
        first = self._piece(lambda own: loss.first(own, batch), self.variables)
        last = self._piece(lambda own, x: loss.last(own, x, batch), self.variables)
        x, pull_first = jax.vjp(first, around, rows)
        x, pullbacks = self._forward(rows, x)
        value, pull_last = jax.vjp(last, around, rows, x)
        d_last, d_rows, dx = pull_last(jnp.ones_like(value))
        gradients, d_rows_of_layers, dx = self._backward(pullbacks, dx)
        d_first, d_rows_of_first = pull_first(dx)
        gradients |= jax.tree.map(jnp.add, d_last, d_first)
        d_rows = functools.reduce(jnp.maximum, (*d_rows_of_layers, d_rows_of_first), d_rows)
        return value, ({name: gradients[name] for name in params}, d_rows)

    def _forward(self, rows: jax.Array, x: PyTree) -> tuple[PyTree, dict[str, "_Pullback"]]:
        """The result of the last layer, and the pullback of each layer."""
        pullbacks: dict[str, _Pullback] = {}
        leaving: _Pullback | None = None  # of the last offloaded layer
        for name in self.loss.layers:
            is_offloaded = name in self.loss.on_host
            if is_offloaded and leaving is not None:
                x = leaving.after(x)
            own = of_layer(self.variables, name)
            layer = self._piece(lambda own, x, name=name: self.loss.layer(own, x, name), own)
            x, pullback = jax.vjp(layer, own["params"], rows, x)
            pullbacks[name] = _Pullback(pullback)
            leaving = pullbacks[name] if is_offloaded else leaving
        return x if leaving is None else leaving.after(x), pullbacks

    def _backward(
        self, pullbacks: Mapping[str, "_Pullback"], dx: PyTree
    ) -> tuple[dict[str, PyTree], list[jax.Array], PyTree]:
        """The gradients of params, those of `rows` by layer, and the gradient of the input of the first layer."""
        gradients: dict[str, PyTree] = {}
        gradients_above: dict[str, PyTree] = {}
        d_rows: list[jax.Array] = []
        layers, coming_back = self.loss.layers, comes_back_beside(self.loss)
        for index in reversed(range(len(layers))):
            starting = [pullbacks[name] for name in coming_back[index]]
            dx, gradients_above = self._settle(starting, dx, gradients_above)
            gradients |= gradients_above
            gradients_above, d_rows_here, dx = pullbacks[layers[index]](dx)
            d_rows.append(d_rows_here)
        return gradients | gradients_above, d_rows, dx

    def _settle(self, coming_back: Sequence["_Pullback"], dx: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree]:
        """dx and the gradients of the layer above, computed before the next backward begins and copies start to come
        back. Without this, XLA would compute a kernel's gradient only for the optimizer, and keep its operands until
        then.
        """
        paths, structure = jax.tree.flatten_with_path(gradients)
        leaves = {names_of(path): leaf for path, leaf in paths}
        refs = {path: self.sums[path] for path in leaves if path in self.sums}
        arrays = [refs[path][...] if path in refs else leaf for path, leaf in leaves.items()]
        dx, arrays = lax.optimization_barrier((dx, arrays))
        for pullback in coming_back:
            dx = pullback.after(dx)
        for path, array in zip(leaves, arrays, strict=True):
            if path in refs:
                refs[path][...] = array
            else:
                leaves[path] = array
        return dx, structure.unflatten(leaves.values())

    def _piece(self, function: Callable[..., PyTree], own: Variables) -> Callable[..., PyTree]:
        """A piece of the loss with these variables, as a function of their params, of `rows`, and of x."""

        def run(params: PyTree, rows: jax.Array, *x: PyTree) -> PyTree:
            self.read_rows(rows)
            return function({**own, "params": params}, *x)

        return run


def comes_back_beside(loss: LayeredLoss) -> list[list[str]]:
    """By the index of a layer, the layers whose residuals begin to come back with its backward.

    A layer's copies to the host have the time of all layers up to the next offloaded one. A backward takes twice as
    long as a forward, so half as many layers are enough for the way back, and at least one.
    """
    beside: list[list[str]] = [[] for _ in loss.layers]
    above = len(loss.layers)
    for index in reversed(range(len(loss.layers))):
        if loss.layers[index] in loss.on_host:
            ahead = max(1, (above - index) // 2)
            beside[min(index + ahead, len(loss.layers) - 1)].append(loss.layers[index])
            above = index
    return beside


class _Pullback:
    """The pullback of a layer, with the layer's residuals, some of them on the host."""

    def __init__(self, pullback: Callable):
        self._leaves, self._structure = jax.tree.flatten(pullback)
        self._on_host = [number for number, leaf in enumerate(self._leaves) if _is_on_host(leaf)]

    def after(self, tree: PyTree) -> PyTree:
        """The same arrays, which wait until the residuals on the host have arrived there; and the copies back, which
        read these residuals, wait until the arrays are computed.
        """
        tree, arrays = lax.optimization_barrier((tree, [self._leaves[number] for number in self._on_host]))
        for number, array in zip(self._on_host, arrays, strict=True):
            self._leaves[number] = array
        return tree

    def __call__(self, dy: jax.Array) -> PyTree:
        return self._structure.unflatten(self._leaves)(dy)


def _is_on_host(leaf: jax.Array) -> bool:
    return getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host
