"""Memory and time of a GPT's training step on a mesh, estimated from shapes alone.

    Setting ─memory_of→ bytes of a device by kind
            ─seconds_of→ about how long a step takes

The compiler's figures are exact, but take minutes; these formulas take no time. They can rule out meshes that do not
fit, rank the others, and say which change makes a step fit. docs/explanation/memory.md explains the bytes.
"""

from dataclasses import dataclass, replace

from jax_fp8.plan.described import HOST
from jax_fp8.plan.rates import Rates, fp8_rate, rate_at
from jax_fp8.plan.setting import Setting

SCALES = 4 / 128  # bytes of scales for each FP8 element by tile: a float32 for a line of 128
AT_WORK = 2  # layers whose activations exist a second time while their gradients are computed


@dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Args:
      params: the device's shards.
      optimizer: moments, and with bfloat16 params the rest of their float32 masters.
      weights: the layers' kernels, gathered and cast as the GEMMs read them.
      tables: embedding and head, gathered; in a pipeline also their gradients of one microbatch.
      activations: residuals for the backward pass, and activations of the layers that are being computed.
      sums: gradients accumulated over microbatches.
      gradients: whole gradients, which collectives read, and the shards that they write.
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
        """The peak: gradients reuse memory that weights and activations have freed."""
        steady = self.params + self.optimizer + self.tables + self.sums
        return steady + max(self.weights + self.activations, self.gradients)


def memory_of(setting: Setting) -> Memory:
    """The bytes that one device needs for this step."""
    if setting.lora:
        return _memory_of_adapters(setting)
    shape, fsdp, tensor, pipe = setting.shape, setting.fsdp, setting.tensor, setting.pipe
    storage = fsdp * pipe
    of_layers, of_tables = shape.of_layers / tensor / pipe, shape.of_tables / tensor  # params after the all-gather
    stored = (shape.of_layers + shape.of_tables) / tensor / storage  # params of the device's own shards
    param = 2 if setting.bf16_params else 4  # bytes of each
    optimizer = (4 if setting.bf16_moments else 8) + (2 if setting.bf16_params else 0)
    several = setting.microbatches > 1
    # FP8 weights in both orientations for several microbatches; in one orientation for one.
    weight = (2 if several else 1) if setting.fp8 else (param if pipe > 1 else 2)
    summed = stored if storage > 1 else 0
    layers_of_stage = shape.layers / pipe
    token_bytes = layers_of_stage * setting.slots * bytes_of_a_token(setting)
    token_bytes += AT_WORK * _residuals_of_a_token(replace(setting, full=False))
    token_bytes += layers_of_stage * setting.slots * _bytes_of_operands(setting)
    table_gradients = 0.0
    if pipe > 1:
        # The inputs of the first layer and the outputs of the last one, of all microbatches.
        token_bytes += 2 * setting.microbatches * shape.width / (tensor if setting.sequence_parallel else 1)
        token_bytes += 2 * shape.vocab / tensor  # logits, as losses are computed between the layers' ticks
        table_gradients = 2 * 4 * of_tables  # of one microbatch, and the sum
    return Memory(
        params=param * stored,
        optimizer=optimizer * stored,
        weights=weight * of_layers,
        tables=param * of_tables + table_gradients if storage > 1 else 0,
        activations=token_bytes * setting.tokens,
        sums=4 * (of_layers + of_tables) if several else 0,
        gradients=4 * summed if several else param * (of_layers + of_tables + summed),
    )


def _memory_of_adapters(setting: Setting) -> Memory:
    """The same where adapters alone are trained. Frozen kernels are in FP8, one byte each, and whole on each device."""
    shape, param = setting.shape, 2 if setting.bf16_params else 4
    adapters = setting.lora * shape.of_ranks
    kernels = shape.of_layers if setting.fp8 else param * shape.of_layers
    token_bytes = shape.layers * (bytes_of_a_token(setting) + _bytes_of_operands(setting))
    token_bytes += AT_WORK * _residuals_of_a_token(replace(setting, full=False))
    optimizer = (4 if setting.bf16_moments else 8) + (2 if setting.bf16_params else 0)
    return Memory(
        params=kernels + param * (shape.of_tables + adapters) / setting.fsdp,
        optimizer=optimizer * adapters / setting.fsdp,
        weights=0 if setting.fp8 or setting.bf16_params else 2 * shape.of_layers,
        tables=param * shape.of_tables if setting.fsdp > 1 else 0,
        activations=token_bytes * setting.tokens,
        sums=4 * adapters if setting.microbatches > 1 else 0,
        gradients=param * adapters,
    )


def bytes_of_a_token(setting: Setting) -> float:
    """Bytes of residuals that one layer keeps on the device for each token; the mean over all layers."""
    whole, layers = _residuals_of_a_token(setting), setting.shape.layers
    return whole - setting.offloaded / layers * _offloaded_of_a_token(setting)


