"""Rows before norm and cast: how many the kernel prepares, and what is around a product."""

from types import SimpleNamespace

import cpp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels import extension
from jax_fp8.kernels.few_rows import (
    NORMALIZED_DEPTH,
    PREPARED_ROWS,
    WARPGROUP_ROWS,
    Around,
    FewRows,
    device_count,
    has_warpgroups,
    prepare_reference,
    scale_of,
)


def around(**changes):
    settings = {"dtype": np.dtype(np.float32), "has_bias": False, "has_c": False, "tiles": (None, None), "norm": ""}
    settings |= {"epsilon": 0.0, "cast": None, "activation": "", "widths": ()}
    return Around(**settings | changes)


def test_the_kernel_prepares_as_many_rows_as_it_says():
    plan = "device/few_rows_gemm_plan.cuh"
    assert cpp.constant(plan, "kMostPreparedRows") == PREPARED_ROWS
    assert cpp.constant(plan, "kMostRows") == WARPGROUP_ROWS
    assert cpp.constant(plan, "kMostNormalizedDepth") == NORMALIZED_DEPTH


@pytest.mark.parametrize(
    ("built_for", "has"), [("90a-real", True), ("80 90a-real 100f", True), ("90-real", False), ("89 90", False)]
)
def test_a_build_for_90_alone_has_no_warpgroups(built_for, has, monkeypatch):
    monkeypatch.setattr(extension, "built", lambda: True)
    monkeypatch.setattr(extension, "_extension", SimpleNamespace(architectures=lambda: built_for))
    assert has_warpgroups() == has
    monkeypatch.setattr(extension, "built", lambda: False)
    assert has_warpgroups(), "a reference is for all"


def test_where_parts_begin():
    assert around().part_starts == (0, 0)
    assert around(widths=(32, 16)).part_starts == (32, 0)
    assert around(widths=(32, 16, 48)).part_starts == (32, 48)


def test_gates():
    assert around(activation="swiglu").gated
    assert not around(activation="gelu").gated and not around().gated


def test_the_scale_of_a_cast():
    assert scale_of(Cast.with_row(E4M3, jnp.float32([3.0, 5.0]), 1)) == 5
    assert scale_of(Cast.with_scale(E4M3, 7.0)) == 7
    assert FewRows(jnp.zeros((1, 16), jnp.bfloat16), None).scale == 1


def test_rows_as_they_are_multiplied():
    x = jnp.asarray([[1.0, -3.0, 500.0]], jnp.bfloat16)
    cast = prepare_reference(x, jnp.float32(0.5), None, 0.0)
    assert isinstance(cast, Fp8Array) and cast.values.astype(jnp.float32).tolist() == [[2.0, -6.0, 448.0]]
    assert prepare_reference(x, None, None, 0.0) is x


def test_devices_that_may_split_arrays():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arrays = [np.ones(3), jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, PartitionSpec("data")))]
    found = []

    def count(arrays):
        found.append(device_count(arrays))
        return arrays[1]

    assert (device_count([]), device_count(arrays[:1]), device_count(arrays)) == (1, 1, 4)
    jax.jit(count)(arrays)
    for names in ({"data"}, {"data", "tensor"}):
        part = {"mesh": mesh, "axis_names": names, "in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
        jax.jit(jax.shard_map(count, **part, check_vma=False))(arrays)
    assert found == [4, 2, 1]
