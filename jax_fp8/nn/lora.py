"""The params of an adapter in a Linen layer; ops/adapters.py multiplies by them.

params/<layer>/lora_a (in, rank)      random
params/<layer>/lora_b (rank, features)    zeros, so that a new adapter changes nothing
"""

import flax.linen as nn

from jax_fp8.core.lora import FIRST_MATRIX, LORA_A, LORA_B, SECOND_MATRIX, Lora
from jax_fp8.core.shards import COLUMNS, ROWS, ParamSharding, declare_sharding
from jax_fp8.ops.adapters import Adapter


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
    a = module.param(LORA_A, FIRST_MATRIX, (in_features, lora.rank), dtype)
    b = module.param(LORA_B, SECOND_MATRIX, (lora.rank, features), dtype)
    return Adapter(a, b, lora.scaling)
