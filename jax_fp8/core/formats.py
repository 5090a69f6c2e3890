"""The two FP8 formats and the pair of them that training uses.

E4M3 has 4 exponent and 3 mantissa bits, reaches 448 and has no infinity; E5M2 trades a mantissa bit for range and
reaches 57,344. Activations and weights need precision, gradients need range:
HYBRID is E4M3 forward, E5M2 backward (https://arxiv.org/abs/2209.05433).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

#: The FP8 dtype with 4 exponent and 3 mantissa bits, `jnp.float8_e4m3fn`, for activations and weights.
#:
#: Its largest number is 448, and it has no infinity (https://arxiv.org/abs/2209.05433).
#:
#: Example:
#:   >>> import jax.numpy as jnp
#:   >>> import jax_fp8 as fp8
#:   >>> float(jnp.finfo(fp8.E4M3).max)
#:   448.0
E4M3 = jnp.float8_e4m3fn

#: The FP8 dtype with 5 exponent and 2 mantissa bits, `jnp.float8_e5m2`, for gradients, which need more range.
#:
#: Its largest finite number is 57,344 (https://arxiv.org/abs/2209.05433).
#:
#: Example:
#:   >>> import jax.numpy as jnp
#:   >>> import jax_fp8 as fp8
#:   >>> float(jnp.finfo(fp8.E5M2).max)
#:   57344.0
E5M2 = jnp.float8_e5m2

# The three tensors of a GEMM: rows of its scales and of its amax history.
INPUT, KERNEL, OUTPUT_GRADIENT = 0, 1, 2


@dataclass(frozen=True)
class Format:
    """A pair of FP8 dtypes: one for the forward operands of a GEMM, one for its output gradient.

    Args:
      forward: FP8 dtype of input and kernel. It must be E4M3: Hopper has no GEMM of two E5M2 operands.
      backward: FP8 dtype of the output gradient, E4M3 or E5M2.

    Raises:
      ValueError: if `forward` is not E4M3, or if `backward` is neither E4M3 nor E5M2.

    Example:
      >>> import jax_fp8 as fp8
      >>> fp8.Format(forward=fp8.E4M3, backward=fp8.E5M2) == fp8.HYBRID
      True
    """

    forward: jax.typing.DTypeLike
    backward: jax.typing.DTypeLike

    def __post_init__(self):
        for role in ("forward", "backward"):
            dtype = getattr(self, role)
            if dtype not in (E4M3, E5M2):
                raise ValueError(f"Format.{role} must be E4M3 or E5M2, got {dtype}; pass jax_fp8.E4M3 or jax_fp8.E5M2")
            object.__setattr__(self, role, E4M3 if dtype == E4M3 else E5M2)  # equal formats hash equally
        if self.forward == E5M2:
            raise ValueError(
                "Format.forward must be E4M3, got E5M2: Hopper multiplies no E5M2 by E5M2; pass jax_fp8.HYBRID"
            )

    def dtype_of(self, tensor: int) -> jax.typing.DTypeLike:
        """The dtype of a tensor of a GEMM: INPUT, KERNEL or OUTPUT_GRADIENT."""
        return self.backward if tensor == OUTPUT_GRADIENT else self.forward


#: `Format(forward=E4M3, backward=E5M2)`, the default of recipes.
#:
#: Gradients need range more than precision (https://arxiv.org/abs/2209.05433).
#:
#: Example:
#:   >>> import jax_fp8 as fp8
#:   >>> fp8.DelayedScaling().fp8_format == fp8.HYBRID
#:   True
HYBRID = Format(forward=E4M3, backward=E5M2)


def smallest_normal(dtype: jax.typing.DTypeLike) -> np.float32:
    """The smallest number of an FP8 dtype with a full mantissa: 2**-6 for E4M3, 2**-14 for E5M2."""
    return np.float32(jnp.finfo(dtype).smallest_normal)


def fp8_max(dtype: jax.typing.DTypeLike) -> np.float32:
    """The largest finite value of an FP8 dtype: 448 for E4M3, 57344 for E5M2."""
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"dtype must be E4M3 or E5M2, got {dtype}; pass jax_fp8.E4M3 or jax_fp8.E5M2")
    return np.float32(jnp.finfo(dtype).max)
