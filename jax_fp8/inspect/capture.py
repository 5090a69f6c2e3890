"""A report about a compiled step: its CUDA graphs, casts of weights, copies and collectives. It is read from the
compiler's texts; nothing runs.

    lowered ─compile→ optimized HLO, thunk listing ─capture_report→ CaptureReport

A step should be one CUDA graph, cast every weight once, and copy no weight in FP8. On several devices it should send
little, and compute meanwhile. The compiler decides all of this, and its results are the same when it decides otherwise:
only these texts show it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from jax_fp8.inspect.collectives import Collective, collectives_of, table
from jax_fp8.inspect.explain import FP8_TARGETS
from jax_fp8.inspect.hlo import BRANCHES, CALLS, FUSIONS, Instruction, by_computation, executed, read_hlo, read_thunks
from jax_fp8.train.lowering import Compilation, Lowering

CAST_TARGETS = ("jax_fp8_quantize", "jax_fp8_quantize_transpose", "jax_fp8_quantize_by_tile")
FP8_DTYPES = ("f8e4m3fn", "f8e5m2")
SMALLEST_COPY = 64 * 1024  # bytes; a copy up to this size costs a launch, and hardly any bandwidth
SHOWN_COPIES = 8  # in a printed report

_CAST_SCOPE = re.compile(r"\bcast_weights\b")


@dataclass(frozen=True)
class Branch:
    """The work of one branch of a conditional when it is taken. If it has conditionals inside, all their branches
    count.
    """

    weight_casts: int
    kernels: int
    gemms: int = 0  # FP8 matrix products, among the kernels

    def __str__(self):
        products = f", {self.gemms} of them FP8 products" if self.gemms else ""
        return f"{self.weight_casts} casts, {self.kernels} kernels{products}"


@dataclass(frozen=True)
class CaptureReport:
    """What one call of a compiled program launches, casts and copies. An instruction in a loop counts as often as the
    loop runs it.

    Args:
      graphs: CUDA graphs. A graph inside a loop that the host drives counts once.
      cuts: work launched outside all graphs: its kinds and how many of each; empty when one graph holds everything.
      weight_casts: casts of weights to FP8 outside of branches: those that run in every call.
      conditionals: the branches of every conditional, in the order of their index; of a `lax.cond`, false and true.
      weight_copies: copies of FP8 arrays of rank 2 or more, in all branches, largest first.
      all_copies_bytes: bytes of all copied arrays over 64 KiB, in all branches.
      gemms: FP8 matrix products outside of branches.
      temp_bytes: scratch memory of one device.
      aliased_bytes: bytes of results of one device that overwrite a donated argument.
      argument_bytes: bytes of arguments of one device.
      unknown_trips: loops whose length the compiler does not know; their instructions count once.
      collectives: in all branches, but without `jax.lax.psend` and `precv`.
    """

    graphs: int
    cuts: Mapping[str, int]
    weight_casts: int
    conditionals: tuple[tuple[Branch, ...], ...]
    weight_copies: tuple[str, ...]
    all_copies_bytes: int
    gemms: int
    temp_bytes: int
    aliased_bytes: int
    argument_bytes: int
    unknown_trips: int
    collectives: tuple[Collective, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in every call, so without collectives in branches. They are counted as on a ring,
        see `jax_fp8.inspect.collectives.ring_bytes`.
        """
        return sum(collective.wire_bytes for collective in self.collectives if not collective.in_branch)

    @property
    def _beside_branches(self) -> str:
        """What the report adds to the count of FP8 products, if branches have more of them."""
        has_gemms = any(branch.gemms for branches in self.conditionals for branch in branches)
        return " outside of branches" if has_gemms else ""

    def __str__(self):
        rows = [
            ("CUDA graphs", self.graphs),
            ("launched outside them", ", ".join(f"{count} {kind}" for kind, count in self.cuts.items()) or "nothing"),
            ("weight casts", self.weight_casts),
            *(("a conditional", " | ".join(map(str, branches))) for branches in self.conditionals),
            ("FP8 matrix products", f"{self.gemms}{self._beside_branches}"),
            ("copies of FP8 arrays", len(self.weight_copies)),
            *(("", copy) for copy in self.weight_copies[:SHOWN_COPIES]),
            *([("", "...")] if len(self.weight_copies) > SHOWN_COPIES else []),
            ("copied, arrays > 64 KiB", _mib(self.all_copies_bytes)),
            ("arguments", _mib(self.argument_bytes)),
            ("of them written in place", _mib(self.aliased_bytes)),
            ("scratch", _mib(self.temp_bytes)),
        ]
        if self.unknown_trips:
            rows.append(("loops of unknown length", f"{self.unknown_trips}, what they hold is counted once"))
        if self.collectives:
            rows.append(("over the wire", f"{_mib(self.wire_bytes)} a device and step"))
        return "\n".join([*(f"{name:<26}{value}" for name, value in rows), *table(self.collectives)])


