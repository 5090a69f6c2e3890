"""The end of a step's FP8 state, compiled for H200s with no GPU:
a few kernels for any number of GEMMs, and no history copied.

A step of a whole model is compiled in `test_step.py`; here it is its last part alone, for more GEMMs. Every
check is also made on a program that must fail it.
"""

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.core.state import JOINED, join_amaxes, stage_joined
from jax_fp8.kernels import extension
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.update_state import TARGET, finish_step
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

GEMMS = 4 * JOINED  # of a model with 24 layers
RECIPE = fp8.DelayedScaling(amax_history_len=1024)


def state_of(scale, history) -> dict:
    gemm = {
        "scale": jax.ShapeDtypeStruct((3,), jnp.float32),
        "amax_history": jax.ShapeDtypeStruct((3, 1024), jnp.float32),
    }
    gemm = {"scale": h200.shapes(gemm["scale"], scale), "amax_history": h200.shapes(gemm["amax_history"], history)}
    return {f"gemm_{number}": gemm for number in range(GEMMS)}


def compiled(function, state, *arguments, donate=True) -> h200.Program:
    jitted = jax.jit(function, donate_argnums=(0,) if donate else (), compiler_options=CUDA_GRAPH_OPTIONS)
    return h200.compile(jitted, state, *arguments)


def kernels_of(program) -> int:
    """What the program launches, fused computations counted once."""
    return sum(i.launches and i.in_entry for i in program.instructions)


def test_the_update_is_one_kernel_and_the_state_stays_where_it_lies():
    on = h200.on_one_device()
    recorded = h200.shapes(jax.ShapeDtypeStruct((3 * GEMMS,), jnp.float32), on)
    program = compiled(lambda state, recorded: finish_step(state, recorded, RECIPE), state_of(on, on), recorded)
    assert (kernels_of(program), program.custom_calls[TARGET]) == (1, 1)
    assert program.copies == program.making("f32", 3, 1024) == []
    assert program.aliased_bytes == GEMMS * 3 * 1025 * 4
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})

    def staging(state, recorded):
        return fp8.update_state(stage_joined(state, recorded), RECIPE)

    assert len(compiled(staging, state_of(on, on), recorded).making("f32", 3, 1024)) >= GEMMS
    kept = compiled(
        lambda state, recorded: finish_step(state, recorded, RECIPE), state_of(on, on), recorded, donate=False
    )
    assert len(kept.copies) == 2 * GEMMS


@pytest.mark.parametrize(("join", "expected"), [(join_amaxes, 5), (jnp.concatenate, GEMMS + 1)])
def test_amaxes_are_joined_by_a_few_kernels(join, expected):
    def run(xs):
        amaxes = [jnp.stack([amax(x) for x in xs[number : number + 3]]) for number in range(0, len(xs), 3)]
        return amax(join([jnp.maximum(0.0, three) for three in amaxes]))

    x = h200.shapes(jax.ShapeDtypeStruct((2, 128), jnp.float32), h200.on_one_device())
    program = compiled(run, [x] * (3 * GEMMS), donate=False)
    assert kernels_of(program) - program.custom_calls["jax_fp8_amax"] == expected


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", [False, True])
def test_on_a_mesh_every_device_updates_all_of_the_state(axis_type, split):
    """And gathers what someone has split before, here the scales."""
    mesh = h200.mesh(axis_type, data=3)
    scale, history = h200.on_mesh(mesh, *["data"] * split), h200.on_mesh(mesh)
    with jax.set_mesh(mesh):
        program = compiled(lambda state: fp8.update_state(state, RECIPE), state_of(scale, history), donate=not split)
    assert program.custom_calls[TARGET] == 1
    assert bool(program.all_gathers) == split
    (call,) = [i for i in program.instructions if i.target == TARGET]
    assert {result.shape for result in call.results} == {(2,), (3,), (3, 1024)}
    if not split:
        assert program.copies == [] and program.aliased_bytes == GEMMS * 3 * 1025 * 4