def _offloaded_of_a_token(setting: Setting) -> float:
    """Bytes of a token's residuals that an offloaded layer moves to the host: all but the output of attention."""
    return _residuals_of_a_token(setting) - _attention_itemsize(setting) * setting.shape.query_width / setting.tensor


def _attention_itemsize(setting: Setting) -> int:
    """Bytes of an element of queries, keys, values and output of attention, as residuals."""
    return 1 if setting.fp8_attention else 2


def host_bytes_of(setting: Setting) -> float:
    """Bytes that a step moves from a device to the host, and back again."""
    tokens = setting.tokens * setting.microbatches
    return setting.offloaded * tokens * _offloaded_of_a_token(setting)


def host_seconds_of(setting: Setting, rates: Rates) -> float:
    """Seconds for which a step waits for copies to the host and back. The copies of an offloaded layer run while the
    layers up to the next offloaded one are computed, in both directions (grads/by_layer.py); the step waits for the
    rest of their time.
    """
    if not setting.offloaded:
        return 0
    copies = host_bytes_of(setting) / setting.offloaded / setting.microbatches / HOST_RATE  # of one layer
    forward = _seconds_on_device(setting, rates) / 3 / setting.layers_of_a_step  # of one layer
    exposed = max(0.0, copies - forward * setting.shape.layers / setting.offloaded)
    return 2 * setting.offloaded * setting.microbatches * exposed


def _residuals_of_a_token(setting: Setting) -> float:
    """Bytes of residuals that one layer needs for each token in its backward pass, on the device or on the host."""
    shape, tensor = setting.shape, setting.tensor
    if setting.full:  # the input of the layer, and the output of attention, with their statistics
        return FULL * shape.width / (tensor if setting.sequence_parallel else 1)
    if setting.pipe > 1 and not (setting.fp8 or setting.recompute):  # kept across ticks: everything, partly in float32
        between = (24 + 6) * shape.width / (tensor if setting.sequence_parallel else 1)
        attention = 4 * shape.query_width + 4 * shape.kv_width
        return between + (attention + 18 * shape.mlp * (2 if shape.is_gated else 1)) / tensor
    norms = 4 * shape.width / (tensor if setting.sequence_parallel else 1)
    attention = shape.query_width / tensor + shape.kv_width / min(tensor, shape.kv_heads)
    attention *= 2 * _attention_itemsize(setting)
    mlp = 2 * shape.mlp * (2 if shape.is_gated else 1) / tensor
    if setting.recompute:
        return norms + attention + mlp
    inputs = shape.width * 2 + shape.query_width / tensor if setting.fp8 else 4 * shape.width + 2 * shape.mlp / tensor
    return norms + attention + mlp + inputs * (1 + SCALES if setting.by_tile else 1)


def _bytes_of_operands(setting: Setting) -> float:
    """Bytes for each token and layer that only `zero-bubble` keeps: the operands of weight gradients."""
    if setting.schedule != "zero-bubble":
        return 0
    shape = setting.shape
    into_mlp, out_of_mlp = shape.mlp * (2 if shape.is_gated else 1), shape.mlp
    attention = shape.query_width + 2 * shape.kv_width
    split = attention + into_mlp + out_of_mlp  # the last is not a residual, but computed again from residuals
    return ((1 + SCALES * setting.by_tile) if setting.fp8 else 2) * (split / setting.tensor + 2 * shape.width)


def operations_of(setting: Setting) -> float:
    """Operations of a step on all devices: forward and backward of every product, and of causal attention."""
    shape = setting.shape
    attention = shape.layers * shape.query_width * setting.sequence
    return 6 * setting.batch * setting.sequence * (shape.of_layers + shape.vocab * shape.width + attention)


# Constants fitted to the compiled steps of GPT-3 1.3B on one and two GPUs, whose times plan/step_time.py estimates.
FULL = 4.5  # bytes of a token's residuals in a layer with remat="full", by the width; docs/explanation/memory.md
HOST_RATE = 50e9  # bytes a second between a device and its host's memory, each way; docs/performance.md
AGAIN = 12  # bytes of a token that `recompute` reads and writes again in a layer, divided by the width
TOUCHED = 7  # bytes that a layer reads and writes, as a multiple of its residuals
ADAM_BYTES = 28  # read and written for each parameter
CAST_BYTES = 4 + 2  # read and written for each parameter that a step casts, in both orientations
# The share of the collectives' time that a step takes longer: of those beside kernels, and of those inside layers.
HIDDEN_COST, EXPOSED_COST = 0.3, 0.75


def seconds_of(setting: Setting, rates: Rates) -> float:
    """Seconds of a step, roughly: good enough to rank meshes."""
    return _seconds_on_device(setting, rates) + host_seconds_of(setting, rates)


