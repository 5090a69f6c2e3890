"""Gradients of a loss by its layers, where some keep values on the host: when these leave, and when they come back.

    forward    layer 0 │ layer 1   layer 2   │ layer 3   layer 4   │ ... loss          0, 3, ... are offloaded
                       └── 0 leaves ─────────┘└── 3 leaves ────────┘
    backward   ...     │ layer 4   │ layer 3   layer 2   │ layer 1   │ layer 0
                       └── 3 comes back, used in 3       └── 0 comes back, used in 0

XLA's scheduler sees that a copy may run beside compute, but not how long it takes, and not that memory is short. Left
to itself it puts copies to the host off until the backward, and fetches what a layer wants when it wants it. What a
program computes it must compute in order, though: here x waits in front of a layer that is offloaded, and in front of
the loss, until what the one before keeps has left; and what a layer keeps comes back no sooner than the backward of the
layer above begins. `lax.optimization_barrier` says so, and the scheduler obeys.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.layered_loss import LayeredLoss, of_layer


class _Pullback:
    """That of a layer, which holds what the layer keeps: some of it on the host."""

    def __init__(self, pullback: Callable):
        leaves, self._structure = jax.tree.flatten(pullback)
        self._leaves: list[Any] = leaves
        self._away = [number for number, leaf in enumerate(leaves) if _is_on_host(leaf)]

    def after(self, tree: Any) -> Any:
        """The same arrays, there once all has left; and all is there, to come back, once they are."""
        if self._away:
            tree, arrays = lax.optimization_barrier((tree, [self._leaves[number] for number in self._away]))
            for number, array in zip(self._away, arrays, strict=True):
                self._leaves[number] = array
        return tree

    def __call__(self, dy: jax.Array) -> Any:
        return self._structure.unflatten(self._leaves)(dy)


def _is_on_host(leaf: Any) -> bool:
    return getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host


def value_and_grads(
    loss: LayeredLoss, variables: Mapping, rows: jax.Array, read_rows: Callable[[jax.Array], None], batch: Any
) -> tuple[jax.Array, tuple[dict, jax.Array]]:
    """The loss, and the gradients of params and of `rows`, whose "sums" are maxima.

    Args:
      variables: with recorders.
      rows: f32[rows], of which every piece has `read_rows` before it is traced.
    """

    def piece(function, own):
        def run(params, rows, *args):
            read_rows(rows)
            return function({**own, "params": params}, *args)

        return run

    around = {name: tree for name, tree in variables["params"].items() if name not in loss.layers}
    first = piece(lambda own: loss.first(own, batch), variables)
    x, pull_first = jax.vjp(first, around, rows)
    pullbacks, leaving = [], []
    for name in loss.layers:
        if name in loss.on_host:
            x, leaving = _after(leaving, x), []
        own = of_layer(variables, name)
        x, pullback = jax.vjp(piece(lambda own, x, name=name: loss.layer(own, x, name), own), own["params"], rows, x)
        pullbacks.append(_Pullback(pullback))
        leaving.append(pullbacks[-1])
    last = piece(lambda own, x: loss.last(own, x, batch), variables)
    value, pull_last = jax.vjp(last, around, rows, _after(leaving, x))

    d_last, maxima, dx = pull_last(jnp.ones_like(value))
    gradients = {}
    for index in reversed(range(len(pullbacks))):
        dx, gradients = _after(pullbacks[index - 1 : index], (dx, gradients))
        of_params, of_rows, dx = pullbacks[index](dx)
        gradients |= of_params
        maxima = jnp.maximum(maxima, of_rows)
    d_first, of_rows = pull_first(dx)
    gradients |= jax.tree.map(jnp.add, d_last, d_first)
    return value, ({name: gradients[name] for name in variables["params"]}, jnp.maximum(maxima, of_rows))


def _after(pullbacks: list[_Pullback], tree: Any) -> Any:
    for pullback in pullbacks:
        tree = pullback.after(tree)
    return tree
