"""A GEMM that a layer has declared: its parameters, its FP8 state and its adapters, ready to multiply."""

from dataclasses import dataclass

import flax.linen as nn
import jax
from flax.typing import Dtype
from jax import lax

from jax_fp8.core.batching import shared_amaxes
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.shards import SplitDim, TensorParallel
from jax_fp8.core.state import stage
from jax_fp8.core.types import PyTree
from jax_fp8.ops.adapters import Adapters, adapted_linear
from jax_fp8.ops.parameters import LinearParameters


@dataclass(frozen=True)
class DeclaredGemm:
    """What a layer hands to a composite op, and `stage`, which takes the amaxes that the op returns.

    `fp8` is None without FP8. `tensor` and `split_dim` are None unless a step on shards splits the kernel.
    """

    parameters: LinearParameters
    fp8: Fp8Gemm | None = None
    amax_history: nn.Variable | None = None  # None unless the collection is mutable
    tensor: TensorParallel | None = None
    split_dim: SplitDim | None = None
    adapters: Adapters = ()

    def multiply(
        self, x: jax.Array, dtype: Dtype, residual: jax.Array | None = None, recompute: bool = False
    ) -> PyTree:
        """`linear` of `x`, with the adapters; stages the amaxes.

        Args:
          residual: added to the result of a single kernel.
        """
        y, amaxes = adapted_linear(
            x,
            self.parameters,
            self.fp8,
            dtype,
            self.adapters,
            residual=residual,
            recompute=recompute,
            tensor=self.tensor,
            split_dim=self.split_dim,
        )
        self.stage(amaxes)
        return y

    def stage(self, amaxes: jax.Array | None) -> None:
        """Stage the forward amaxes f32[2] in the collection "fp8" if it is mutable, and in `value_and_grad`'s record.

        The backward records them too, so only layers that no gradient reaches need this. A layer under `nn.scan` has
        its backward alone, because Flax's scan refuses a body that writes. So has a layer under `jax.vmap` or in a
        branch of `lax.cond`, where there is no Ref.
        """
        if amaxes is None or self.fp8 is None:
            return
        amaxes = lax.stop_gradient(amaxes)
        self.fp8.record_forward(amaxes)
        if self.amax_history is not None:
            history = self.amax_history.value
            self.amax_history.value = stage(history, shared_amaxes(history, amaxes))
