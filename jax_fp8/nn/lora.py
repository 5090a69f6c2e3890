"""Adapters of linear layers, LoRA (https://arxiv.org/abs/2106.09685): `y = x · kernel + (alpha / rank) · (x · a) · b`.

    params/<layer>/lora_a (in, rank)      random
    params/<layer>/lora_b (rank, features)    zeros, so that a new adapter changes nothing

Both products are in the layer's `dtype`. The GEMM of the layer adds the second one to its result by itself, as it adds
a residual. So the kernel may be frozen in FP8 (core/frozen.py), and an adapter costs a pass over the input and one over
the result.
"""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_fp8.core.lora import LORA_A, LORA_B, Lora
from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding, SplitDim, TensorParallel, declare_sharding
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.ops.passes import plain_linear


@dataclass(frozen=True)
class Adapter:
    """The matrices of one adapter, (in, rank) and (rank, features), and its factor."""

    a: jax.Array
    b: jax.Array
    scaling: float


def declare_adapter(
    module: nn.Module, lora: Lora | None, in_features: int, features: int, kernel: ParamSharding
) -> Adapter | None:
    """Declare the adapter of a linear layer in its module; None where the layer has none.

    Args:
      in_features, features: of the kernel as it is here; in a step on shards, this device's part.
      kernel: how the axis `tensor` splits the kernel. It splits `b` by the same columns, or `a` by the same rows.
    """
    if lora is None or not lora.is_for(module.path[-1] if module.path else ""):
        return None
    whole = ParamSharding(is_shared=kernel.dim == COLUMNS)
    for name, dim in ((LORA_A, ROWS), (LORA_B, COLUMNS)):
        declare_sharding((*module.path, name), kernel if kernel.dim == dim else whole)
    dtype = module.param_dtype  # type: ignore[attr-defined]
    uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # up to 1 / sqrt(in), as in PEFT
    a = module.param(LORA_A, uniform, (in_features, lora.rank), dtype)
    b = module.param(LORA_B, nn.initializers.zeros_init(), (lora.rank, features), dtype)
    return Adapter(a, b, lora.scaling)


def adapt(
    x: jax.Array,
    adapters: tuple[Adapter | None, ...],
    dtype: jax.typing.DTypeLike,
    tensor: TensorParallel | None,
    split_dim: SplitDim | None,
) -> tuple[jax.Array | None, ...]:
    """What each adapter adds to the result of its layer, (..., n_i) in `dtype`; None where there is no adapter.

    The first matrices stand side by side in one product, which reads `x` once.
    """
    own = [adapter for adapter in adapters if adapter is not None]
    if not own:
        return (None,) * len(adapters)
    first = LinearParameters(tuple(adapter.a for adapter in own), None)
    low: object = plain_linear(x.astype(dtype), first, dtype, in_parts=True, tensor=tensor, split_dim=split_dim)
    parts = iter(low if isinstance(low, tuple) else (low,))
    return tuple(None if adapter is None else _second(next(parts), adapter, dtype) for adapter in adapters)


def _second(low: jax.Array, adapter: Adapter, dtype: jax.typing.DTypeLike) -> jax.Array:
    scaled = (low.astype(jnp.float32) * adapter.scaling).astype(dtype)
    result = plain_linear(scaled, LinearParameters(adapter.b, None), dtype)
    assert not isinstance(result, tuple)
    return result
