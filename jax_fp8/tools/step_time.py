"""How long a compiled step would take on GPUs of known rates: an estimate, from what the compiler will launch.

    instructions in the order of their launch ─seconds_of, Rates→ a time each ─two streams→ StepTime

Kernels run one after another, and collectives one after another beside them, each from where its start is launched; a
kernel that stands after the done waits for it. A kernel takes its operations or its bytes at the rate of the GPU,
whichever is longer, and a collective what one device sends. Nothing is run, and caches, power and a host that is late
are not in it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_fp8.tools.collectives import ring_bytes
from jax_fp8.tools.hlo import BRANCHES, CALLS, FUSIONS, Array, Instruction, by_computation

BF16_PRODUCTS = ("__cublas$", "jax_fp8_weight_gradient")
READS_A_PART = frozenset({"dynamic-slice", "gather", "slice"})


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches, in units a second.

    Args:
      fp8, bf16: operations of large matrix products.
      attention: operations of causal attention, of which half of all pairs count.
      memory: bytes of a copy, read or written.
      wire: bytes that a device sends to others of its host.
      collective: seconds that one takes beside its bytes.
      launch: seconds between two kernels.
      beside: by which part of it a kernel takes longer while a collective runs.
    """

    fp8: float
    bf16: float
    attention: float
    memory: float
    wire: float
    collective: float
    launch: float
    beside: float


