"""What XLA makes of the options: several sums over the devices of a mesh at once."""

import re

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jax_fp8.parallel.overlap import OVERLAP_OPTIONS

REASON = h200.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDTH, LAYERS = 4096, 4


def sums_in_flight(**options) -> int:
    """How many sums have begun at once and have not ended, in a program of some products and the sum of each."""
    mesh = h200.mesh(AxisType.Explicit, data=4)

    def of_a_device(x):
        found = []
        for _ in range(LAYERS):
            x = jnp.tanh(x @ x)
            found.append(lax.psum(x, "data"))
        return found

    rows = PartitionSpec("data")
    step = jax.shard_map(of_a_device, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
    x = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32, sharding=h200.on_mesh(mesh, ("data",)))
    hlo = jax.jit(step).lower(x).compile(h200.UNTIMED | options).as_text()
    begun = re.findall(r" all-reduce-(start|done)\(", hlo)
    assert begun.count("start") == begun.count("done") and "all-reduce" in hlo
    depths, depth = [0], 0
    for kind in begun:
        depth += 1 if kind == "start" else -1
        depths.append(depth)
    return max(depths)


def test_several_sums_run_at_once():
    apart = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}  # or they are small enough to be one
    assert sums_in_flight(**apart) <= 1
    assert sums_in_flight(**apart, **OVERLAP_OPTIONS) > 1
