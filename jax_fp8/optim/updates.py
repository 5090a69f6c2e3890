"""What an optimizer hands back: numbers to add to the params or, when it was asked to work in place, the new params
themselves.

Optax adds updates to params, which costs a pass over both. `update(grads, state, params, in_place=InPlace())` passes
through `optax.chain` and its like to `fused_adam`, which then returns a `NewParam` for every leaf. Nothing can be
computed with a `NewParam`: a transform that would change the updates after `fused_adam` ends in a `NotLastError`
instead of scaling the params.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe, flatten_like
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, is_fp8
from jax_fp8.core.paths import LayerPath
from jax_fp8.kernels.quantize import quantize_rowwise


@dataclass(frozen=True)
class InPlace:
    """The request for new params.

    `casts`: weights to write in FP8 as well, by the names that lead to them: the copies to overwrite, and the scale
    f32[] to write them with, or a `Cast`: of a scale that is known before, or in squares. Kernels that stand side by
    side in one copy go by the tuple of their names, from left to right.
    `apply`: bool[], False for a step that changes nothing; None is True.
    """

    casts: Mapping[LayerPath | tuple[LayerPath, ...], tuple[Fp8Pair, jax.Array | Cast]] = field(default_factory=dict)
    apply: jax.Array | None = None


@dataclass(frozen=True, eq=False)
class NewParam:
    """A new param in the place of an update, and the FP8 copies of it that were asked for; not an array.

    `cast`: None where none was asked for. A copy of kernels side by side is with the first of them.
    `applied`: bool[], False where the step was skipped and nothing changed; None where steps are never skipped.
    """

    value: Any
    cast: Fp8Pair | None = None
    applied: jax.Array | None = None


class NotLastError(ValueError):
    """Another transform computes with what `fused_adam` returns in place of updates."""

    def __init__(self):
        super().__init__(
            "fused_adam must be the last transform that touches the updates when it works in place, but another one "
            "computes with its result; move fused_adam to the end of the chain, or call update without in_place"
        )


def _refuse(*_):
    raise NotLastError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NewValues:
    """The FP8 values of a new param, an `Fp8Array` in the place of an update: to be read like the array, and not to be
    added to the old ones, which would be a sum of bytes that mean something else.
    """

    array: jax.Array

    __array_ufunc__ = None  # NumPy leaves the operators to this class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "array":
            raise AttributeError(name)
        return getattr(self.array, name)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    @classmethod
    def of(cls, param: Fp8Array) -> Fp8Array:
        return Fp8Array(cls(param.values), param.scale)  # type: ignore[arg-type]


def _refuse_values(*_):
    raise ValueError(
        "the update of an FP8 param takes its place, but something computes with it, such as optax.apply_updates, "
        "which adds it; use jax_fp8.apply_updates, and let fused_adam be the last transform of a chain"
    )


OPERATORS = [f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r")]
ASKED_OF_ARRAYS = ["__jax_array__", "dtype", "shape", "ndim", "size", "real"]  # before anything is computed with one
for _name in [*OPERATORS, "__neg__"]:
    setattr(NewParam, _name, _refuse)
    setattr(NewValues, _name, _refuse_values)
for _name in ASKED_OF_ARRAYS:
    setattr(NewParam, _name, property(_refuse))


def apply_updates(params: Any, updates: Any) -> Any:
    """The updated params.

    Args:
      params: a tree of arrays, and of `Fp8Array` for params in FP8.
      updates: for each param a delta, which is added in float32 and rounded once to the param's dtype (a param in FP8
        keeps its scale); or an `Fp8Array`, or what `fused_adam` returns when it works in place: these take the param's
        place.
    """
    tree = jax.tree.structure(params, is_leaf=is_fp8)
    found = flatten_like("updates", tree, updates, "pass what update returned")
    return tree.unflatten(list(map(_apply, tree.flatten_up_to(params), found)))


def was_applied(updates: Any) -> jax.Array | None:
    """Whether the step was taken, bool[], from the updates of an optimizer that may skip it and works in place;
    None if it never skips."""
    answers = [leaf.applied for leaf in jax.tree.leaves(updates) if isinstance(leaf, NewParam)]
    answers = list({id(applied): applied for applied in answers if applied is not None}.values())
    return jnp.all(jnp.stack(answers)) if len(answers) > 1 else next(iter(answers), None)


def _apply(param, update):
    if isinstance(update, NewParam):
        return update.value
    if isinstance(update, Fp8Array):
        return Fp8Array(update.values.array, update.scale) if isinstance(update.values, NewValues) else update
    if jnp.shape(update) != jnp.shape(param) or not hasattr(param, "dtype") or not hasattr(update, "dtype"):
        raise ValueError(
            f"an update must be an array of the shape of its param, got {describe(update)} for {describe(param)}"
        )
    if isinstance(param, Fp8Array):
        new = param.dequantize() + update.astype(jnp.float32)
        return quantize_rowwise(new, Cast.with_scale(param.dtype, param.scale)).rowwise
    return (param.astype(jnp.float32) + update.astype(jnp.float32)).astype(param.dtype)
