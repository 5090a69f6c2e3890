"""GPU time of a training step by kernel and by category, from a trace of the JAX profiler.

XLA's own kernels have names such as `loop_multiply_fusion_12`, which do not say what they compute. The optimized HLO of
the same program does: the trace event's `hlo_op` (or else the kernel's name) leads to the instruction, whose result
type shows FP8 outputs, and whose `op_name` shows the JAX scope that it is from. So

    trace event ─name→ library kernel (GEMM, attention, ours, copy)
                └hlo_op→ instruction ─result type, op_names→ quantize | optimizer | loss |
                                                       norms, activations | other fusions

Traced steps run without CUDA graphs, because XLA switches command buffers off under the profiler. So the trace has
every
kernel, but the gaps between kernels are wider than in a timed step. The tables therefore count kernel time, and list
idle time separately.
"""

import dataclasses
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable

import jax
import tables

FP8_GEMM, BF16_GEMM, ATTENTION = "FP8 GEMM", "bf16 GEMM", "attention"
QUANTIZE, OPTIMIZER, LOSS = "quantize, transpose, amax", "optimizer, state", "loss"
NORMS, FUSIONS, COPIES, OTHER = "norms, activations", "other fusions", "copies, memsets", "other"
COLLECTIVES = "collectives"
CATEGORIES = (FP8_GEMM, BF16_GEMM, ATTENTION, QUANTIZE, NORMS, FUSIONS, LOSS, OPTIMIZER, COPIES, COLLECTIVES, OTHER)

_COLLECTIVE = re.compile(r"nccl|AllReduceKernel|RaggedAllToAllKernel", re.I)  # NCCL's, and XLA's own

