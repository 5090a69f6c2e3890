"""Products of few rows with norm, cast, activation and parts: against the same one after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.cast import SQUARE, Cast
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels import few_rows, few_rows_gemm
from jax_fp8.kernels.activation_functions import activate
from jax_fp8.kernels.few_rows import FewRows
from jax_fp8.kernels.few_rows_gemm import KERNEL_ROWS, multiply_few_rows
from jax_fp8.kernels.norm import NormParameters, norm_quantize, normalize
from jax_fp8.kernels.prepared_gemm import can_be_cut, multiply_prepared
from jax_fp8.kernels.quantize import quantize_rowwise

CAST = Cast.with_row(E4M3, jnp.float32([9.0, 0.02, 5.0]), 1)


def arrays(m=3, n=64, k=144):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(m, k)) + 0.5, jnp.bfloat16)
    weight = Fp8Array(jnp.asarray(random.normal(size=(n, k), scale=20), jnp.float32).astype(E4M3), jnp.float32(0.01))
    norm = NormParameters(*(jnp.asarray(random.normal(size=k), jnp.float32) for _ in range(2)))
    bias, c = jnp.asarray(random.normal(size=n), jnp.bfloat16), jnp.asarray(random.normal(size=(m, n)), jnp.bfloat16)
    return x, weight, norm, bias, c


@pytest.mark.parametrize("norm_name", ["layernorm", "rmsnorm"])
def test_norm_and_cast_are_those_of_their_kernels(norm_name):
    x, weight, norm, bias, c = arrays()
    norm = norm if norm_name == "layernorm" else NormParameters(norm.scale, None)
    pair, _ = norm_quantize(x, norm, 1e-6, CAST, orientations="rowwise")
    d = multiply_prepared(FewRows(x, CAST, norm, 1e-6), weight, bias=bias, c=c)
    assert_same_bits(d, multiply_few_rows(pair.rowwise, weight, bias=bias, c=c))
    other = multiply_prepared(FewRows(x, CAST, norm, 1.0), weight, bias=bias, c=c)
    assert not np.array_equal(d, other), "another epsilon is noticed"


def test_a_cast_alone_and_a_norm_alone():
    x, weight, norm, bias, _ = arrays()
    rows = FewRows(x, CAST)
    assert rows.shape == x.shape
    assert rows.scale == np.float32(0.02)
    cast = quantize_rowwise(x, CAST).rowwise
    assert_same_bits(multiply_prepared(rows, weight, bias=bias), multiply_few_rows(cast, weight, bias=bias))
    normalized = normalize(x, norm, 1e-6, x.dtype)[0]
    for by in (weight, Fp8Array(weight.values, jnp.full((1, 2), 0.01), SQUARE)):
        d = multiply_prepared(FewRows(x, None, norm, 1e-6), by)
        assert_close(d, multiply_few_rows(normalized, by), "gemm_bfloat16")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_activation(activation):
    x, weight, norm, bias, _ = arrays()
    rows = FewRows(x, CAST, norm, 1e-6)
    d = multiply_prepared(rows, weight, bias=bias, activation=activation)
    assert_same_bits(d, activate(multiply_prepared(rows, weight, bias=bias), activation))
    assert d.shape == (3, 32 if activation == "swiglu" else 64)


@pytest.mark.parametrize("widths", [(32, 16, 16), (16, 48)])
def test_parts(widths):
    x, weight, norm, bias, _ = arrays()
    for rows in (FewRows(x, CAST, norm, 1e-6), quantize_rowwise(x, CAST).rowwise, x):
        whole = multiply_prepared(rows, weight, bias=bias)
        parts = multiply_prepared(rows, weight, bias=bias, widths=widths)
        assert [part.shape for part in parts] == [(3, width) for width in widths]
        assert_same_bits(jnp.concatenate(parts, axis=1), whole)


def test_which_rows_fit(monkeypatch):
    def of(m, k):
        return jnp.zeros((m, k), jnp.bfloat16)

    def norm(k):
        return NormParameters(jnp.ones(k), None)

    def by_a_kernel_before(m, k):
        return FewRows(of(m, k), CAST, norm(k)).fits(KERNEL_ROWS), FewRows(of(m, k), CAST).fits(KERNEL_ROWS)

    assert by_a_kernel_before(64, 16384) == (True, True) and by_a_kernel_before(65, 16) == (False, False)
    assert by_a_kernel_before(9, 16400) == (False, True), "a norm of more has no kernel of its own"
    assert not FewRows(of(9, 16), None, norm(16)).fits(KERNEL_ROWS), "warpgroups multiply no bfloat16"
    monkeypatch.setattr(few_rows, "has_warpgroups", lambda: False)
    assert FewRows(of(8, 4096), CAST, norm(4096)).fits(KERNEL_ROWS)
    assert not FewRows(of(8, 4096), CAST).fits(7) and not FewRows(of(8, 4096), CAST).fits(0)
    assert FewRows(of(1, 16384), CAST, norm(16384)).fits(KERNEL_ROWS)
    assert not FewRows(of(2, 16384), CAST, norm(16384)).fits(KERNEL_ROWS)  # the norm's arrays need as much as the rows
    assert FewRows(of(8, 8192), CAST).fits(KERNEL_ROWS) and not FewRows(of(8, 14336), CAST).fits(KERNEL_ROWS)
    assert not FewRows(of(8, 8192), None, norm(8192)).fits(KERNEL_ROWS)
    assert not FewRows(of(9, 16), CAST).fits(KERNEL_ROWS)
    assert not FewRows(jnp.zeros((8, 16)), CAST).fits(KERNEL_ROWS)
    for cast in (Cast.with_scale(E5M2, 1.0), Cast.from_amax(E4M3, jnp.float32(1), ScaleFormula())):
        assert not FewRows(of(8, 16), cast).fits(KERNEL_ROWS)
    monkeypatch.setattr(few_rows, "shared_bytes", lambda: few_rows.SMALL)
    assert FewRows(of(8, 2048), CAST, norm(2048)).fits(KERNEL_ROWS)
    assert not FewRows(of(8, 4096), CAST, norm(4096)).fits(KERNEL_ROWS)


def test_which_products_can_be_cut(monkeypatch):
    x, weight, *_ = arrays()
    rows = FewRows(x, CAST)
    assert can_be_cut(rows, weight, (32, 32))
    assert not can_be_cut(rows, weight, (64,))
    assert not can_be_cut(rows, weight, (56, 8))
    assert not can_be_cut(rows, weight, (16, 16, 16, 16))
    monkeypatch.setattr(few_rows_gemm, "MOST_ROWS", 2)
    assert can_be_cut(rows, weight, (32, 32))
    assert not can_be_cut(quantize_rowwise(x, CAST).rowwise, weight, (32, 32))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"activation": "gelu", "c": True}, "without c or widths"),
        ({"activation": "gelu", "widths": (32, 32)}, "without c or widths"),
        ({"widths": (32, 16)}, "into 2 to 3 parts"),
        ({"widths": (32, 32), "c": True}, "into 2 to 3 parts"),
        ({"rows": FewRows(jnp.zeros((9, 144), jnp.bfloat16), None)}, "FewRows of bfloat16 that fit, at most 8,"),
        ({"rows": FewRows(jnp.zeros((3, 144)), CAST)}, "FewRows of bfloat16 that fit, at most 64,"),
        ({"rows": jnp.zeros((3, 144), jnp.bfloat16), "activation": "gelu"}, "activates the product of FewRows alone"),
    ],
)
def test_what_is_refused(change, sentence):
    x, weight, norm, _, c = arrays()
    rows = change.pop("rows", FewRows(x, CAST, norm))
    how = change | ({"c": c} if change.pop("c", False) else {})
    with pytest.raises(ValueError, match=sentence):
        multiply_prepared(rows, weight, **how)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("of_x", "of_weight"), [(P("data"), P()), (P(None, "data"), P("data")), (P(), P(None, "data"))]
)
def test_on_a_mesh(axis_type, of_x, of_weight):
    x, weight, norm, bias, _ = arrays(m=4)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))

    def multiply(x, values, bias):
        rows, by = FewRows(x, CAST, norm, 1e-6), Fp8Array(values, weight.scale)
        return multiply_prepared(rows, by, bias=bias, activation="swiglu"), multiply_prepared(rows, by, bias=bias)

    wanted = multiply(x, weight.values, bias)
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in ((x, of_x), (weight.values, of_weight))
    ]
    with jax.set_mesh(mesh):
        got = jax.jit(multiply)(*placed, jax.device_put(bias, NamedSharding(mesh, P())))
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, "gemm_bfloat16")
