"""An estimate of a compiled step's time on GPUs with known rates, from the instructions that the step launches.

    instructions in the order of their launch ─seconds_of, Rates→ a time each ─two streams→ StepTime

Kernels run one after another in one stream, collectives in another stream. A collective begins when its start is
launched, and the kernels after its done wait for it. The time of a kernel is that of its operations or of its bytes,
whichever is longer, at the GPU's rates; that of a collective is the time of the bytes that one device sends, at the
rate within a host or between hosts. A loop counts its trips. A conditional counts its branches as often as the caller
says that they run. Caches, power limits and a host that launches too late are not part of the estimate.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_fp8.inspect.collectives import counted_arrays, ring_bytes
from jax_fp8.inspect.groups import on_hosts
from jax_fp8.inspect.hlo import BRANCHES, CALLS, FUSIONS, Array, Instruction, by_computation
from jax_fp8.plan.described import HOST
from jax_fp8.plan.rates import Rates, fp8_rate, rate_at

# The rate of a GEMM of groups of rows, as a share of that of one GEMM of all rows, as measured on an H200.
GROUPED = {"jax_fp8_grouped_gemm": 0.97, "jax_fp8_grouped_gemm_weight_gradient": 0.86}
BF16_PRODUCTS = ("__cublas$", "jax_fp8_weight_gradient")
READS_A_PART = frozenset({"dynamic-slice", "gather", "slice"})

Taken = Callable[[Instruction], Sequence[float] | None]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and bytes that a device sends.

    Args:
      kernels: the sum of all kernels, with the gaps between their launches.
      collectives: the sum of all collectives.
      exposed: the time in which kernels wait for collectives.
      slowed: the additional time of kernels that run beside collectives.
      wire_bytes: all bytes that a device sends.
      host_bytes: those of them in collectives that join several hosts.
    """

    kernels: float
    collectives: float
    exposed: float
    slowed: float
    wire_bytes: int = 0
    host_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.kernels + self.exposed + self.slowed

    def __str__(self) -> str:
        parts = ("kernels", "exposed", "slowed", "collectives")
        figures = ", ".join(f"{1e3 * getattr(self, name):.1f} ms {name}" for name in parts)
        return f"{1e3 * self.seconds:.1f} ms a step: {figures}"


def longest(conditional: Instruction) -> None:
    """The default of `taken`: nothing is known about any conditional, so its longest branch counts."""


def estimate(
    instructions: Sequence[Instruction], rates: Rates, taken: Taken = longest, host: int = HOST, filled: float = 1.0
) -> StepTime:
    """The time of a scheduled module. A loop of unknown length runs once.

    Args:
      instructions: the module, from `read_hlo`.
      rates: the GPU's.
      taken: from a conditional, how often each of its branches runs, in the order of their index. Only the ratios of
        these numbers count: a conditional takes the mean of its branches, weighted by them. With None, the branch that
        takes longest runs every time.
      host: the number of GPUs of one host; devices are numbered host by host.
      filled: the share of their rows that grouped GEMMs multiply.
    """
    program = _Program(by_computation(instructions), rates, taken, host, filled)
    streams = _Streams(program)
    streams.run(next(instruction.computation for instruction in instructions if instruction.in_entry))
    total = streams.totals
    hidden = max(total["sent"] - total["exposed"], 0)
    sent = round(total["wire bytes"]), round(total["host bytes"])
    return StepTime(total["computed"], total["sent"], total["exposed"], rates.beside * hidden, *sent)


def branch_seconds(
    conditional: Instruction, instructions: Sequence[Instruction], rates: Rates, host: int = HOST
) -> list[float]:
    """The seconds of each branch of a conditional by itself, in the order of their index."""
    program = _Program(by_computation(instructions), rates, longest, host)
    return [program.length(name) for name in conditional.calls]


