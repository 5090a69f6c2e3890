"""Delayed weight gradients against ordinary ones: both passes of a loss, and comparisons of their gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from jax_fp8.grads.delayed import DeferredGradients


def differentiate(loss_fn, *given, transform=jax.jit):
    """The ordinary gradients, those of a delayed pass, and its deferred products. All else must be the same."""
    loss, grads, state = transform(fp8.value_and_grad(loss_fn))(*given)
    delayed = transform(fp8.value_and_grad(loss_fn, delay_wgrad_compute=True))(*given)
    assert float(delayed[0]) == float(loss)
    jax.tree.map(np.testing.assert_array_equal, delayed[2], state)
    return grads, delayed[1], delayed[3]


def add(grads, deferred):
    return jax.tree.map(jnp.add, grads, fp8.backward_dw(deferred))


def assert_same_gradients(got, wanted, tolerance=0.0):
    """Equal to the bit, or within `tolerance` times the largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, gradient), expected in pairs:
        assert gradient.dtype == expected.dtype and np.any(expected), f"{path}: zeros show nothing"
        expected = np.asarray(expected, np.float32)
        bound = tolerance * np.max(np.abs(expected))
        np.testing.assert_allclose(np.asarray(gradient, np.float32), expected, 0, bound, err_msg=str(path))


def names(tree, chosen) -> list[str]:
    """The names of the leaves for which `chosen` holds."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return ["/".join(str(key.key) for key in path) for path, leaf in found if chosen(leaf)]


def kernels_of(tree) -> list[str]:
    return [name for name in names(tree, lambda _: True) if name.endswith("kernel")]


def delayed(tree) -> list[str]:
    return names(tree, lambda leaf: not np.any(leaf))


def is_noticed(grads, deferred, wanted) -> bool:
    try:
        assert_same_gradients(add(grads, deferred), wanted, 1e-2)
    except AssertionError:
        return True
    return False


def without_one(deferred, index=-1) -> DeferredGradients:
    """Without the operands of one GEMM."""
    operands, products = list(deferred.operands), list(deferred.products)
    operands.pop(index), products.pop(index)
    return replace(deferred, operands=tuple(operands), products=tuple(products))