def capture_report(program: "Lowering | Compilation | jax.stages.Lowered") -> CaptureReport:
    """Report on a program that is compiled for a CUDA device, which may be described and absent.

    Nothing runs: the report is read from the compiler's texts.

    Args:
      program: `step.lower(state, batch)`, which is compiled here; or the result of its `compile`.

    Returns:
      A `CaptureReport`, which prints as a table. It has the CUDA graphs and what is launched outside them, casts of
      weights, copies of FP8 arrays, memory in bytes, and collectives.

    Raises:
      ValueError: if `program` is neither of the two, or is compiled for another platform than CUDA.

    Example:
      The second line needs a GPU.

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> lowered = jax.jit(jnp.sin).lower(jnp.ones(4))
      >>> fp8.capture_report(lowered).graphs  # doctest: +SKIP
      1
    """
    compilation = _compilation(program)
    memory = compilation.memory_analysis()
    graphs, cuts = read_thunks(compilation.listing())
    instructions = read_hlo(compilation.as_text())
    computations = by_computation(instructions)
    entry = next(instruction.computation for instruction in instructions if instruction.in_entry)
    always = list(executed(computations, entry, CALLS | FUSIONS))
    anywhere = list(executed(computations, entry, CALLS | FUSIONS | BRANCHES))
    copies = _largest_first((copy, times) for copy, times in anywhere if copy.copies)
    return CaptureReport(
        graphs=graphs,
        cuts=dict(cuts),
        weight_casts=sum(times for call, times in always if _casts_weight(call)),
        conditionals=tuple(
            tuple(_branch(computations, name) for name in conditional.calls)
            for conditional, _ in anywhere
            if conditional.opcode in BRANCHES
        ),
        weight_copies=tuple(_times(copy, times) for copy, times in copies if _copies_weight(copy)),
        all_copies_bytes=sum(_bytes(copy) * times for copy, times in copies if _bytes(copy) > SMALLEST_COPY),
        gemms=sum(times for call, times in always if call.target in FP8_TARGETS),
        temp_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        unknown_trips=sum(loop.opcode == "while" and loop.trips is None for loop, _ in anywhere),
        collectives=collectives_of(instructions),
    )


def _compilation(program: object) -> Compilation:
    if isinstance(program, Compilation):
        return program
    if isinstance(program, jax.stages.Lowered):
        program = Lowering(program)
    if isinstance(program, Lowering):
        return program.compile()
    if isinstance(program, jax.stages.Compiled):
        raise ValueError(
            "capture_report needs the thunk listing, which XLA writes only while it compiles, got a compiled program "
            "without it; pass the lowered one: capture_report(jax.jit(f).lower(...))"
        )
    raise ValueError(
        f"capture_report needs a lowered program, got {type(program).__name__}; pass step.lower(state, batch)"
    )


def _branch(computations: Mapping[str, list[Instruction]], name: str) -> Branch:
    inside = executed(computations, name, CALLS | FUSIONS | BRANCHES)
    launched = list(executed(computations, name, CALLS | BRANCHES))
    return Branch(
        weight_casts=sum(times for call, times in inside if _casts_weight(call)),
        kernels=sum(times for instruction, times in launched if instruction.launches),
        gemms=sum(times for call, times in launched if call.target in FP8_TARGETS),
    )


def _casts_weight(call: Instruction) -> bool:
    return call.target in CAST_TARGETS and bool(_CAST_SCOPE.search(call.op_name))


def _copies_weight(copy: Instruction) -> bool:
    return copy.results[0].dtype in FP8_DTYPES and len(copy.results[0].shape) >= 2


def _largest_first(copies: Iterable[tuple[Instruction, int]]) -> list[tuple[Instruction, int]]:
    return sorted(copies, key=lambda copy_times: -_bytes(copy_times[0]) * copy_times[1])


def _bytes(copy: Instruction) -> int:
    return copy.results[0].bytes


def _times(copy: Instruction, times: int) -> str:
    return f"{times} x {copy}" if times > 1 else str(copy)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
