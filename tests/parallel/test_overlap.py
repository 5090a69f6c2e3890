"""What XLA makes of the options: several sums over the devices of a mesh at once, and a loop that copies nothing."""

import re

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from pipeline import Pipeline

from jax_fp8.parallel.overlap import OVERLAP_OPTIONS
from jax_fp8.parallel.schedules import make_schedule

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


def copies_in_ticks(**options) -> int:
    """How many arrays as large as a microbatch the ticks of a pipeline copy."""
    rows, width = 256, 1024
    pipeline, mesh = Pipeline(make_schedule("zero-bubble", 2, 4), rows, width), h200.mesh(pipe=2)
    arguments = [
        h200.shapes(given, h200.on_mesh(mesh, *spec))
        for given, spec in zip(pipeline.arguments(), pipeline.specs, strict=True)
    ]
    program = h200.compile(pipeline.program_on(mesh), *arguments, **options)
    return sum(copy.results[0].shape == (rows, width) and not copy.in_entry for copy in program.copies)


def test_what_a_pipeline_keeps_stays_where_it_is():
    """But for what a forward both keeps and sends: in each of its four branches one copy."""
    assert copies_in_ticks(**OVERLAP_OPTIONS) <= 4
    without = {name: value for name, value in OVERLAP_OPTIONS.items() if "region_analysis" not in name}
    assert copies_in_ticks(**without) > 100
