"""What a plan must know of a mixture of experts that its compiled step does not say: how many rows its experts get."""

from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.grouped_gemm import GROUP_ROWS
from jax_fp8.models.config import GPTConfig
from jax_fp8.ops.expert_rows import capacity_of, rows_needed
from jax_fp8.ops.expert_travel import most_rows


def idle_params(config: GPTConfig) -> int:
    """How many params a token does not use: those of the experts that it does not go to."""
    layers = sum(config.layer_fields(index)["num_experts"] > 0 for index in range(config.num_layers))
    kernels = 3 if is_gated(config.activation) else 2
    hidden = config.mlp_hidden_size or 4 * config.hidden_size
    return layers * (config.num_experts - config.experts_per_token) * kernels * config.hidden_size * hidden


def filled_rows(config: GPTConfig, tokens: int, devices: int) -> float:
    """The share of the rows in a device's arrays that grouped GEMMs multiply, if all experts get as many tokens.

    Args:
      tokens: of a device, in a microbatch.
      devices: over which the experts are split.
    """
    choices, own_experts = config.experts_per_token, config.num_experts // devices
    capacity = capacity_of(config.capacity_factor, tokens, choices, config.num_experts)
    arriving = tokens * choices if devices == 1 else most_rows(tokens, choices, own_experts, devices)
    room = rows_needed(arriving, own_experts, capacity=None if capacity is None else devices * capacity)
    padding = own_experts * GROUP_ROWS / 2  # groups end at a multiple
    return min((tokens * choices + padding) / room, 1.0)
