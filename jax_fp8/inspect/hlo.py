"""Readers of the compiler's texts: of an optimized HLO module, and of the thunks that XLA:GPU launches.

    HLO text ─read_hlo→ instructions ─executed→ each with how often a call runs it
    thunk listing ─read_thunks→ CUDA graphs, and the thunks outside them

HLO says what is computed, and in which loop and branch. After HLO, XLA decides which thunks share a CUDA graph; only
the thunk listing (`xla_dump_to`) shows that.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from jax_fp8.inspect.groups import Groups, groups_of

# Opcodes that run the computations they name: once or, for a loop, many times; of a conditional only one of them.
CALLS = frozenset({"call", "call-start", "async-start", "while"})
FUSIONS = frozenset({"fusion", "fusion-start"})
BRANCHES = frozenset({"conditional"})

COLLECTIVES = frozenset({
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
})  # fmt: skip

_FILLS = {"broadcast", "constant", "iota"}
_NOT_LAUNCHED = CALLS | BRANCHES | {
    "add-dependency",
    "after-all",
    "async-update",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "tuple",
}  # fmt: skip
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclass(frozen=True)
class Array:
    """One array of an HLO instruction's result: `bf16[4096,2048]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = _BITS.match(self.dtype)
        return math.prod(self.shape) * (math.ceil(int(bits[1]) / 8) if bits else 1)

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction: its operation, operands and results, and its origin in the user's program."""

    opcode: str
    results: tuple[Array, ...]
    operands: tuple[Array, ...]
    target: str  # of a custom call, else ""
    op_name: str  # the path of jax transformations and Flax modules that led here
    computation: str  # the fusion, loop body or entry computation it stands in
    in_entry: bool  # whether it stands in the entry computation, where the program starts
    sources: tuple[str, ...]  # the opcodes of the operands
    calls: tuple[str, ...]  # the computations it names; of a conditional, the branches in the order of their index
    trips: int | None  # of a loop, when the compiler knows
    name: str
    inputs: tuple[str, ...]  # the names of the operands
    accumulation: str  # of this library's products in FP8: "fast" or "split", by tile "1d2d", ...; else ""
    groups: Groups  # of a collective: which devices exchange data; () of anything else

    @property
    def devices(self) -> int | None:
        """The number of devices in a collective's largest group; None of anything else."""
        return max(map(len, self.groups), default=1) if self.collective else None

    @property
    def collective(self) -> str:
        """The kind of collective that this is, or that it starts; "" of anything else."""
        opcode = self.opcode.removesuffix("-start")
        return opcode if opcode in COLLECTIVES else ""

    @property
    def copies(self) -> bool:
        """Whether it only copies an array. A copy of a constant is a fill, and reads no array."""
        return self.opcode in ("copy", "copy-start") and not set(self.sources) <= _FILLS

    @property
    def launches(self) -> bool:
        """Whether it makes the device work: a kernel, a copy or a collective. A whole fusion is one launch."""
        return self.opcode not in _NOT_LAUNCHED and not self.opcode.endswith("-done")

    def __str__(self):
        operands = ", ".join(map(str, self.operands))
        return f"{self.results[0]} = {self.target or self.opcode}({operands})  # {self.op_name or self.computation}"


def by_computation(instructions: Iterable[Instruction]) -> dict[str, list[Instruction]]:
    computations: dict[str, list[Instruction]] = {}
    for instruction in instructions:
        computations.setdefault(instruction.computation, []).append(instruction)
    return computations