def _seconds_on_device(setting: Setting, rates: Rates) -> float:
    shape, devices, tensor = setting.shape, setting.devices, setting.tensor
    layers = setting.layers_of_a_step
    size = 2 * setting.tokens * shape.width * (shape.mlp / tensor)
    rate = rate_at(rates.bf16, size)
    if setting.fp8:
        rate = fp8_rate(rates, "1d2d" if setting.by_tile else "fast", size)
    # Operations of one causal product of attention on one device: half of all pairs of tokens count.
    one_product = layers * setting.tokens * setting.sequence * shape.query_width / tensor
    products = operations_of(setting) / devices - 6 * one_product
    if setting.full:  # the forward again
        products += 2 * layers * setting.tokens * shape.of_layers / shape.layers / tensor
    plain = replace(setting, full=False, recompute=False, pipe=1 if setting.recompute else setting.pipe)
    touched = TOUCHED * layers * setting.tokens * _residuals_of_a_token(plain)
    touched += AGAIN * setting.recompute * layers * setting.tokens * shape.width / tensor
    touched += ADAM_BYTES * (shape.of_layers + shape.of_tables) / (setting.fsdp * setting.pipe * tensor)
    if setting.by_tile:  # the step casts the weights again
        touched += CAST_BYTES * shape.of_layers / (setting.fsdp * setting.pipe * tensor)
    if setting.by_tile and shape.width > 4096:  # both norms of a layer read their input twice, as some narrower ones do
        touched += 4 * layers * setting.tokens * shape.width / (tensor if setting.sequence_parallel else 1)
    curve = rates.attention_fp8 if setting.fp8_attention else rates.attention
    # Attention has 2 products forward and 5 backward.
    attention = (9 if setting.full else 7) * one_product / rate_at(curve, setting.sequence)
    kernels = products / rate + attention + touched / rates.memory
    params, in_layers = _seconds_of_params(setting, rates), _seconds_in_layers(setting, rates)
    if setting.pipe > 1:  # no kernel runs beside the collectives of params, nor beside the transfers between ticks
        return (kernels + EXPOSED_COST * in_layers) / (1 - setting.bubble) + params + _seconds_of_ticks(setting, rates)
    if tensor > 1:  # collectives run one after another, so a layer that waits for its own collective waits for others
        return kernels + EXPOSED_COST * (params + in_layers)
    return kernels + max(HIDDEN_COST * params, params - kernels)


def _seconds_of_params(setting: Setting, rates: Rates) -> float:
    """Seconds to gather params over `fsdp` and `pipe`, and to sum gradients in float32 over these and `data`."""
    shape, fsdp, tensor, pipe = setting.shape, setting.fsdp, setting.tensor, setting.pipe
    of_layers, of_tables = shape.of_layers / tensor / pipe, shape.of_tables / tensor
    weight = 1 if setting.fp8 else (4 if pipe > 1 else 2)
    moved = (weight + 4) * of_layers + 8 * of_tables  # weights one way, and float32 gradients the other
    of_fsdp = (fsdp - 1) / fsdp * moved / _rate_over(fsdp, tensor, rates)
    of_pipe = (pipe - 1) / pipe * moved / fsdp / _rate_over(pipe, setting.devices // pipe, rates)
    of_data = 2 * (setting.data - 1) / setting.data * 4 * (of_layers + of_tables / pipe) / fsdp
    return of_fsdp + of_pipe + of_data / _rate_over(setting.data, fsdp * tensor, rates)


def _seconds_of_ticks(setting: Setting, rates: Rates) -> float:
    """Seconds to send an activation and a gradient in bfloat16 to the neighbours, at the end of every tick."""
    kinds = 3 if setting.schedule == "zero-bubble" else 2  # of units: forward, and one or two backward ones
    ticks = kinds * (setting.chunks * setting.microbatches + setting.pipe - 1)
    rows = setting.tokens / (setting.tensor if setting.sequence_parallel else 1)
    stride = setting.devices // setting.pipe  # each pair of neighbours has a network card of its own
    rate = rates.wire if stride * setting.pipe <= HOST else min(rates.wire, rates.between_hosts)
    return ticks * 2 * 2 * rows * setting.shape.width / rate


def _seconds_in_layers(setting: Setting, rates: Rates) -> float:
    """Seconds of a layer's collectives over `tensor`: four all-reduces in bfloat16, or with sequence parallelism four
    pairs of an all-gather and a reduce-scatter.
    """
    tensor, gathered = setting.tensor, 1 if setting.fp8 else 2  # bytes of an element; FP8 layers gather FP8 values
    element_bytes = 2 + gathered if setting.sequence_parallel else 2 * 2
    sent = (tensor - 1) / tensor * 4 * element_bytes * setting.shape.width * setting.layers_of_a_step * setting.tokens
    return sent / _rate_over(tensor, 1, rates)


def _rate_over(size: int, stride: int, rates: Rates) -> float:
    """Bytes a second that a device sends over an axis of this size, whose neighbours are `stride` devices apart. An
    axis that leaves the host uses the network cards of all its devices on a host at the same time.
    """
    return rates.wire if size * stride <= HOST else min(rates.wire, max(1, HOST // stride) * rates.between_hosts)