# GPT-3 1.3B on one and on two GPUs, and copies: benchmarks/log.md, 2026-11-22 and 23.
H200 = Rates(1.40e15, 0.72e15, 0.40e15, 4.2e12, 190e9, 15e-6, 9e-6, 0.3)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one call.

    Args:
      kernels: the sum of all kernels, launches between them included.
      collectives: the sum of all collectives.
      exposed: in which kernels wait for a collective.
      slowed: by which kernels take longer beside collectives.
    """

    kernels: float
    collectives: float
    exposed: float
    slowed: float

    @property
    def seconds(self) -> float:
        return self.kernels + self.exposed + self.slowed

    def __str__(self):
        parts = ("kernels", "exposed", "slowed", "collectives")
        figures = ", ".join(f"{1e3 * getattr(self, name):.1f} ms {name}" for name in parts)
        return f"{1e3 * self.seconds:.1f} ms a step: {figures}"


def estimate(instructions: Sequence[Instruction], rates: Rates = H200) -> StepTime:
    """The time of a scheduled module, as `read_hlo` reads it. Of the branches of a conditional the longest counts,
    and a loop of unknown length runs once.
    """
    computations = by_computation(instructions)
    streams = _Streams(computations, rates)
    streams.run(next(instruction.computation for instruction in instructions if instruction.in_entry))
    hidden = max(streams.sent - streams.exposed, 0)
    return StepTime(streams.computed, streams.sent, streams.exposed, rates.beside * hidden)


class _Streams:
    """Two clocks: until when kernels have run, and until when collectives have."""

    def __init__(self, computations: Mapping[str, list[Instruction]], rates: Rates):
        self._computations, self._rates = computations, rates
        self._now = self._sent_until = 0.0
        self.computed = self.sent = self.exposed = 0.0

    def run(self, computation: str) -> None:
        ends: dict[str, float] = {}  # of what was started here, by the name that its done reads
        for instruction in self._computations[computation]:
            if (collective := self._collective_of(instruction)) is not None:
                ends[instruction.name] = self._send(collective)
                if not instruction.opcode.endswith("-start"):
                    self._wait(ends.pop(instruction.name))
            elif instruction.opcode.endswith("-update") and instruction.inputs[0] in ends:
                ends[instruction.name] = ends.pop(instruction.inputs[0])
            elif instruction.opcode.endswith("-done"):
                self._wait(ends.pop(instruction.inputs[0], self._now))
            elif instruction.opcode in BRANCHES:
                self.run(max(instruction.calls, key=self._length))
            elif instruction.opcode in CALLS:
                for _ in range(1 if instruction.trips is None else instruction.trips):
                    for called in instruction.calls:
                        self.run(called)
            elif instruction.launches:
                self._compute(seconds_of(instruction, self._computations, self._rates) + self._rates.launch)

    def _collective_of(self, instruction) -> Instruction | None:
        if instruction.collective:
            return instruction
        if instruction.opcode != "async-start":
            return None
        inside = (other for called in instruction.calls for other in self._computations[called])
        return next((other for other in inside if other.collective), None)

    def _length(self, computation) -> float:
        alone = _Streams(self._computations, self._rates)
        alone.run(computation)
        return max(alone._now, alone._sent_until)

    def _compute(self, seconds):
        self._now, self.computed = self._now + seconds, self.computed + seconds

    def _send(self, collective) -> float:
        seconds = self._rates.collective + _wire_bytes(collective) / self._rates.wire
        self._sent_until = max(self._now, self._sent_until) + seconds
        self.sent += seconds
        return self._sent_until

    def _wait(self, until):
        waited = max(0.0, until - self._now)
        self._now, self.exposed = self._now + waited, self.exposed + waited


def seconds_of(instruction: Instruction, computations: Mapping[str, list[Instruction]], rates: Rates) -> float:
    """What one kernel takes: its operations or its bytes."""
    moved = _bytes_of(instruction, computations) / rates.memory
    target = instruction.target
    if target == "jax_fp8_gemm":  # of a (m, k) and b (n, k), of which it may leave out some rows
        (m, n), k = instruction.results[0].shape, instruction.operands[0].shape[1]
        return max(moved, 2 * m * n * k / rates.fp8)
    if target.startswith(BF16_PRODUCTS) or instruction.opcode == "dot":
        sizes = [math.prod(array.shape) for array in (*instruction.operands[:2], instruction.results[0])]
        return max(moved, 2 * math.sqrt(math.prod(sizes)) / rates.bf16)  # m k, k n and m n
    if target.startswith("__cudnn$fmha"):
        return max(moved, _attention_operations(instruction) / rates.attention)
    return moved


def _attention_operations(instruction: Instruction) -> float:
    """Causal attention of the shapes of cuDNN's call: its first three operands (batch, seq, heads, dim) are queries,
    keys and values. Forward two products, backward five; half of all pairs.
    """
    queries, keys = instruction.operands[:2]
    batch, seq, heads, dim = queries.shape
    products = 5 if "Backward" in instruction.target else 2
    return products * 2 * batch * heads * seq * keys.shape[1] * dim / 2


def _bytes_of(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> int:
    """Bytes read and written. A fusion reads of an array only the part that it cuts out, and writes of one that it
    updates in place only what is new.
    """
    if instruction.opcode not in FUSIONS:
        # The workspace of a custom call is a result, too: bytes of no type.
        results = [array for array in instruction.results if not (instruction.target and array.dtype in ("u8", "s8"))]
        return _total(instruction.operands) + _total(results)
    inside = [other for called in instruction.calls for other in computations[called]]
    updates = [other for other in inside if other.opcode == "dynamic-update-slice"]
    updated = {name for other in updates for name in other.inputs[:1]}
    read = 0
    for parameter in (other for other in inside if other.opcode == "parameter"):
        readers = [other for other in inside if parameter.name in other.inputs]
        if parameter.name in updated:
            continue
        if readers and all(other.opcode in READS_A_PART and other.inputs[0] == parameter.name for other in readers):
            read += sum(_total(other.results) for other in readers)
        else:
            read += _total(parameter.results)
    written = sum(_total(other.operands[1:2]) for other in updates) if updates else _total(instruction.results)
    return read + written


def _total(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays)


def _wire_bytes(instruction: Instruction) -> int:
    kind, operands = instruction.collective, instruction.operands
    arrays = instruction.results[-len(operands) :] if kind == "all-gather" else operands
    return ring_bytes(kind, _total(arrays), instruction.devices or 1)