_COPY = re.compile(r"memcpy|memset|^(wrapped_)?copy", re.I)
_ATTENTION = re.compile(r"sdpa|fmha|flash|attention|compute_dot_do_o|convert_dq", re.I)
_OUR_NORMS = re.compile(r"jax_fp8::norm|Activated<|column_sums")  # with the cast in the same kernel; bias gradients
_OUR_LOSS = re.compile(r"cross_entropy", re.I)
_OUR_CASTS = re.compile(r"quantize|amax|fp8_cast|jax_fp8::.*transpose", re.I)
_OUR_OPTIMIZER = re.compile(r"adam|update_state", re.I)
_GEMM = re.compile(r"gemm|nvjet|xmma|cutlass|cublas", re.I)
# nvjet_sm90_<types>_<tile>...: three letters (tst) for one operand type, five (qqtst, qqsss) for FP8's A B C compute D.
_FP8_GEMM = re.compile(r"e4m3|e5m2|f8|fp8|nvjet_(sm\d+_)?[a-z]{5}_", re.I)
_FUSION = re.compile(r"fusion|^wrapped_|^(loop|input|reduce|transpose|triton|concatenate|scatter|select)_", re.I)
_QUANTIZE_SCOPE = re.compile(r"fp8|quantize|amax")
_OPTIMIZER_SCOPE = re.compile(r"optimizer|adam")
_LOSS_SCOPE = re.compile(r"loss|cross_entropy|jvp\(\)")  # the loss is what the gradient holds outside the model
_NORM_SCOPE = re.compile(
    r"norm(/|\s|$)|rsqrt|gelu|silu|relu|tanh|logistic|\berf"
)  # names of layers, and what only these compute
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?[\])}]) [\w\-]+\(.*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^\s*%?([\w.\-]+) \((.*)\) -> ")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of the optimized HLO: its result type, its JAX scope, the scopes of the instructions fused into
    it, and whether it reads FP8.
    """

    result: str
    op_name: str
    fused: str = ""
    reads_fp8: bool = False


@dataclasses.dataclass
class Kernel:
    """One kernel name summed over the traced steps."""

    name: str
    category: str
    op_name: str = ""
    microseconds: float = 0.0
    launches: int = 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """Kernel time per step; `span_ms` is first kernel to last kernel, over the steps."""

    kernels: list[Kernel]
    steps: int
    span_ms: float

    @property
    def busy_ms(self) -> float:
        return sum(kernel.microseconds for kernel in self.kernels) / 1e3 / self.steps

    def by_category(self) -> dict[str, float]:
        """Milliseconds a step of each category, in the order of `CATEGORIES`."""
        total = dict.fromkeys(CATEGORIES, 0.0)
        for kernel in self.kernels:
            total[kernel.category] += kernel.microseconds / 1e3 / self.steps
        return total

    def markdown(self, count: int = 25) -> str:
        """Both tables: by category, and the `count` largest kernels."""
        launches = self.launches()
        categories = [[name, ms, 100 * ms / self.busy_ms, launches[name]] for name, ms in self.by_category().items()]
        categories.append(["all kernels", self.busy_ms, 100.0, sum(launches.values())])
        largest = sorted(self.kernels, key=lambda kernel: -kernel.microseconds)[:count]
        rows = [
            [
                k.microseconds / 1e3 / self.steps,
                k.launches / self.steps,
                k.category,
                f"`{k.name[:90]}`",
                k.op_name[-70:],
            ]
            for k in largest
        ]
        return "\n\n".join(
            [
                f"First kernel to last kernel {self.span_ms:.1f} ms a step, of which busy {self.busy_ms:.1f} ms.",
                tables.table(["category", "ms a step", "%", "launches a step"], categories),
                tables.table(["ms a step", "launches a step", "category", "kernel", "op"], rows),
            ]
        )

    def to_json(self) -> dict:
        """The figures of the tables, and every kernel, so that the profile can be examined later without a GPU."""
        kernels = [dataclasses.asdict(kernel) for kernel in sorted(self.kernels, key=lambda k: -k.microseconds)]
        return {
            "steps": self.steps,
            "span_ms": self.span_ms,
            "busy_ms": self.busy_ms,
            "ms": self.by_category(),
            "launches": self.launches(),
            "kernels": kernels,
        }

    def launches(self) -> dict[str, float]:
        """Launches a step of each category."""
        total = dict.fromkeys(CATEGORIES, 0.0)
        for kernel in self.kernels:
            total[kernel.category] += kernel.launches / self.steps
        return total


def trace(run: Callable[[], None], steps: int, hlo_text: str) -> Profile:
    """Profile `run`, which must run `steps` steps and wait for the last one."""
    return summarize(record(run), steps, read_hlo(hlo_text))


def record(run: Callable[[], None]) -> list[dict]:
    """The events of a trace of `run`, as the profiler writes them."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, create_perfetto_trace=True, profiler_options=options):
            run()
        files = sorted(pathlib.Path(directory).rglob("perfetto_trace.json.gz"))
        if not files:
            raise ValueError(f"the profiler must write perfetto_trace.json.gz, but {directory} has none; check jax")
        with gzip.open(files[-1], "rt") as file:
            return json.load(file)["traceEvents"]


def kernels_by_device(events: list[dict]) -> dict[str, list[dict]]:
    """The events of the streams of each GPU. A trace without any is an error, not an empty table."""
    processes = {e["pid"]: e["args"].get("name", "") for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"].get("name", "") for e in events if e.get("name") == "thread_name"}
    ran = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        process, thread = processes.get(event["pid"], ""), threads.get((event["pid"], event["tid"]), "")
        if "/device:GPU" in process and "Stream" in thread:
            ran.setdefault(process, []).append(event)
    if not ran:
        seen = ", ".join(sorted(set(processes.values()))) or "no process"
        raise ValueError(f"the trace must hold kernels of a GPU stream, but it has {seen}; profile on a GPU")
    return dict(sorted(ran.items()))


def summarize(events: list[dict], steps: int, instructions: dict[str, Instruction]) -> Profile:
    """Sum the kernels of all GPU streams."""
    ran = [event for kernels in kernels_by_device(events).values() for event in kernels]
    return summarize_kernels(ran, steps, instructions)


def summarize_kernels(ran: list[dict], steps: int, instructions: dict[str, Instruction]) -> Profile:
    """Sum the events of kernels."""
    kernels: dict[tuple[str, str], Kernel] = {}
    for event in ran:
        instruction = lookup(event, instructions)
        category = categorize(event["name"], instruction)
        # Library kernels are one row whoever calls them; a fusion's name is its own row already.
        kernel = kernels.setdefault((event["name"], category), Kernel(event["name"], category))
        kernel.op_name = kernel.op_name or (instruction.op_name if instruction else "")
        kernel.microseconds += event["dur"]
        kernel.launches += 1
    span = max(event["ts"] + event["dur"] for event in ran) - min(event["ts"] for event in ran)
    return Profile(list(kernels.values()), steps, span / 1e3 / steps)


def categorize(name: str, instruction: Instruction | None) -> str:
    """The category of one kernel; names of libraries first, because only XLA's own kernels need the HLO."""
    if _COLLECTIVE.search(name):
        return COLLECTIVES
    if _ATTENTION.search(name):
        return ATTENTION
    if _GEMM.search(name):
        fp8 = _FP8_GEMM.search(name) or (instruction is not None and instruction.reads_fp8)
        return FP8_GEMM if fp8 else BF16_GEMM
    if _OUR_LOSS.search(name):
        return LOSS
    if _OUR_NORMS.search(name):
        return NORMS
    if _OUR_CASTS.search(name):
        return QUANTIZE
    if _OUR_OPTIMIZER.search(name):
        return OPTIMIZER
    if instruction is not None:
        return _categorize_instruction(name, instruction)
    if _COPY.search(name):
        return COPIES
    return FUSIONS if _FUSION.search(name) else OTHER


def _categorize_instruction(name: str, instruction: Instruction) -> str:
    scope = instruction.op_name.lower()
    if "f8e" in instruction.result or _QUANTIZE_SCOPE.search(scope):
        return QUANTIZE
    if _OPTIMIZER_SCOPE.search(scope) or _outside_gradient(scope):
        return OPTIMIZER
    if _LOSS_SCOPE.search(scope):
        return LOSS
    if _COPY.search(name):
        return COPIES
    return NORMS if _NORM_SCOPE.search(f"{scope} {instruction.fused.lower()}") else FUSIONS


def _outside_gradient(scope: str) -> bool:
    """Whether an op of a step is neither from the loss and its gradient nor from the loop over microbatches."""
    return scope.startswith("jit(") and "jvp" not in scope and "while/" not in scope


def lookup(event: dict, instructions: dict[str, Instruction]) -> Instruction | None:
    named = event.get("args", {}).get("hlo_op", event["name"])
    return instructions.get(_key(named)) or instructions.get(_key(event["name"]))


def _key(name: str) -> str:
    """XLA writes `loop_add_fusion.3` in HLO and `loop_add_fusion_3` on the kernel."""
    return re.sub(r"[^\w]", "_", name)


def read_hlo(text: str) -> dict[str, Instruction]:
    """Every instruction of an optimized HLO module, by its kernel's name."""
    computations = _computations(text)
    instructions = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            op_name, called = _OP_NAME.search(line), _CALLED.search(line)
            signature, fused = computations.get(called.group(1), ("", "")) if called else ("", "")
            instructions[_key(match.group(1))] = Instruction(
                result=match.group(2),
                op_name=op_name.group(1) if op_name else "",
                fused=fused,
                reads_fp8="f8e" in signature,
            )
    return instructions


def _computations(text):
    """For each computation, its parameters, and the scopes of its instructions in one text."""
    found, name = {}, ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match.group(1)
            found[name] = (match.group(2), "")
        elif name and (op_name := _OP_NAME.search(line)):
            found[name] = (found[name][0], f"{found[name][1]} {op_name.group(1)}")
    return found


def merged(profiles: dict[str, dict]) -> str:
    """One table with a column for each variant, from `Profile.to_json` of each, to show the rows that differ."""
    rows = [[name, *(found["ms"][name] for found in profiles.values())] for name in CATEGORIES]
    rows.append(["all kernels", *(found["busy_ms"] for found in profiles.values())])
    return tables.table(["ms a step", *profiles], rows)
