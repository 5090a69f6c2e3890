"""Everything a training step reads and writes, as one pytree."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.extend.core import Literal

from jax_fp8.kernels.explicit import inside_mesh_of
from jax_fp8.parallel.names import without_names
from jax_fp8.train.checks import check_optimizer, check_variables
from jax_fp8.train.serialization import register_serialization
from jax_fp8.train.weight_cache import refresh


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """`step` int32[], `params`, `fp8` (the amax state, {} for recipes without), `opt_state`,
    and `cache` (the weights in FP8, or {}).
    """

    step: jax.Array
    params: Any
    fp8: Any
    opt_state: Any
    cache: Any = field(default_factory=dict)

    @classmethod
    def create(cls, *, variables: Mapping, tx: optax.GradientTransformation) -> "TrainState":
        """The state before the first step, of copies: a step may donate its state. `variables` stay as they are, and so
        does what `tx` was made with, such as a random key.

        Args:
          variables: what `model.init` returned: "params", and "fp8" where the recipe has state; with "fp8_cache" from
            `cast_weights`, steps read the weights from there and the optimizer writes them there. The state has arrays
            alone: names of dims that params carry (`nn.LogicallyPartitioned`) are taken off.
          tx: the optimizer.
        """
        check_variables(variables)
        check_optimizer(tx)
        if "params" not in variables:
            raise ValueError(f'variables must hold "params", got {sorted(variables)}; pass what model.init returned')
        others = set(variables) - {"params", "fp8", "fp8_cache"}
        if others:
            raise ValueError(
                f'TrainState carries "params", "fp8" and "fp8_cache", got also {sorted(others)}, which would be lost; '
                "keep them beside it"
            )
        names = ("params", "fp8", "fp8_cache")
        variables = without_names(variables)
        params, fp8, cache = jax.tree.map(jnp.copy, [variables[name] if name in variables else {} for name in names])
        with inside_mesh_of(params):
            opt_state = _of_own_arrays(tx.init, params)
            return cls(jnp.zeros((), jnp.int32), params, dict(fp8), opt_state, dict(cache))

    @property
    def variables(self) -> dict:
        """For `model.apply`."""
        collections = {"params": self.params, "fp8": self.fp8, "fp8_cache": self.cache}
        return {name: collection for name, collection in collections.items() if collection or name == "params"}

    def replace(self, **changes: Any) -> "TrainState":
        """Another state with these fields changed; new params or scales are cast to FP8 again where the state keeps
        such copies.
        """
        new = dataclasses.replace(self, **changes)
        if not new.cache or "cache" in changes or not {"params", "fp8"} & set(changes):
            return new
        return dataclasses.replace(new, cache=refresh(new.cache, new.params, new.fp8))


def _of_own_arrays(init: Callable, params: Any) -> Any:
    """`init(params)` without arrays that somebody else has too: those of `params`, those that `init` was made with,
    such as a random key, and those that stand twice in it, are copied. Large moments that it makes are not.
    """
    made = init(params)
    leaves, tree = jax.tree.flatten(made)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, leaves))):
        return made
    traced = jax.make_jaxpr(init)(params).jaxpr
    fresh = {var for equation in traced.eqns for var in equation.outvars}
    owned = []
    for leaf, var in zip(leaves, traced.outvars, strict=True):
        is_own = not isinstance(var, Literal) and var in fresh
        owned.append(leaf if is_own or not isinstance(leaf, jax.Array) else jnp.copy(leaf))
        fresh -= {var} if is_own else set()
    return tree.unflatten(owned)


register_serialization(TrainState, [field.name for field in dataclasses.fields(TrainState)])
