"""FP8 for Flax NNX: `import jax_fp8.nnx`.

    model ─convert, or layers of this package─ value_and_grad → loss, gradients; amaxes staged in the model
    optimizer.update, update_state → model

The FP8 state lies beside the kernels, in variables of their own type, `Fp8State`. Linen and NNX layers call the same
operations, so their numbers are the same.
"""

from jax_fp8.nnx.adapters import freeze_kernels, merge_adapters
from jax_fp8.nnx.convert import Conversion, convert
from jax_fp8.nnx.einsum import Einsum
from jax_fp8.nnx.functional import batch_stats, split
from jax_fp8.nnx.gradients import value_and_grad, warm_start
from jax_fp8.nnx.layers import LayerNormLinear, Linear
from jax_fp8.nnx.linear_general import LinearGeneral
from jax_fp8.nnx.mlp import LayerNormMLP
from jax_fp8.nnx.state import Fp8State, fp8_state, update_state

__all__ = [
    "Conversion",
    "Einsum",
    "Fp8State",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearGeneral",
    "batch_stats",
    "convert",
    "fp8_state",
    "freeze_kernels",
    "merge_adapters",
    "split",
    "update_state",
    "value_and_grad",
    "warm_start",
]
