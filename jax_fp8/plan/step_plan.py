"""The plan of a training step on described GPUs: memory, bytes of collectives, an estimated time.

    step, shapes on described GPUs ─compile→ the program that would be launched ─capture_report, estimate→ Plan

XLA compiles the real program for these GPUs, so memory, collectives and launches are exact; only the time is an
estimate (plan/step_time.py). Nothing is run, so XLA's autotuning, which times kernels, is switched off.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from jax_fp8.core.types import Batch, PyTree
from jax_fp8.inspect.capture import CaptureReport, capture_report
from jax_fp8.inspect.hlo import Instruction, read_hlo
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.ticks import make_ticks
from jax_fp8.plan.arithmetic import Memory
from jax_fp8.plan.described import GPUS, HOST, UNTIMED, described_gpus
from jax_fp8.plan.pipeline_time import PipelineTime, pipeline_time
from jax_fp8.plan.rates import Rates
from jax_fp8.plan.step_time import StepTime, estimate, longest
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.cuda_graph import default_options
from jax_fp8.train.step import TrainStep

GIB = 2**30
USABLE = 0.92  # the share of a GPU's memory for a program; CUDA, cuBLAS and NCCL need the rest


@dataclass(frozen=True)
class HostCopies:
    """By arithmetic: bytes that a step moves from a device to its host and back again, and seconds that it waits."""

    size: float = 0
    seconds: float = 0


@dataclass(frozen=True)
class Plan:
    """Bytes of one device, and the work of a step.

    Args:
      params, optimizer, others: bytes of the state; `others` are scales, amax histories, and the step count.
      frozen: bytes of kernels that are frozen in FP8.
      batch: bytes of the device's part of the batch.
      report: the compiled step's; its scratch holds activations, gradients, FP8 weights and workspaces.
      time: the estimated time of a step.
      rates: the rates of the estimate.
      memory: bytes of the GPU.
      devices, tokens: how many a step has.
      model_flops: operations of the model's products in a step, forward and backward.
      about: the parts of the scratch, by arithmetic. Not all of them exist at the same time. None: not computed.
      workspace: bytes of the largest workspace of a kernel of a library, in the scratch.
      pipeline: the timing of the stages; None without `pipe`.
      host: the copies of offloaded residuals.
    """

    params: int
    optimizer: int
    others: int
    batch: int
    report: CaptureReport
    time: StepTime
    rates: Rates
    memory: int
    devices: int
    tokens: int
    model_flops: float
    about: Memory | None
    workspace: int
    pipeline: PipelineTime | None = None
    host: HostCopies = HostCopies()
    frozen: int = 0

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step."""
        return self.time.seconds + self.host.seconds

    @property
    def peak(self) -> int:
        return self.report.argument_bytes + self.report.temp_bytes

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def usable(self) -> int:
        """Bytes of a device that a program may use."""
        return int(USABLE * self.memory)

    def __str__(self) -> str:
        seconds, usable = self.seconds, self.usable / GIB
        verdict = "fits" if self.fits else "does not fit"
        rows = [
            *((name, f"{value / GIB:8.2f} GiB") for name, value in self._kinds()),
            ("together", f"{self.peak / GIB:8.2f} GiB of {usable:.1f} usable: {verdict}"),
            ("CUDA graphs", f"{self.report.graphs:8d}"),
            ("over the wire", f"{self.time.wire_bytes / 2**20:8.0f} MiB a device and step"),
            *self._between_hosts(),
            *([("to the host, and back", f"{self.host.size / GIB:8.2f} GiB, about")] if self.host.size else []),
            ("step, estimated", f"{1e3 * seconds:8.1f} ms"),
            *((f"  {name}", f"{1e3 * value:8.1f} ms") for name, value in self._parts()),
            *self._bubble(),
            ("tokens", f"{self.tokens / seconds:8.0f} /s, {self.tokens / seconds / self.devices:.0f} a GPU"),
            ("model operations", f"{self.model_flops / seconds / self.devices / 1e12:8.0f} TFLOP/s a GPU"),
        ]
        lines = [f"{name:<26}{value}" for name, value in rows]
        if self.devices > HOST:
            lines.append(
                f"{self.devices} GPUs are {math.ceil(self.devices / HOST)} hosts of {HOST} in the order of the mesh. "
                f"A GPU is taken to send {self.rates.wire / 1e9:.0f} GB/s within its host, "
                f"{self.rates.between_hosts / 1e9:.0f} GB/s to others."
            )
        return "\n".join(lines)

    def _between_hosts(self) -> Iterator[tuple[str, str]]:
        if self.devices > HOST:
            yield "  where hosts are joined", f"{self.time.host_bytes / 2**20:8.0f} MiB"

    def _kinds(self) -> Iterator[tuple[str, float]]:
        if self.frozen:
            yield "frozen kernels", self.frozen
        yield from (("params", self.params), ("optimizer state", self.optimizer), ("FP8 state", self.others))
        yield from (("batch", self.batch), ("scratch", self.report.temp_bytes))
        if self.pipeline is not None:
            yield "  slots of the stages", self.pipeline.slot_bytes
        if self.about is not None:
            yield from (("  activations, about", self.about.activations), ("  weights, about", self.about.weights))
            yield "  gradients, about", max(self.about.sums, self.about.gradients)
        yield "  workspace", self.workspace

    def _bubble(self) -> Iterator[tuple[str, str]]:
        if self.pipeline is not None:
            yield "bubble, of units", f"{100 * self.pipeline.bubble:8.1f} %"

    def _parts(self) -> Iterator[tuple[str, float]]:
        time = self.time
        yield from (("kernels", time.kernels), ("waiting for collectives", time.exposed))
        yield "slower beside them", time.slowed
        if self.host.size:
            yield "waiting for the host", self.host.seconds


