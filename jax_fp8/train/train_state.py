"""Everything a training step reads and writes, as one pytree."""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class TrainState:
    """`step` int32[], `params`, `fp8` (the amax state, {} for recipes without) and `opt_state`; `.replace(field=...)` makes another."""

    step: jax.Array
    params: Any
    fp8: Any
    opt_state: Any

    @classmethod
    def create(cls, *, variables: Mapping, tx: optax.GradientTransformation) -> "TrainState":
        """The state before the first step.

        Args:
          variables: what `model.init` returned: "params", and "fp8" where the recipe has state.
          tx: the optimizer.
        """
        if "params" not in variables:
            raise ValueError(f'variables must hold "params", got {sorted(variables)}; pass what model.init returned')
        others = set(variables) - {"params", "fp8"}
        if others:
            raise ValueError(
                f'TrainState carries "params" and "fp8", got also {sorted(others)}, which would be lost; keep them beside it'
            )
        params = variables["params"]
        return cls(jnp.zeros((), jnp.int32), params, dict(variables.get("fp8", {})), tx.init(params))

    @property
    def variables(self) -> dict:
        """For `model.apply`."""
        return {"params": self.params, **({"fp8": self.fp8} if self.fp8 else {})}
