"""Inside a `shard_map` that checks, results vary as their operands do; elsewhere nothing does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.kernels.vma import match_vma, vary, varying_axes

pytestmark = pytest.mark.versions


BY_ROWS = P("data")


def inside(function, check_vma=True, out_specs=BY_ROWS):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (BY_ROWS, P()), "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))(jnp.ones((16, 16)), jnp.ones((16, 16)))


def test_axes_are_those_of_any_array():
    found = []

    def run(x, w):
        found.extend(
            [varying_axes(x), varying_axes(w), varying_axes({"both": (w, x)}), varying_axes(vary(w, {"tensor"}))]
        )
        found.append([varying_axes(leaf) for leaf in match_vma(x, w, None)[:2]])
        return x

    inside(run)
    assert found == [{"data"}, set(), {"data"}, {"tensor"}, [{"data"}, {"data"}]]


def test_elsewhere_nothing_varies():
    found = []
    inside(lambda x, w: found.append(varying_axes(x, w)) or x, check_vma=False)
    x = jnp.ones(3)
    assert found == [set()] and varying_axes(x) == set()
    assert vary(x, frozenset()) is x and match_vma(x, 3.0) == (x, 3.0)


def test_results_of_a_kernel_vary(with_kernels):
    def run(x, w):
        pair = quantize_rowwise(x, Cast.with_scale(E4M3, 1.0))
        assert varying_axes(pair.rowwise.values) == varying_axes(pair.amax) == {"data"}
        assert varying_axes(quantize_rowwise(w, Cast.with_scale(E4M3, 1.0)).amax) == set()
        return pair.rowwise.values.astype(jnp.float32)

    np.testing.assert_array_equal(inside(run), np.ones((16, 16)))


def test_the_gradient_of_what_did_not_vary_is_a_sum():
    def run(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.multiply(*match_vma(x[:4], w[:4]))))(w)

    np.testing.assert_array_equal(inside(run, out_specs=P())[:4], np.full((4, 16), 4.0))
