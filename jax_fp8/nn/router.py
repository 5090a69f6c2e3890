"""The variables of a router."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

from jax_fp8.core.fp8_gemm import Record
from jax_fp8.core.paths import CORRECTION_BIAS
from jax_fp8.core.recorder import RECORDER
from jax_fp8.core.shards import ParamSharding, declare_sharding
from jax_fp8.nn.names import named


@dataclass(frozen=True)
class DeclaredRouter:
    """Its parameters, and the record that takes its measurements.

    Args:
      kernel: f32 (in, experts).
      bias: f32 (experts,), a correction bias, or None.
    """

    kernel: jax.Array
    bias: jax.Array | None
    record: Record


class RouterVariables(nn.Module):
    """Variables: `params/kernel` f32 (in, experts), and with `has_bias` `params/correction_bias` f32 (experts,)."""

    kernel_init: Initializer
    logical_axes: bool
    has_bias: bool = False

    @nn.compact
    def __call__(self, features: int, experts: int) -> DeclaredRouter:
        for name in ("kernel", CORRECTION_BIAS):
            declare_sharding((*self.path, name), ParamSharding())
        init = named(self.kernel_init, ("embed", "expert"), self.logical_axes)
        kernel = self.param("kernel", init, (features, experts), jnp.float32)
        bias = None
        if self.has_bias:
            zeros = named(nn.initializers.zeros_init(), ("expert",), self.logical_axes)
            bias = self.param(CORRECTION_BIAS, zeros, (experts,), jnp.float32)
        recorder = self.get_variable("fp8", RECORDER)
        return DeclaredRouter(kernel, bias, Record() if recorder is None else recorder.record)
