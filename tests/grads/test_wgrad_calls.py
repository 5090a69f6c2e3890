"""Which weight gradients can be computed later: of GEMMs whose calls and kernels a program tells."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fp8.core.deferral import FoundOperands, call_mark
from jax_fp8.core.recorder import kernel_mark
from jax_fp8.grads.wgrad_calls import WeightProduct, weight_products
from jax_fp8.jaxprs.named_values import Origin, origins

pytestmark = pytest.mark.versions

A, B = jnp.ones((16, 32)), jnp.ones((3, 16, 32))
GEMM = ("layer",)
X, SCALE = jnp.ones((16, 8), jnp.float8_e4m3fn), jnp.float32(1)


def named(x, name):
    return jnp.sum(checkpoint_name(x, name))


def operands(**changes) -> FoundOperands:
    types = tuple(map(jax.typeof, (X, SCALE, jnp.ones((32, 8), jnp.float8_e5m2), SCALE)))
    return replace(FoundOperands(0, "layer", "split", types, False), **changes)  # type: ignore[arg-type]


def products(param, found, times=1, slots=None, layers=None):
    """Of a GEMM whose kernel is this param, or each of its elements, called so often."""

    def loss(kernel):
        name = kernel_mark(GEMM, 0)
        if not layers:
            return named(kernel, name)
        return lax.scan(lambda total, element: (total + named(element, name), None), 0.0, kernel)[0]

    def gradient(kernel):
        return sum(named(kernel, call_mark(0)) for _ in range(times))

    of_loss, of_gradient = (jax.make_jaxpr(function)(param).jaxpr for function in (loss, gradient))
    stacked = () if slots is None else (slots,)
    return weight_products([found], origins(of_loss, [Origin(0)]), of_gradient, [param], {GEMM: stacked})


def test_the_product_of_a_kernel():
    assert products(A, operands()) == [WeightProduct(operands(), (0,), (32,), (), None, 1)]
    (twice,) = products(A, operands(), times=2)
    assert (twice.calls, twice.leading) == (2, (2,))
    (dead,) = products(A, operands(), times=0)
    assert (dead.calls, dead.leading) == (0, ())


def test_the_product_of_stacked_kernels():
    stacked = operands(has_slot=True)
    (product,) = products(B, stacked, times=6, slots=3, layers=3)
    assert (product.stacked, product.calls, product.leading) == ((3,), 2, (3, 2))
    assert not products(B, stacked, times=4, slots=3, layers=3)  # some layers would have one call more
    assert not products(B, stacked, times=6, slots=3)  # the kernel of each would be all of them
    assert not products(B, stacked, times=6, slots=6, layers=3)
    assert not products(B, operands(), times=3, layers=3)  # which is whose, nobody would know


def test_operands_of_another_shape_are_not_of_this_kernel():
    assert not products(A.T, operands())
    assert not products(jnp.ones((16, 16)), operands())
