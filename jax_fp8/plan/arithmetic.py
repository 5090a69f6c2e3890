"""What a GPT's step needs on a mesh, by arithmetic on its shapes: good enough to leave out what cannot fit, and to say
which change would help. A compiler says it better; this takes no time.

    Setting ─memory_of→ bytes of a device by kind
            ─seconds_of→ about how long a step takes

docs/memory.md explains the bytes.
"""

from dataclasses import dataclass, replace

from jax_fp8.plan.described import HOST
from jax_fp8.plan.rates import Rates, fp8_rate, rate_at
from jax_fp8.plan.shape import Shape

SCALES = 4 / 128  # bytes of an element of a line by tile, beside the one of its value
AT_WORK = 2  # layers whose activations are there once more while a gradient is computed


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A step: batch and sequence are in sequences and tokens, of all devices together.

    `by_tile`: in FP8 by `BlockScaling`. `fp8_attention`: attention in FP8, too. `offloaded`: of how many layers the
    host keeps what the backward wants. `full`: all of a layer is computed again.
    """

    shape: Shape
    batch: int
    sequence: int
    microbatches: int = 1
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    fp8: bool = True
    by_tile: bool = False
    fp8_attention: bool = False
    recompute: bool = False
    full: bool = False
    offloaded: int = 0
    bf16_params: bool = False
    bf16_moments: bool = False

    @property
    def devices(self) -> int:
        return self.pipe * self.data * self.fsdp * self.tensor

    @property
    def tokens(self) -> float:
        """That a device has in a microbatch."""
        return self.batch * self.sequence / (self.data * self.fsdp * self.microbatches)

    @property
    def layers_of_a_step(self) -> float:
        """That a device computes, of all its microbatches."""
        return self.shape.layers * self.microbatches / self.pipe

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage waits; a forward, an input and a weight gradient take equally long."""
        microbatches, others = self.microbatches, self.pipe - 1
        if self.schedule != "zero-bubble":
            return others / (self.chunks * microbatches + others)
        # Weight gradients in what would be a bubble: the first where there is a second group, more from the third.
        hidden = min(others, max(microbatches > self.pipe, microbatches - 2 * self.pipe + 1))
        return (2 * others - hidden) / (3 * microbatches + 2 * others - hidden)

    @property
    def slots(self) -> float:
        """What a stage keeps of microbatches: of so many, what all its layers keep of one."""
        if self.pipe == 1:
            return 1
        if self.schedule == "gpipe":
            return self.microbatches
        before = self.schedule != "zero-bubble" and self.microbatches >= 2 * self.pipe  # one is done by then
        first = min(self.microbatches - before, 3 * self.pipe - 2)
        return (first + (self.chunks - 1) * self.pipe) / self.chunks

    @property
    def mesh(self) -> str:
        sizes = {"pipe": self.pipe, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

    @property
    def flags(self) -> str:
        """Of `plan`, that say how a step is spread."""
        of_pipe = [f"--schedule {self.schedule}"] if self.pipe > 1 else []
        of_pipe += [f"--chunks {self.chunks}"] if self.chunks > 1 else []
        microbatches = [f"--microbatches {self.microbatches}"] if self.microbatches > 1 else []
        parallel = ["--sequence-parallel"] if self.sequence_parallel else []
        return " ".join([f"--mesh {self.mesh}", *parallel, *of_pipe, *microbatches])

    def __str__(self):
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        words = [
            self.mesh,
            *(["sequence parallel"] if self.sequence_parallel else []),
            *([f"{self.schedule}{chunks}"] if self.pipe > 1 else []),
            *([f"{self.microbatches} microbatches"] if self.microbatches > 1 else []),
        ]
        return ", ".join(words)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
      weights: of layers, as the GEMMs read them.
      tables: embedding and head, gathered; and in a pipeline their gradients of a microbatch.
      activations: kept for the backward, and those of the layers at work.
      sums: of the gradients of microbatches.
      gradients: whole, as collectives read them, and summed over devices.
    """

    params: float
    optimizer: float
    weights: float
    tables: float
    activations: float
    sums: float
    gradients: float

    @property
    def together(self) -> float:
        """Gradients come as weights and activations go. Collectives that sum them are waited for in the end."""
        steady = self.params + self.optimizer + self.tables + self.sums
        return steady + max(self.weights + self.activations, self.gradients)


def memory_of(setting: Setting) -> Memory:
    shape, fsdp, tensor, pipe = setting.shape, setting.fsdp, setting.tensor, setting.pipe
    storage = fsdp * pipe
    of_layers, of_tables = shape.of_layers / tensor / pipe, shape.of_tables / tensor  # that a device computes with
    stored = (shape.of_layers + shape.of_tables) / tensor / storage
    param = 2 if setting.bf16_params else 4
    kept = (4 if setting.bf16_moments else 8) + (2 if setting.bf16_params else 0)
    several = setting.microbatches > 1
    weight = (2 if several else 1) if setting.fp8 else (param if pipe > 1 else 2)
    summed = stored if storage > 1 else 0
    of_stage = shape.layers / pipe
    of_a_token = of_stage * setting.slots * bytes_of_a_token(setting)
    of_a_token += AT_WORK * _kept_of_a_token(replace(setting, full=False))
    of_a_token += of_stage * setting.slots * _bytes_of_operands(setting)
    of_a_microbatch = 0.0
    if pipe > 1:  # what enters the first layer and leaves the last one, of all microbatches; and losses between layers
        of_a_token += 2 * setting.microbatches * shape.width / (tensor if setting.sequence_parallel else 1)
        of_a_token += 2 * shape.vocab / tensor
        of_a_microbatch = 2 * 4 * of_tables  # gradients, before and after they are added
    return Memory(
        params=param * stored,
        optimizer=kept * stored,
        weights=weight * of_layers,
        tables=param * of_tables + of_a_microbatch if storage > 1 else 0,
        activations=of_a_token * setting.tokens,
        sums=4 * (of_layers + of_tables) if several else 0,
        gradients=4 * summed if several else param * (of_layers + of_tables + summed),
    )


def bytes_of_a_token(setting: Setting) -> float:
    """What one layer keeps of it for the backward, on the device; the mean of all layers."""
    whole, layers = _kept_of_a_token(setting), setting.shape.layers
    return whole - setting.offloaded / layers * _offloaded_of_a_token(setting)


def _offloaded_of_a_token(setting: Setting) -> float:
    """Of what a layer keeps, all but the result of attention, which stays."""
    return _kept_of_a_token(setting) - _width_in_attention(setting) * setting.shape.query_width / setting.tensor


def _width_in_attention(setting: Setting) -> int:
    """Bytes of an element of queries, keys, values and the result, as they are kept."""
    return 1 if setting.fp8_attention else 2


def host_bytes_of(setting: Setting) -> float:
    """That a step moves from a device to the host, and back again."""
    tokens = setting.tokens * setting.microbatches
    return setting.offloaded * tokens * _offloaded_of_a_token(setting)


def host_seconds_of(setting: Setting, rates: Rates) -> float:
    """For which a step waits for the host: the copies of a layer have the time of the forward of as many layers as
    stand between two that are offloaded, on the way there as on the way back (grads/by_layer.py).
    """
    if not setting.offloaded:
        return 0
    of_layer = host_bytes_of(setting) / setting.offloaded / setting.microbatches / HOST_RATE
    forward = _seconds_on_device(setting, rates) / 3 / setting.layers_of_a_step
    exposed = max(0.0, of_layer - forward * setting.shape.layers / setting.offloaded)
    return 2 * setting.offloaded * setting.microbatches * exposed


def _kept_of_a_token(setting: Setting) -> float:
    shape, tensor = setting.shape, setting.tensor
    if setting.full:  # what enters the layer, and what attention returns, with their statistics
        return FULL * shape.width / (tensor if setting.sequence_parallel else 1)
    if setting.pipe > 1 and not (setting.fp8 or setting.recompute):  # from tick to tick: all, also in float32
        between = (24 + 6) * shape.width / (tensor if setting.sequence_parallel else 1)
        attention = 4 * shape.query_width + 4 * shape.kv_width
        return between + (attention + 18 * shape.mlp * (2 if shape.is_gated else 1)) / tensor
    norms = 4 * shape.width / (tensor if setting.sequence_parallel else 1)
    attention = shape.query_width / tensor + shape.kv_width / min(tensor, shape.kv_heads)
    attention *= 2 * _width_in_attention(setting)
    mlp = 2 * shape.mlp * (2 if shape.is_gated else 1) / tensor
    if setting.recompute:
        return norms + attention + mlp
    inputs = shape.width * 2 + shape.query_width / tensor if setting.fp8 else 4 * shape.width + 2 * shape.mlp / tensor
    return norms + attention + mlp + inputs * (1 + SCALES if setting.by_tile else 1)


def _bytes_of_operands(setting: Setting) -> float:
    """Of weight gradients, for a token and layer: what `zero-bubble` keeps beside what every schedule does."""
    if setting.schedule != "zero-bubble":
        return 0
    shape = setting.shape
    into_mlp, out_of_mlp = shape.mlp * (2 if shape.is_gated else 1), shape.mlp
    of_attention = shape.query_width + 2 * shape.kv_width
    of_parts = of_attention + into_mlp + out_of_mlp  # the last is computed again from what is kept
    return ((1 + SCALES * setting.by_tile) if setting.fp8 else 2) * (of_parts / setting.tensor + 2 * shape.width)


def operations_of(setting: Setting) -> float:
    """Of a step: forward and backward of every product, and causal attention."""
    shape = setting.shape
    attention = shape.layers * shape.query_width * setting.sequence
    return 6 * setting.batch * setting.sequence * (shape.of_layers + shape.vocab * shape.width + attention)


# Fitted to the compiled steps of GPT-3 1.3B on one and on two GPUs, as plan/step_time.py estimates them.
FULL = 4.5  # widths in bytes that a layer keeps of a token with remat="full"; docs/memory.md
HOST_RATE = 50e9  # bytes a second between a device and its host's memory, each way; docs/performance.md
AGAIN = 12  # widths in bytes of a token that `recompute` reads and writes once more in a layer
TOUCHED = 7  # times that what a layer keeps is written or read, by it and by what is not kept
ADAM_BYTES = 28  # read and written for each parameter
CAST_BYTES = 4 + 2  # of a parameter that a step casts itself, in both orientations
HIDDEN_COST, EXPOSED_COST = 0.3, 0.75  # of the time of collectives, without those inside of layers and with them


def seconds_of(setting: Setting, rates: Rates) -> float:
    """Of a step, roughly: for an order among meshes."""
    return _seconds_on_device(setting, rates) + host_seconds_of(setting, rates)


def _seconds_on_device(setting: Setting, rates: Rates) -> float:
    shape, devices, tensor = setting.shape, setting.devices, setting.tensor
    layers = setting.layers_of_a_step
    size = 2 * setting.tokens * shape.width * (shape.mlp / tensor)
    of_fp8 = fp8_rate(rates, "1d2d" if setting.by_tile else "fast", size)
    rate = of_fp8 if setting.fp8 else rate_at(rates.bf16, size)
    of_attention = layers * setting.tokens * setting.sequence * shape.query_width / tensor
    products = operations_of(setting) / devices - 6 * of_attention
    if setting.full:  # one forward more
        products += 2 * layers * setting.tokens * shape.of_layers / shape.layers / tensor
    kept = replace(setting, full=False, recompute=False, pipe=1 if setting.recompute else setting.pipe)
    touched = TOUCHED * layers * setting.tokens * _kept_of_a_token(kept)
    touched += AGAIN * setting.recompute * layers * setting.tokens * shape.width / tensor
    touched += ADAM_BYTES * (shape.of_layers + shape.of_tables) / (setting.fsdp * setting.pipe * tensor)
    if setting.by_tile:  # weights are cast anew
        touched += CAST_BYTES * shape.of_layers / (setting.fsdp * setting.pipe * tensor)
    if setting.by_tile and shape.width > 4096:  # both norms of a layer read their input twice, as some narrower ones do
        touched += 4 * layers * setting.tokens * shape.width / (tensor if setting.sequence_parallel else 1)
    curve = rates.attention_fp8 if setting.fp8_attention else rates.attention
    attention = (9 if setting.full else 7) * of_attention / rate_at(curve, setting.sequence)
    kernels = products / rate + attention + touched / rates.memory
    params, in_layers = _seconds_of_params(setting, rates), _seconds_in_layers(setting, rates)
    if setting.pipe > 1:  # nothing is beside the loop over ticks, and nothing beside what is sent at the end of one
        return (kernels + EXPOSED_COST * in_layers) / (1 - setting.bubble) + params + _seconds_of_ticks(setting, rates)
    if tensor > 1:  # collectives run one after another: a layer that waits for its own waits for others, too
        return kernels + EXPOSED_COST * (params + in_layers)
    return kernels + max(HIDDEN_COST * params, params - kernels)


def _seconds_of_params(setting: Setting, rates: Rates) -> float:
    """Of gathering params over `fsdp` and `pipe`, and of summing gradients in float32 over them and over `data`."""
    shape, fsdp, tensor, pipe = setting.shape, setting.fsdp, setting.tensor, setting.pipe
    of_layers, of_tables = shape.of_layers / tensor / pipe, shape.of_tables / tensor
    weight = 1 if setting.fp8 else (4 if pipe > 1 else 2)
    moved = (weight + 4) * of_layers + 8 * of_tables  # there, and the gradients back
    of_fsdp = (fsdp - 1) / fsdp * moved / _rate_over(fsdp, tensor, rates)
    of_pipe = (pipe - 1) / pipe * moved / fsdp / _rate_over(pipe, setting.devices // pipe, rates)
    of_data = 2 * (setting.data - 1) / setting.data * 4 * (of_layers + of_tables / pipe) / fsdp
    return of_fsdp + of_pipe + of_data / _rate_over(setting.data, fsdp * tensor, rates)


def _seconds_of_ticks(setting: Setting, rates: Rates) -> float:
    """Of sending an activation and a gradient in bfloat16 to a neighbour, at the end of every tick."""
    kinds = 3 if setting.schedule == "zero-bubble" else 2
    ticks = kinds * (setting.chunks * setting.microbatches + setting.pipe - 1)
    rows = setting.tokens / (setting.tensor if setting.sequence_parallel else 1)
    stride = setting.devices // setting.pipe  # each pair of neighbours has a network card of its own
    rate = rates.wire if stride * setting.pipe <= HOST else min(rates.wire, rates.between_hosts)
    return ticks * 2 * 2 * rows * setting.shape.width / rate


def _seconds_in_layers(setting: Setting, rates: Rates) -> float:
    """Of what a layer exchanges over `tensor`: four sums in bfloat16 a layer, or as many gathers and scatters."""
    tensor, kept = setting.tensor, 1 if setting.fp8 else 2
    bytes_ = 2 + kept if setting.sequence_parallel else 2 * 2
    sent = (tensor - 1) / tensor * 4 * bytes_ * setting.shape.width * setting.layers_of_a_step * setting.tokens
    return sent / _rate_over(tensor, 1, rates)


def _rate_over(size: int, stride: int, rates: Rates) -> float:
    """Of an axis whose devices are so far apart: within a host, or by the network cards of those that share one."""
    return rates.wire if size * stride <= HOST else min(rates.wire, max(1, HOST // stride) * rates.between_hosts)