def executed(
    computations: Mapping[str, list[Instruction]], name: str, entering: Collection[str], times: int = 1
) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a computation and of those it calls, with how often they run.

    Args:
      computations: of a module, by name.
      name: of the computation to begin with.
      entering: the opcodes whose computations count, too: `CALLS`, `FUSIONS`, `BRANCHES` or a union of them.
      times: how often the computation itself runs. A loop of unknown length counts as one turn.
    """
    for instruction in computations[name]:
        yield instruction, times
        if instruction.opcode in entering:
            trips = 1 if instruction.trips is None else instruction.trips
            for called in instruction.calls:
                yield from executed(computations, called, entering, times * trips)


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?(?P<name>%[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?(?P<name>%[\w.\-]+) = (?P<type>.+?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$")
_NAME = re.compile(r"%[\w.\-]+")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d\w*)\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|branch_computations|false_computation|true_computation)"
    r"=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FAST = re.compile(r"\bfast_accumulation = (true|false)\b")
_SCALING = re.compile(r'\bscaling = "([12]d[12]d)"')
_MODULE_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")


def read_hlo(text: str) -> tuple[Instruction, ...]:
    """The instructions of an HLO module's text. The text has operands by name only, so their types are looked up."""
    header, matches, devices = None, [], 1
    for line in text.splitlines():
        if line.startswith("HloModule"):
            devices = math.prod(map(int, _MODULE_DEVICES.findall(line)))
        elif started := _COMPUTATION.match(line):
            header = started
        elif header and (match := _INSTRUCTION.match(line)):
            matches.append((header, match))
    arrays = {match["name"]: _arrays(match["type"]) for _, match in matches}
    opcodes = {match["name"]: match["opcode"] for _, match in matches}
    return tuple(_instruction(header, match, arrays, opcodes, devices) for header, match in matches)


def _arrays(type_text: str) -> tuple[Array, ...]:
    return tuple(Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(type_text))


def _instruction(
    header: re.Match[str],
    match: re.Match[str],
    arrays: Mapping[str, tuple[Array, ...]],
    opcodes: Mapping[str, str],
    devices: int,
) -> Instruction:
    operands, _, attributes = match["rest"].partition(")")
    names = [name for name in _NAME.findall(operands) if name in arrays]
    target, op_name, trips = (pattern.search(attributes) for pattern in (_TARGET, _OP_NAME, _TRIPS))
    is_collective = match["opcode"].removesuffix("-start") in COLLECTIVES
    return Instruction(
        opcode=match["opcode"],
        results=arrays[match["name"]],
        operands=tuple(array for name in names for array in arrays[name]),
        target=target[1] if target else "",
        op_name=op_name[1] if op_name else "",
        computation=header["name"],
        in_entry=bool(header["entry"]),
        sources=tuple(opcodes[name] for name in names),
        calls=_called(attributes),
        trips=int(trips[1]) if trips else None,
        name=match["name"],
        inputs=tuple(names),
        accumulation=_accumulation(attributes),
        groups=groups_of(attributes, devices) if is_collective else (),
    )


def _accumulation(attributes: str) -> str:
    fast, scaling = _FAST.search(attributes), _SCALING.search(attributes)
    if scaling:
        return scaling[1]
    return {"true": "fast", "false": "split"}[fast[1]] if fast else ""


def _called(attributes: str) -> tuple[str, ...]:
    """The computations that an instruction names, branches in the order of their index. HLO writes the true branch of
    two first, whose index is 1.
    """
    calls = _CALLED.findall(attributes)
    calls.sort(key=lambda call: call[0] == "true_computation")
    return tuple(name for _, names in calls for name in _NAME.findall(names))


_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)")


def read_thunks(text: str) -> tuple[int, Counter]:
    """The number of CUDA graphs in XLA's thunk listing, and how many thunks of each kind are outside them.

    The listing has one thunk a line. The thunks of a graph, of a loop's body or of a branch are indented below it.
    """
    graphs, outside, graph_indent = 0, Counter(), None
    for line in text.splitlines():
        match = _THUNK.match(line)
        if not match:
            continue
        indent, kind = len(match["indent"]), match["kind"].removeprefix("k")
        if graph_indent is not None and indent > graph_indent:
            continue
        graph_indent = None
        if kind == "CommandBuffer":
            graphs, graph_indent = graphs + 1, indent
        else:
            outside[kind] += 1
    return graphs, outside
