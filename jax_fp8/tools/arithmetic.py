"""What a GPT's step needs on a mesh, by arithmetic on its shapes: good enough to leave out what cannot fit, and to say
which change would help. A compiler says it better; this takes no time.

    Setting ─memory_of→ bytes of a device by kind
            ─seconds_of→ about how long a step takes

docs/memory.md explains the bytes.
"""

from dataclasses import dataclass

from jax_fp8.tools.described import HOST
from jax_fp8.tools.rates import Rates, rate_at

AT_WORK = 2  # layers whose activations are there once more while a gradient is computed


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a GPT, in elements; `mlp` is the width of its activation's result."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    is_gated: bool = False
    is_tied: bool = True

    @property
    def kv_width(self) -> int:
        return self.width * self.kv_heads // self.heads

    @property
    def of_layers(self) -> int:
        """Parameters of all layers' matrices."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return self.layers * (attention + (3 if self.is_gated else 2) * self.width * self.mlp)

    @property
    def of_tables(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.is_tied else 2) * self.vocab * self.width


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A step: batch and sequence are in sequences and tokens, of all devices together."""

    shape: Shape
    batch: int
    sequence: int
    microbatches: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    fp8: bool = True
    recompute: bool = False
    bf16_params: bool = False
    bf16_moments: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def tokens(self) -> float:
        """That a device has in a microbatch."""
        return self.batch * self.sequence / (self.data * self.fsdp * self.microbatches)

    @property
    def layers_of_a_step(self) -> int:
        """Those of all its microbatches."""
        return self.shape.layers * self.microbatches

    @property
    def mesh(self) -> str:
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

    def __str__(self):
        return f"{self.mesh}{' sequence parallel' if self.sequence_parallel else ''}"


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
      weights: of layers, as the GEMMs read them.
      tables: embedding and head, gathered.
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
    shape, fsdp, tensor = setting.shape, setting.fsdp, setting.tensor
    everything = (shape.of_layers + shape.of_tables) / tensor
    param = 2 if setting.bf16_params else 4
    kept = (4 if setting.bf16_moments else 8) + (2 if setting.bf16_params else 0)
    several = setting.microbatches > 1
    summed = everything / fsdp if fsdp > 1 else 0
    return Memory(
        params=param * everything / fsdp,
        optimizer=kept * everything / fsdp,
        weights=(2 if several or not setting.fp8 else 1) * shape.of_layers / tensor,
        tables=param * shape.of_tables / tensor if fsdp > 1 else 0,
        activations=(shape.layers + AT_WORK) * setting.tokens * bytes_of_a_token(setting),
        sums=4 * everything if several else 0,
        gradients=4 * summed if several else param * (everything + summed),
    )


def bytes_of_a_token(setting: Setting) -> float:
    """What one layer keeps of it for the backward."""
    shape, tensor = setting.shape, setting.tensor
    norms = 4 * shape.width / (tensor if setting.sequence_parallel else 1)
    attention = 4 * shape.width / tensor + 4 * shape.kv_width / min(tensor, shape.kv_heads)
    mlp = 2 * shape.mlp * (2 if shape.is_gated else 1) / tensor
    if setting.fp8:
        inputs = 0 if setting.recompute else shape.width * (2 + 1 / tensor)
    else:
        inputs = 2 * shape.mlp / tensor + (0 if setting.recompute else 4 * shape.width)
    return norms + attention + mlp + inputs


def operations_of(setting: Setting) -> float:
    """Of a step: forward and backward of every product, and causal attention."""
    shape = setting.shape
    attention = shape.layers * shape.width * setting.sequence
    return 6 * setting.batch * setting.sequence * (shape.of_layers + shape.vocab * shape.width + attention)


# Fitted to the compiled steps of GPT-3 1.3B on one and on two GPUs, as tools/step_time.py estimates them.
TOUCHED = 7  # times that what a layer keeps is written or read, by it and by what is not kept
ADAM_BYTES = 28  # read and written for each parameter
HIDDEN_COST, EXPOSED_COST = 0.3, 0.75  # of the time of collectives, without those inside of layers and with them


def seconds_of(setting: Setting, rates: Rates) -> float:
    """Of a step, roughly: for an order among meshes."""
    shape, devices, tensor = setting.shape, setting.devices, setting.tensor
    layers = setting.layers_of_a_step
    size = 2 * setting.tokens * shape.width * (shape.mlp / tensor)
    rate = rate_at(rates.fp8 if setting.fp8 else rates.bf16, size)
    of_attention = layers * setting.tokens * setting.sequence * shape.width / tensor
    products = operations_of(setting) / devices - 6 * of_attention
    touched = TOUCHED * layers * setting.tokens * bytes_of_a_token(setting)
    touched += ADAM_BYTES * (shape.of_layers + shape.of_tables) / (setting.fsdp * tensor)
    kernels = products / rate + 7 * of_attention / rates.attention + touched / rates.memory
    params, in_layers = _seconds_of_params(setting, rates), _seconds_in_layers(setting, rates)
    if tensor > 1:  # collectives run one after another: a layer that waits for its own waits for others, too
        return kernels + EXPOSED_COST * (params + in_layers)
    return kernels + max(HIDDEN_COST * params, params - kernels)


def _seconds_of_params(setting: Setting, rates: Rates) -> float:
    """Of gathering params over `fsdp`, and of summing gradients in float32 over it and over `data`."""
    shape, fsdp, tensor = setting.shape, setting.fsdp, setting.tensor
    everything = (shape.of_layers + shape.of_tables) / tensor
    gathered = ((1 if setting.fp8 else 2) * shape.of_layers + 4 * shape.of_tables) / tensor
    of_fsdp = (fsdp - 1) / fsdp * (gathered + 4 * everything) / _rate_over(fsdp, tensor, rates)
    of_data = 2 * (setting.data - 1) / setting.data * 4 * everything / fsdp
    return of_fsdp + of_data / _rate_over(setting.data, fsdp * tensor, rates)


def _seconds_in_layers(setting: Setting, rates: Rates) -> float:
    """Of what a layer exchanges over `tensor`: four sums in bfloat16 a layer, or as many gathers and scatters."""
    tensor, kept = setting.tensor, 1 if setting.fp8 else 2
    bytes_ = 2 + kept if setting.sequence_parallel else 2 * 2
    sent = (tensor - 1) / tensor * 4 * bytes_ * setting.shape.width * setting.layers_of_a_step * setting.tokens
    return sent / _rate_over(tensor, 1, rates)


def _rate_over(size: int, stride: int, rates: Rates) -> float:
    """Of an axis whose devices are so far apart: within a host, or by the network cards of those that share one."""
    return rates.wire if size * stride <= HOST else min(rates.wire, max(1, HOST // stride) * rates.between_hosts)
