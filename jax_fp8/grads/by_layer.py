"""Gradients of a loss by its layers, where some keep values on the host: when these leave, and when they come back.

    forward    layer 0 ─ layer 1 ─ layer 2 │ layer 3 ─ layer 4 ─ layer 5 │ loss          0 and 3 are offloaded
               └ 0 leaves ─────────────────┘ └ 3 leaves ─────────────────┘
    backward   ... ─ layer 5 │ layer 4 ─ layer 3 ─ layer 2 │ layer 1 ─ layer 0
                             └ 3 comes back                └ 0 comes back

XLA's scheduler sees that a copy may run beside compute, but not how long it takes, and not that memory is short. Left
to itself it puts copies to the host off until the backward, and fetches what a layer wants when it wants it. What a
program computes it must compute in order, though: here x waits in front of a layer that is offloaded, and in front of
the loss, until what the one before keeps has left; and what a layer keeps comes back no sooner than the backward of a
layer above it begins. `lax.optimization_barrier` says so, and the scheduler obeys.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.layered_loss import LayeredLoss, of_layer
from jax_fp8.core.paths import LayerPath, names_of


@dataclass(frozen=True)
class ByLayer:
    """Differentiates a loss layer by layer.

    Args:
      loss: its layers, and those of them that are offloaded.
      variables: with recorders.
      read_rows: what every piece does with f32[rows], whose cotangents are maxima, before it is traced.
      sums: by the path of a kernel, where its gradient is added up instead of being returned.
    """

    loss: LayeredLoss
    variables: Mapping
    read_rows: Callable[[jax.Array], None]
    sums: Mapping[LayerPath, jax.Ref]

    def value_and_grads(self, rows: jax.Array, batch: Any) -> tuple[jax.Array, tuple[dict, jax.Array]]:
        """The loss of a batch, and the gradients of params and of `rows`."""
        loss, params = self.loss, self.variables["params"]
        around = {name: tree for name, tree in params.items() if name not in loss.layers}
        first = self._piece(lambda own: loss.first(own, batch), self.variables)
        last = self._piece(lambda own, x: loss.last(own, x, batch), self.variables)
        x, pull_first = jax.vjp(first, around, rows)
        x, pullbacks = self._forward(rows, x)
        value, pull_last = jax.vjp(last, around, rows, x)
        d_last, maxima, dx = pull_last(jnp.ones_like(value))
        gradients, of_rows, dx = self._backward(pullbacks, dx)
        d_first, of_first = pull_first(dx)
        gradients |= jax.tree.map(jnp.add, d_last, d_first)
        maxima = functools.reduce(jnp.maximum, (*of_rows, of_first), maxima)
        return value, ({name: gradients[name] for name in params}, maxima)

    def _forward(self, rows, x):
        pullbacks, leaving = {}, None
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

    def _backward(self, pullbacks, dx):
        """Gradients by layer, those of rows, and that of what enters the first layer."""
        gradients, of_rows, of_above = {}, [], {}
        layers, coming_back = self.loss.layers, comes_back_beside(self.loss)
        for index in reversed(range(len(layers))):
            dx, of_above = self._settle([pullbacks[name] for name in coming_back[index]], dx, of_above)
            gradients |= of_above
            of_above, of_these, dx = pullbacks[layers[index]](dx)
            of_rows.append(of_these)
        return gradients | of_above, of_rows, dx

    def _settle(self, coming_back, dx, gradients):
        """dx and the gradients of the layer above, which are there before the next backward begins and anything comes
        back. A gradient of a kernel is wanted by nobody before the optimizer; XLA would compute it then, and keep what
        it reads until then.
        """
        paths, structure = jax.tree.flatten_with_path(gradients)
        leaves = {names_of(path): leaf for path, leaf in paths}
        refs = {path: self.sums[path] for path in leaves if path in self.sums}
        made = {path: refs[path][...] if path in refs else leaf for path, leaf in leaves.items()}
        dx, made = lax.optimization_barrier((dx, [*made.values()]))
        for pullback in coming_back:
            dx = pullback.after(dx)
        for path, array in zip(leaves, made, strict=True):
            if path in refs:
                refs[path][...] = array
            else:
                leaves[path] = array
        return dx, structure.unflatten(leaves.values())

    def _piece(self, function, own):
        def run(params, rows, *x):
            self.read_rows(rows)
            return function({**own, "params": params}, *x)

        return run


def comes_back_beside(loss: LayeredLoss) -> list[list[str]]:
    """By the index of a layer, which layers' values begin to come back with its backward.

    The copies of a layer leave in the time of the layers up to the next one that is offloaded. A backward takes twice
    the time of a forward, so half as many layers are enough for the way back, and one at least.
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
    """That of a layer, which holds what the layer keeps: some of it on the host."""

    def __init__(self, pullback: Callable):
        leaves, self._structure = jax.tree.flatten(pullback)
        self._leaves: list[Any] = leaves
        self._away = [number for number, leaf in enumerate(leaves) if _is_on_host(leaf)]

    def after(self, tree: Any) -> Any:
        """The same arrays, there once all has left; and all is there, to come back, once they are."""
        tree, arrays = lax.optimization_barrier((tree, [self._leaves[number] for number in self._away]))
        for number, array in zip(self._away, arrays, strict=True):
            self._leaves[number] = array
        return tree

    def __call__(self, dy: jax.Array) -> Any:
        return self._structure.unflatten(self._leaves)(dy)


def _is_on_host(leaf: Any) -> bool:
    return getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host
