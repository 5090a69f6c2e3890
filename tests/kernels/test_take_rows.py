"""Rows of FP8 values in another order, bit for bit, on one device and on several; what the kernel is told."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels.take_rows import TARGET, take_rows_of_fp8

SOURCES = np.array([4, -1, 0, 7, 2, 2**31 - 1, 3, 3, 1, 0, 6, -5, 5, 4, 3, 2], np.int32)  # of 7 rows


def every_pattern(dtype, rows=7, features=48):
    return (np.arange(rows * features) % 256).astype(np.uint8).view(np.dtype(dtype)).reshape(rows, features)


def expected(x, sources=SOURCES):
    is_there = ((sources >= 0) & (sources < len(x)))[:, None]
    return np.where(is_there, x.view(np.uint8)[np.clip(sources, 0, len(x) - 1)], 0).astype(np.uint8).view(x.dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("transposes", [False, True])
def test_every_bit_pattern(dtype, transposes):
    x = every_pattern(dtype)
    rows, *transpose = jax.jit(take_rows_of_fp8, static_argnums=2)(jnp.asarray(x), SOURCES, transposes)
    assert_same_bits(rows, expected(x))
    assert len(transpose) == transposes
    for array in transpose:
        assert_same_bits(array, expected(x).T)
    with pytest.raises(AssertionError):
        assert_same_bits(rows, expected(x, SOURCES[::-1]))


@pytest.mark.versions
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("of_x", "of_sources"), [(P("data"), P("data")), (P(None, "data"), P()), (P(), P("data"))])
def test_shards(of_x, of_sources, axis_type):
    x, mesh = every_pattern(E4M3, rows=8), jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, of_x)), jax.device_put(SOURCES, NamedSharding(mesh, of_sources))
        rows, transpose = jax.jit(take_rows_of_fp8, static_argnums=2)(*placed, True)
    assert_same_bits(rows, expected(x))
    assert_same_bits(transpose, expected(x).T)


def calls(rows, features, transposes):
    given = jax.ShapeDtypeStruct((8, features), E4M3), jax.ShapeDtypeStruct((rows,), jnp.int32)
    traced = jax.jit(take_rows_of_fp8, static_argnums=2).trace(*given, transposes)
    assert TARGET not in traced.lower(lowering_platforms=("cpu",)).as_text()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @jax_fp8_take_rows\(.*: \((.*)\) -> \((.*)\)", text)


def test_what_the_kernel_is_told(with_kernels):
    operands, both, alone = "tensor<8x48xf8E4M3FN>, tensor<32xi32>", "tensor<48x32xf8E4M3FN>", "tensor<0x0xf8E4M3FN>"
    assert calls(32, 48, True) == [(operands, f"tensor<32x48xf8E4M3FN>, {both}")]
    assert calls(32, 48, False) == [(operands, f"tensor<32x48xf8E4M3FN>, {alone}")]
    assert len(calls(33, 48, False)) == 1
    assert calls(32, 40, False) == calls(33, 48, True) == []  # left to the reference
