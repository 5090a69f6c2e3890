"""The collectives of a compiled program: their dtypes and bytes, and whether kernels run in the meantime.

    instructions in the order of their launch ─collectives_of→ Collective, one for each place ─table→ rows

XLA:GPU lists instructions in the order in which it will launch them. A collective that may run beside other work is a
pair of start and done: the instructions between them run while it sends. A collective without such a pair, or with
nothing in between, is exposed: the device waits for it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax_fp8.inspect.hlo import BRANCHES, CALLS, FUSIONS, Array, Instruction, by_computation, executed

_PRODUCTS = re.compile(r"__cublas\$|__cudnn\$|jax_fp8_(gemm|weight_gradient)$")


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, as one device sees it.

    Args:
      kind: as HLO calls it: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute".
      arrays: the results of an all-gather, the operands of every other kind. XLA may combine several arrays into one
        collective. Of a ragged all-to-all it is its operand or its result, whichever is smaller: only devices know how
        many rows they send, and on average no more than either has.
      devices: how many exchange data in one group.
      times: how often a call of the program runs it.
      launches: kernels between its start and its done, without other collectives; with 0 it is exposed.
      products: how many of these kernels are matrix products or attention.
      in_branch: whether it stands in a branch of a conditional, and runs as often as that branch is taken;
        `times` is then how often the conditional runs.
    """

    kind: str
    arrays: tuple[Array, ...]
    devices: int
    times: int
    launches: int
    products: int
    in_branch: bool

    @property
    def dtypes(self) -> tuple[str, ...]:
        """As HLO names them, "f8e4m3fn" or "bf16"; several where XLA combined arrays of several dtypes."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    @property
    def hidden(self) -> bool:
        return self.launches > 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one call of the program."""
        return sum(map(self.wire_bytes_of, self.dtypes))

    def wire_bytes_of(self, dtype: str) -> int:
        """`wire_bytes` of the arrays of one dtype alone."""
        array_bytes = sum(array.bytes for array in self.arrays if array.dtype == dtype)
        return self.times * ring_bytes(self.kind, array_bytes, self.devices)

    def __str__(self):
        arrays = ", ".join(map(str, self.arrays))
        beside = f"beside {self.launches} kernels, {self.products} of them products" if self.hidden else "exposed"
        branch = ", in a branch" if self.in_branch else ""
        return f"{self.times} x {self.kind}({arrays}) of {self.devices} devices, {beside}{branch}"


def ring_bytes(kind: str, array_bytes: int, devices: int) -> int:
    """Bytes that each of the devices sends on a ring. Where the switch itself adds, an all-reduce sends less.

    Args:
      kind: as of a `Collective`.
      array_bytes: of the result of an all-gather; of the operand of any other kind.
      devices: on the ring.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return array_bytes if devices > 1 else 0
    rounds = 2 if kind == "all-reduce" else 1
    return -(-rounds * (devices - 1) * array_bytes // devices)


def collectives_of(instructions: Sequence[Instruction]) -> tuple[Collective, ...]:
    """The collectives of a scheduled module. One that runs inside and outside of branches makes two entries."""
    computations = by_computation(instructions)
    entry = next(instruction.computation for instruction in instructions if instruction.in_entry)
    always = _runs(executed(computations, entry, CALLS | FUSIONS))
    anywhere = _runs(executed(computations, entry, CALLS | FUSIONS | BRANCHES))
    asynchronous = {called: start for start in instructions for called in _wrapped(start)}
    collectives = []
    for instruction, times in anywhere.items():
        launches, products = _overlap(computations, asynchronous.get(instruction.computation, instruction))
        for in_branch, count in ((False, always[instruction]), (True, times - always[instruction])):
            if count:
                kind, arrays, devices = instruction.collective, counted_arrays(instruction), instruction.devices or 1
                collectives.append(Collective(kind, arrays, devices, count, launches, products, in_branch))
    return tuple(collectives)


def _runs(instructions: Iterable[tuple[Instruction, int]]) -> Counter[Instruction]:
    """How often each collective runs."""
    runs: Counter[Instruction] = Counter()
    for instruction, times in instructions:
        if instruction.collective:
            runs[instruction] += times
    return runs


def _wrapped(start: Instruction) -> tuple[str, ...]:
    """The computations that an instruction runs asynchronously."""
    return start.calls if start.opcode in ("async-start", "call-start", "fusion-start") else ()


def counted_arrays(instruction: Instruction) -> tuple[Array, ...]:
    """The arrays by which a collective is counted. An all-gather's start lists its operands among its results, in front
    of the gathered arrays.
    """
    operands = instruction.operands
    if instruction.collective == "ragged-all-to-all":  # the others are its output, offsets and sizes
        return (min(operands[0], operands[1], key=lambda array: array.bytes),)
    return instruction.results[-len(operands) :] if instruction.collective == "all-gather" else operands


def _overlap(computations: Mapping[str, list[Instruction]], start: Instruction) -> tuple[int, int]:
    """How many kernels are launched between a start and its done, and how many of them are products."""
    if not start.opcode.endswith("-start"):
        return 0, 0
    inside = {**computations, "": _between(computations[start.computation], start)}
    launched = executed(inside, "", CALLS)
    launches = sum(times for other, times in launched if other.launches and not other.collective)
    return launches, sum(times for other, times in executed(inside, "", CALLS | FUSIONS) if _is_product(other))


def _between(block: list[Instruction], start: Instruction) -> list[Instruction]:
    """The instructions between a start and its done; without a done in this block, all that follow."""
    between, name = [], start.name
    for instruction in block[block.index(start) + 1 :]:
        if name in instruction.inputs and instruction.opcode.endswith("-done"):
            break
        if name in instruction.inputs and instruction.opcode.endswith("-update"):
            name = instruction.name
        between.append(instruction)
    return between


def _is_product(instruction: Instruction) -> bool:
    return instruction.opcode == "dot" or bool(_PRODUCTS.match(instruction.target))


def table(collectives: Iterable[Collective]) -> list[str]:
    """The rows of a printed report, a row for each kind, dtype and size of group; none without collectives.

    A collective of several dtypes counts in the row of each, with its arrays of that dtype. Collectives in branches
    count as if every branch were taken whenever its conditional runs, so their rows are upper limits.
    """
    groups: dict[tuple, list[Collective]] = {}
    for collective in collectives:
        for dtype in collective.dtypes:
            key = collective.in_branch, collective.kind, dtype, collective.devices
            groups.setdefault(key, []).append(collective)
    rows: list[tuple[str, ...]] = [("", "MiB a step", "beside products", "beside other kernels", "exposed")]
    for (in_branch, kind, dtype, devices), group in sorted(groups.items()):
        count = sum(collective.times for collective in group)
        beside_products = [collective for collective in group if collective.products]
        beside_others = [collective for collective in group if collective.hidden and not collective.products]
        exposed = [collective for collective in group if not collective.hidden]
        name = f"{count} {kind} {dtype} of {devices}{', in branches, at most' if in_branch else ''}"
        rows.append((name, *(_mib(part, dtype) for part in (group, beside_products, beside_others, exposed))))
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ["  ".join([name.ljust(first), *map(str.rjust, figures, others)]) for name, *figures in rows]
    return lines if groups else []


def _mib(collectives: Iterable[Collective], dtype: str) -> str:
    return f"{sum(collective.wire_bytes_of(dtype) for collective in collectives) / 2**20:.2f}"