class _Program:
    """A module and the times of its parts: kernels, collectives, and the branches of its conditionals."""

    def __init__(
        self,
        computations: Mapping[str, list[Instruction]],
        rates: Rates,
        taken: Taken,
        host: int,
        filled: float = 1.0,
    ):
        self.computations, self.rates, self._taken, self._host = computations, rates, taken, host
        self._filled = filled
        self.length = functools.cache(self.length)

    def seconds(self, kernel: Instruction) -> float:
        return seconds_of(kernel, self.computations, self.rates, self._filled) + self.rates.launch

    def sending(self, collective: Instruction) -> tuple[float, int, int]:
        """The seconds of a collective, the bytes that a device sends, and the same bytes if it joins several hosts,
        else 0.

        All devices of a group on one host send to other hosts at the same time, each over its own network card. In a
        collective-permute, each pair of source and target uses one card.
        """
        sent = _wire_bytes(collective)
        hosts, devices = on_hosts(collective.groups, self._host)
        senders = 1 if collective.collective == "collective-permute" else devices
        across = min(self.rates.wire, senders * self.rates.between_hosts)
        seconds = self.rates.collective + sent / (across if hosts > 1 else self.rates.wire)
        return seconds, sent, sent if hosts > 1 else 0

    def shares(self, conditional: Instruction) -> list[tuple[str, float]]:
        """The branches that run, each with its share of all runs."""
        counts = self._taken(conditional)
        if counts is None:
            return [(max(conditional.calls, key=self.length), 1.0)]
        if len(counts) != len(conditional.calls) or min(counts) < 0 or not sum(counts):
            raise ValueError(
                f"taken must give {len(conditional.calls)} numbers for the branches of {conditional.name}, none below "
                f"0 and at least one above, got {list(counts)}; give a number for each branch, or None"
            )
        return [(name, count / sum(counts)) for name, count in zip(conditional.calls, counts, strict=True) if count]

    def collective_of(self, instruction: Instruction) -> Instruction | None:
        """The collective that this instruction is, or starts asynchronously; None for other instructions."""
        if instruction.collective:
            return instruction
        if instruction.opcode != "async-start":
            return None
        inside = (other for called in instruction.calls for other in self.computations[called])
        return next((other for other in inside if other.collective), None)

    def length(self, computation: str) -> float:
        """The seconds of a computation by itself."""
        alone = _Streams(self)
        alone.run(computation)
        return max(alone.now, alone.sent_until)


class _Streams:
    """Two clocks, up to which kernels and collectives have run, and the sums that make a `StepTime`."""

    def __init__(self, program: _Program, now: float = 0.0, sent_until: float = 0.0):
        self._program, self.now, self.sent_until = program, now, sent_until
        self.totals: dict[str, float] = defaultdict(float)

    def run(self, computation: str) -> None:
        """Run the instructions of a computation in their order."""
        ends: dict[str, float] = {}  # when each collective that was started here ends, by the name that its done reads
        for instruction in self._program.computations[computation]:
            if (collective := self._program.collective_of(instruction)) is not None:
                ends[instruction.name] = self._send(collective)
                if not instruction.opcode.endswith("-start"):
                    self._wait(ends.pop(instruction.name))
            elif instruction.opcode.endswith("-update") and instruction.inputs[0] in ends:
                ends[instruction.name] = ends.pop(instruction.inputs[0])
            elif instruction.opcode.endswith("-done"):
                self._wait(ends.pop(instruction.inputs[0], self.now))
            elif instruction.opcode in BRANCHES:
                self._branch(instruction)
            elif instruction.opcode in CALLS:
                self._call(instruction)
            elif instruction.launches:
                self._compute(self._program.seconds(instruction))

    def _branch(self, conditional: Instruction) -> None:
        """Run each branch from the present clocks, and take their weighted mean."""
        branches = []
        for name, share in self._program.shares(conditional):
            streams = _Streams(self._program, self.now, self.sent_until)
            streams.run(name)
            branches.append((streams, share))
        self.now = sum(share * streams.now for streams, share in branches)
        self.sent_until = sum(share * streams.sent_until for streams, share in branches)
        for streams, share in branches:
            self._add(streams.totals, share)

    def _call(self, call: Instruction) -> None:
        """Run the computations that an instruction calls. Of a loop, the first two trips are run. Later trips are like
        the second, in which no collective from before the loop is running any more.
        """
        trips = 1 if call.trips is None else call.trips
        for trip in range(min(trips, 2)):
            began, before = self.now, dict(self.totals)
            for called in call.calls:
                self.run(called)
            if trip:
                self._add({name: total - before.get(name, 0) for name, total in self.totals.items()}, trips - 2)
                self.sent_until += (trips - 2) * (self.now - began)
                self.now += (trips - 2) * (self.now - began)

    def _compute(self, seconds: float) -> None:
        self.now += seconds
        self._add({"computed": seconds})

    def _send(self, collective: Instruction) -> float:
        """Queue a collective, and return when it ends."""
        seconds, sent, across = self._program.sending(collective)
        self.sent_until = max(self.now, self.sent_until) + seconds
        self._add({"sent": seconds, "wire bytes": sent, "host bytes": across})
        return self.sent_until

    def _wait(self, until: float) -> None:
        waited = max(0.0, until - self.now)
        self.now += waited
        self._add({"exposed": waited})

    def _add(self, totals: Mapping[str, float], times: float = 1) -> None:
        for name, total in totals.items():
            self.totals[name] += times * total


