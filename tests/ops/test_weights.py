"""The kernels of GEMMs in FP8: with the scales of the state, or with their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.ops.weights import cast_gemms, kernels_of

pytestmark = pytest.mark.versions

GEMM = ("layer", "a+b")
PARAMS = {
    "layer": {name: {"kernel": jax.random.normal(jax.random.key(i), (16, 32))} for i, name in enumerate(("a", "b"))}
}
STATE = {"layer": {"a+b": {"scale": jnp.float32([1, 0.25, 1]), "amax_history": jnp.zeros((3, 2))}}}


@pytest.mark.parametrize(
    ("recipe", "state", "scale"),
    [(fp8.DelayedScaling(), STATE, 0.25), (fp8.CurrentScaling(), {}, None)],
    ids=["delayed", "current"],
)
def test_kernels_side_by_side(recipe, state, scale):
    kernels = kernels_of(GEMM, PARAMS)
    amax = float(max(jnp.max(jnp.abs(kernel)) for kernel in kernels))
    pair = cast_gemms(PARAMS, state, {GEMM: recipe})["layer"]["a+b"]["kernel"]
    found = float(pair.rowwise.scale)
    assert found == pytest.approx(scale or amax / 448, rel=1e-6)
    expected = quantize_transpose(jnp.concatenate(kernels, axis=1), Cast.with_scale(fp8.E4M3, jnp.float32(found)))
    assert_same_bits(pair.rowwise.values, expected.rowwise.values)
    assert_same_bits(pair.columnwise.values, np.asarray(expected.rowwise.values).T)
    doubled = cast_gemms(PARAMS, state, {GEMM: recipe}, {GEMM: lambda pair: (pair, pair)})
    assert len(doubled["layer"]["a+b"]["kernel"]) == 2


def test_a_kernel_that_is_not_there():
    with pytest.raises(ValueError, match=r"params must have the kernel layer/c/kernel of a GEMM .*, got None"):
        cast_gemms(PARAMS, {}, {("layer", "c"): fp8.CurrentScaling()})
