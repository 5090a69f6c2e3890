"""Compiles jitted functions for H200s with the real GPU compiler, on a machine without a GPU.

XLA:GPU can compile for a described device (`jax_fp8/plan/described.py`). Partitioner, rewriters, fusion, scheduling,
buffer assignment, CUDA graph construction and the instantiate stage of the library's own handlers all run. Nothing is
autotuned or executed, so a test learns no times. XLA's own kernels end as PTX (`assembler/ptxas`). It needs jax's CUDA
plugin (`jax-cuda13-plugin`, `jax-cuda13-pjrt`) and `JAX_SKIP_CUDA_CONSTRAINTS_CHECK`, which `conftest.py` sets before
jax is imported.

    step = jax.jit(f, donate_argnums=0)
    program = h200.compile(step, h200.shapes(x, h200.on_one_device()))
    assert program.graphs == 1 and not program.copies
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_fp8.inspect.capture import CaptureReport, capture_report
from jax_fp8.inspect.hlo import Instruction, read_hlo, read_thunks
from jax_fp8.models import gpt
from jax_fp8.plan.described import UNTIMED, described_gpus
from jax_fp8.plan.described import missing_reason as missing_reason
from jax_fp8.train.lowering import Lowering

# The compiler of jaxlib 0.10 copies arrays that a conditional passes through, donated or not, and slices of a stacked
# array.
COPIES_IN_BRANCHES = jax.__version_info__ < (0, 11)

_GEMM_TARGETS = re.compile(r"__cublas\$|jax_fp8_(gemm|weight_gradient)$")


def devices(count: int) -> tuple[jax.Device, ...]:
    """`count` described H200s of one host; they compile and cannot run."""
    return described_gpus(count)


def mesh(axis_type: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of described H200s: `mesh(data=2, tensor=2)`."""
    shape = tuple(axes.values())
    grid = np.array(devices(math.prod(shape))).reshape(shape)
    return Mesh(grid, tuple(axes), axis_types=(axis_type,) * len(axes))


def on_one_device() -> Sharding:
    return SingleDeviceSharding(devices(1)[0])


def on_mesh(over: Mesh, *partition) -> Sharding:
    return NamedSharding(over, PartitionSpec(*partition))


def shapes(tree, sharding: Sharding):
    """The shapes and dtypes of a tree of arrays (or of shapes), all placed by one sharding."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


@dataclass(frozen=True)
class Program:
    """A compiled function, as the compiler describes it.

    Args:
      instructions: those of all computations of the optimised module, also inside fusions and loop bodies.
      graphs: how many CUDA graphs the program has; without a host loop, so many launches one call makes.
      outside_graphs: how often the host launches each kind of work outside of every CUDA graph.
      temp_bytes: scratch memory of one device.
      aliased_bytes: bytes of one device's results that overwrite a donated argument.
      report: the result of `capture_report`.
      hlo, thunks: the texts from which all this was read.
    """

    instructions: tuple[Instruction, ...]
    graphs: int
    outside_graphs: Counter
    temp_bytes: int
    aliased_bytes: int
    report: CaptureReport
    hlo: str
    thunks: str

    @property
    def custom_calls(self) -> Counter:
        """How many calls each custom-call target has."""
        return Counter(i.target for i in self.instructions if i.target)

    @property
    def gemms(self) -> list[Instruction]:
        """Matrix products by cuBLAS, by this library, and by XLA's own kernels (a `dot`)."""
        return [i for i in self.instructions if i.opcode == "dot" or _GEMM_TARGETS.match(i.target)]

    def gemms_of(self, *dtypes: str) -> list[Instruction]:
        """GEMMs whose two operands have these dtypes, in HLO's names: "bf16", "f32", "f8e4m3fn", "f8e5m2"."""
        return [i for i in self.gemms if all(operand.dtype in dtypes for operand in i.operands[:2])]

    def making(self, dtype: str, *shape: int) -> list[Instruction]:
        """Instructions, custom calls aside, with a result of this dtype whose last dims are `shape`."""
        return [
            i
            for i in self.instructions
            if i.launches
            and i.opcode != "custom-call"
            and any(result.dtype == dtype and result.shape[-len(shape) :] == shape for result in i.results)
        ]

    @property
    def copies(self) -> list[Instruction]:
        """Instructions that only copy an array, largest first. A copied constant counts as a fill, not as a copy."""
        return sorted((i for i in self.instructions if i.copies), key=lambda i: -i.results[0].bytes)

    @property
    def collectives(self) -> list[Instruction]:
        """Collective operations; an asynchronous start and done count as one."""
        return [i for i in self.instructions if i.collective]

    @property
    def all_gathers(self) -> list[Instruction]:
        return [i for i in self.collectives if i.opcode.startswith("all-gather")]


def compile(function, *arguments, **compiler_options) -> Program:
    """Compile a jitted function for the H200s on which its arguments' shapes are placed.

    Args:
      function: what `jax.jit` returned, or anything else with `lower`.
      arguments: trees of `jax.ShapeDtypeStruct` with shardings on `devices`; see `shapes`.
      compiler_options: in addition to the function's own.
    """
    options = UNTIMED | compiler_options
    compilation = Lowering(function.lower(*arguments)).compile(options)
    hlo, thunks, memory = compilation.as_text(), compilation.listing(), compilation.memory_analysis()
    graphs, outside = read_thunks(thunks)
    return Program(
        instructions=read_hlo(hlo),
        graphs=graphs,
        outside_graphs=outside,
        temp_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        report=capture_report(compilation),
        hlo=hlo,
        thunks=thunks,
    )


def use_cudnn(patch) -> None:
    """Makes every GPT use cuDNN's attention, as on a machine that has it. `patch` is pytest's `monkeypatch`."""
    patch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)

    class ByCudnn(gpt.TransformerBlock):
        def __post_init__(self):
            object.__setattr__(self, "attention_implementation", "cudnn")
            super().__post_init__()

    patch.setattr(gpt, "TransformerBlock", ByCudnn)


def over_the_wire(program: Program | jax.stages.Lowered) -> tuple[Counter[tuple[str, str]], int]:
    """The number of collectives by kind and dtype, `{("all-gather", "f8e4m3fn"): 2}`, and the bytes that a device sends
    in one call.

    Both count a loop's body once for each iteration. Collectives in branches count, but their bytes do not, as in
    `CaptureReport.wire_bytes`.
    """
    is_compiled = isinstance(program, Program)
    report = program.report if is_compiled else capture_report(Lowering(program).compile(UNTIMED))
    counts: Counter[tuple[str, str]] = Counter()
    for collective in report.collectives:
        counts.update(dict.fromkeys(((collective.kind, dtype) for dtype in collective.dtypes), collective.times))
    return counts, report.wire_bytes
