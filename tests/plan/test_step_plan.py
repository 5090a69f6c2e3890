"""A plan says of a step what its compiled program says: bytes of a device by kind, and whether they fit."""

import dataclasses
import functools
import re

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.plan.arithmetic import Memory
from jax_fp8.plan.described import GPUS
from jax_fp8.plan.rates import rates_of
from jax_fp8.plan.step_plan import GIB, mesh_of_described, options_of_plan, plan_step

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOKENS = jax.ShapeDtypeStruct((16, 128), jnp.int32)
FLOPS = 1e12
ABOUT = Memory(*(GIB * (number + 1) for number in range(7)))


@functools.cache
def plan(axis="fsdp", layers=1, microbatches=1):
    mesh = mesh_of_described({axis: 2}, "h200")
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=layers))
    options = {"parallel": mesh, "compiler_options": options_of_plan()}
    step = fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(1e-3), model.recipe, microbatches, **options)
    state = step.state_shapes(model.init, jax.random.key(0), TOKENS)
    batch = jax.ShapeDtypeStruct((16, 129), jnp.int32)
    parallel, rates = Parallelism(mesh), rates_of("h200")
    return plan_step(step, parallel, state, batch, microbatches, "h200", FLOPS, ABOUT, rates), state


def test_bytes_of_one_device():
    found, state = plan()
    matrices = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1)
    vectors = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim == 1)
    assert found.params == 4 * (matrices // 2 + vectors)
    assert found.optimizer == 2 * found.params + 4  # moments, and the count
    assert found.batch == 8 * 129 * 4
    arguments = found.params + found.optimizer + found.others + found.batch
    assert arguments <= found.report.argument_bytes <= arguments + 512 * len(jax.tree.leaves(state))  # padded, metrics
    assert found.peak == found.report.argument_bytes + found.report.temp_bytes and found.fits
    assert found.devices == 2 and found.tokens == 16 * 128


def test_what_it_says():
    found, _ = plan()
    rows = dict(re.fullmatch(r"( *\S.*?)  +(.*)", line).groups() for line in str(found).splitlines())  # type: ignore
    lines = {name: value for name, value in rows.items() if not name.startswith(" ")}
    assert lines["together"].split()[-1] == "fits" and lines["over the wire"].strip().endswith("a device and step")
    rate = FLOPS / found.time.seconds / 2 / 1e12
    assert f"{rate:.0f} TFLOP/s a GPU" in lines["model operations"]
    about = [rows[f"  {name}, about"].split() for name in ("activations", "weights", "gradients")]
    assert about == [["5.00", "GiB"], ["3.00", "GiB"], ["7.00", "GiB"]]  # of ABOUT; the larger of sums and gradients
    assert found.workspace == 32 * 2**20  # of cuBLASLt
    small = dataclasses.replace(found, memory=found.peak)
    assert not small.fits and "usable: does not fit" in str(small)
    assert found.time.wire_bytes == found.report.wire_bytes and found.time.host_bytes == 0
    assert "hosts" not in str(found)


def test_what_it_says_of_several_hosts():
    found, _ = plan()
    time = dataclasses.replace(found.time, host_bytes=5 * 2**20)
    many = str(dataclasses.replace(found, devices=16, time=time)).splitlines()
    assert "  where hosts are joined         5 MiB" in many
    assert many[-1] == (
        "16 GPUs are 2 hosts of 8 in the order of the mesh. A GPU is taken to send 190 GB/s within its host, "
        "50 GB/s to others."
    )


def test_what_it_says_of_a_pipeline():
    """Two stages with two microbatches: each waits in two of six ticks."""
    found, state = plan("pipe", 2, 2)
    assert found.pipeline is not None and found.pipeline.bubble == pytest.approx(1 / 3, abs=0.01)
    ticks, losses = found.pipeline.counts.values()
    assert ticks[0] == 0 and sum(ticks) == sum(losses) == 6 and losses[1] == 1
    assert 2 * 23 * 8 * 128 * 128 < found.pipeline.slot_bytes < found.report.temp_bytes  # two slots of a layer
    lines = dict(line.split("  ", 1) for line in str(found).splitlines() if not line.startswith(" "))
    assert lines["bubble, of units"].split() == [f"{100 * found.pipeline.bubble:.1f}", "%"]
    matrices = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1)
    vectors = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.ndim == 1)
    assert found.params == 4 * (matrices // 2 + vectors)


def test_rows_that_devices_cannot_share_are_refused():
    parallel = Parallelism(mesh_of_described({"fsdp": 2}, "h200"))
    with pytest.raises(ValueError, match="every device must have as many rows"):
        batch = jax.ShapeDtypeStruct((15, 129), jnp.int32)
        plan_step(None, parallel, None, batch, 1, "h200", FLOPS, ABOUT, None)  # type: ignore


def test_memory_is_in_gib():
    assert GPUS["h200"] / GIB == pytest.approx(139.8, abs=0.05)
