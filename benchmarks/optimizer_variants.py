"""The optimizers that `optimizer_step.py` compares."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

import jax_fp8 as fp8


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer, what it keeps, and where the casts happen.

    Args:
      settings: of `fused_adamw`; None is `optax.adamw`.
      casts_in_place: the optimizer writes the FP8 weights; else they are cast from the new parameters, read once more.
      gradient_passes: how often all gradients must be read: once more where something depends on all of them.
      by_tile: casts have a scale for each square of 128 x 128, by its new weights; else one that is known before.
    """

    label: str
    settings: dict | None
    param_dtype: Any = jnp.float32
    casts_in_place: bool = True
    gradient_passes: int = 1
    by_tile: bool = False

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        if self.settings is None:
            return optax.with_extra_args_support(optax.adamw(1e-4, weight_decay=0.1))
        return fp8.fused_adamw(1e-4, weight_decay=0.1, **self.settings)


BF16_MOMENTS = {"mu_dtype": jnp.bfloat16, "nu_dtype": jnp.bfloat16}
FP8_MOMENTS = {"mu_dtype": fp8.E4M3, "nu_dtype": fp8.E4M3}
REMAINDERS = BF16_MOMENTS | {"master_dtype": "remainder"}
CLIPPED = {"max_grad_norm": 1.0, "skip_nonfinite": True}
VARIANTS = {
    "optax": Variant("`optax.adamw`, casts apart", None, casts_in_place=False),
    "casts_apart": Variant("`fused_adamw`, casts apart", {}, casts_in_place=False),
    "in_place": Variant("`fused_adamw`", {}),
    "clipped": Variant("`fused_adamw`, clipped, skipping", CLIPPED, gradient_passes=2),
    "bf16_moments": Variant("`fused_adamw`, bfloat16 moments", BF16_MOMENTS),
    "bf16_params": Variant("... and bfloat16 params, float32 masters", BF16_MOMENTS, jnp.bfloat16),
    "remainder": Variant("... and remainders instead of masters", REMAINDERS, jnp.bfloat16),
    "fp8_moments": Variant("`fused_adamw`, E4M3 moments", FP8_MOMENTS, gradient_passes=2),
    "by_tile_apart": Variant("`fused_adamw`, casts by tile apart", {}, casts_in_place=False, by_tile=True),
    "by_tile": Variant("`fused_adamw`, casts by tile", {}, by_tile=True),
    "by_tile_remainder": Variant("... bfloat16 moments and params, remainders", REMAINDERS, jnp.bfloat16, by_tile=True),
}