def seconds_of(
    instruction: Instruction, computations: Mapping[str, list[Instruction]], rates: Rates, filled: float = 1.0
) -> float:
    """The seconds of one kernel: those of its operations or of its bytes, whichever are more; `filled` as in
    `estimate`.
    """
    moved = _bytes_of(instruction, computations) / rates.memory
    target = instruction.target
    if target == "jax_fp8_gemm":  # the operands are a (m, k) and b (n, k); m and n of the result may be fewer rows
        (m, n), k = instruction.results[0].shape, instruction.operands[0].shape[1]
        return max(moved, 2 * m * n * k / fp8_rate(rates, instruction.accumulation, 2 * m * n * k))
    if target in GROUPED:
        operations = filled * _grouped_operations(instruction)
        return max(moved, operations / (GROUPED[target] * fp8_rate(rates, instruction.accumulation, operations)))
    if target.startswith(BF16_PRODUCTS) or instruction.opcode == "dot":
        sizes = [math.prod(array.shape) for array in (*instruction.operands[:2], instruction.results[0])]
        operations = 2 * math.sqrt(math.prod(sizes))  # the sizes are m k, k n and m n, whatever the layouts
        return max(moved, operations / rate_at(rates.bf16, operations))
    if target.startswith("__cudnn$fmha"):
        curve = rates.attention_fp8 if target.endswith("F8") else rates.attention
        tokens = instruction.operands[1].shape[1]
        return max(moved, _attention_operations(instruction) / rate_at(curve, tokens))
    return moved


def _grouped_operations(instruction: Instruction) -> int:
    """Operations of a grouped GEMM if all rows are multiplied. Its first operand is (rows, k) and its result (rows, n);
    of a weight gradient they are (k, rows) and (experts, k, n).
    """
    first, result = instruction.operands[0].shape, instruction.results[0].shape
    return 2 * math.prod(first) * result[-1]


def _attention_operations(instruction: Instruction) -> float:
    """Operations of a call of cuDNN's causal attention; its first three operands (batch, seq, heads, dim) are queries,
    keys and values. The forward has two products, the backward five, over half of all pairs of tokens.
    """
    queries, keys = instruction.operands[:2]
    batch, seq, heads, dim = queries.shape
    products = 5 if "Backward" in instruction.target else 2
    return products * 2 * batch * heads * seq * keys.shape[1] * dim / 2


def _bytes_of(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> int:
    """Bytes that a kernel reads and writes. A fusion that slices an array reads only the slice, and one that updates an
    array in place writes only the update.
    """
    if instruction.opcode not in FUSIONS:
        # The workspace of a custom call is a result too, of plain bytes, and does not count.
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
    return ring_bytes(instruction.collective, _total(counted_arrays(instruction)), instruction.devices or 1)