def mesh_of_described(axes: dict[str, int], gpu: str) -> Mesh:
    """An Explicit mesh of described GPUs; `axes` has at least one."""
    sizes = tuple(axes.values())
    devices = described_gpus(math.prod(sizes), gpu)
    return jax.make_mesh(sizes, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes), devices=devices)


def plan_step(
    step: TrainStep,
    parallel: Parallelism,
    state: TrainState,
    batch: Batch,
    microbatches: int,
    gpu: str,
    model_flops: float,
    about: Memory | None,
    rates: Rates,
    host: HostCopies = HostCopies(),
    filled: float = 1.0,
) -> Plan:
    """The plan of a step.

    Args:
      step: made with `parallel=parallel` and `compiler_options=options_of_plan()`.
      state: from `step.state_shapes`.
      batch: `jax.ShapeDtypeStruct`s of the whole batch, of all devices; tokens are (sequences, seq + 1).
      model_flops: operations of the model's products in a step.
      about: the memory of the step, by arithmetic, or None.
      rates: the GPU's.
      host: the copies of offloaded residuals, by arithmetic.
      filled: as in `estimate`.
    """
    parallel.check_rows(batch, microbatches)
    split = NamedSharding(parallel.mesh, parallel.batch_spec)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), batch)
    compilation = step.lower(state, batch).compile()
    report = capture_report(compilation)
    instructions = read_hlo(compilation.as_text())
    pipeline = None
    if parallel.stages > 1:
        ticks = make_ticks(parallel.schedule_of(microbatches))
        pipeline = pipeline_time(ticks, instructions, rates)
    parts = [_own_bytes(tree) for tree in (state.params, state.opt_state, (state.fp8, state.step))]
    sequences, columns = jax.tree.leaves(batch)[0].shape
    return Plan(
        *parts,
        batch=_own_bytes(batch),
        report=report,
        time=estimate(instructions, rates, longest if pipeline is None else pipeline.taken, filled=filled),
        rates=rates,
        memory=GPUS[gpu],
        devices=parallel.mesh.size,
        tokens=sequences * (columns - 1),
        model_flops=model_flops,
        about=about,
        workspace=max(map(_workspace, instructions)),
        pipeline=pipeline,
        host=host,
        frozen=_own_bytes(state.collections),
    )


def options_of_plan(offloads: bool = False) -> dict[str, str | bool | int]:
    """XLA's options for a step on described GPUs: the usual ones of a step, without autotuning."""
    return default_options(on_mesh=True, offloads=offloads) | UNTIMED


def _workspace(instruction: Instruction) -> int:
    """Bytes of a custom call's workspace, which is a result of plain bytes (u8 or s8)."""
    return sum(array.bytes for array in instruction.results if instruction.target and array.dtype in ("u8", "s8"))


def _own_bytes(tree: PyTree) -> int:
    """Bytes of one device's shards."""
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
