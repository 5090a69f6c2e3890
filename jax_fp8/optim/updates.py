"""The updates that an optimizer returns: deltas to add to the params or, with `in_place`, the new params themselves.

    update(grads, state, params)                         → float32 deltas; Fp8Array with NewValues for params in FP8
    update(grads, state, params, in_place=InPlace(...))  → NewParam for every param
    apply_updates(params, updates)                       → the new params, from either

Adding updates costs a pass over updates and params, which working in place saves. `optax.chain` and its like pass
`in_place` through to `fused_adam`. Nothing can be computed with a `NewParam`: a transform behind `fused_adam` that
would scale updates raises a `NotLastError`, and so cannot scale the params by mistake.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import describe, flatten_like
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair, is_fp8
from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.kernels.shared_cast import SharedCast
from jax_fp8.kernels.storage import REMAINDER, same_numbers
from jax_fp8.optim.adam_state import Param, ParamState
from jax_fp8.optim.moment_scales import with_moment_scales

KernelNames: TypeAlias = LayerPath | tuple[LayerPath, ...]
"""The path of one kernel, or those of several that stand side by side in one copy, from left to right."""


@dataclass(frozen=True)
class InPlace:
    """The request for new params in place of updates, which saves a pass over both.

    Args:
      casts: weights to write in FP8, too, by the paths of their kernels. For each the copies to overwrite, and the
        scale f32[] to write them with, or a `Cast`, which has a known scale or a scale for each square.
      apply: bool[], False for a step that changes nothing; None is True.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> tx, params = fp8.fused_adam(0.5), {"kernel": jnp.ones((2, 2))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, state, params, in_place=fp8.InPlace())
      >>> fp8.apply_updates(params, updates)["kernel"].round(3)[0]
      Array([0.5, 0.5], dtype=float32)
    """

    casts: Mapping[KernelNames, tuple[Fp8Pair, jax.Array | Cast]] = field(default_factory=dict)
    apply: jax.Array | None = None


def requested_casts(
    in_place: InPlace | None, params: PyTree
) -> tuple[list[tuple[Fp8Pair, Cast] | None], list[SharedCast]]:
    """The casts of a request as the Adam kernel takes them.

    Returns:
      For each param its own copy with one scale and its cast, or None; and the shared casts: copies of several kernels,
      or with a scale for each square. A shared cast is left out if one of its kernels is not among these params, as
      when `optax.masked` hides it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8)
    requests = {} if in_place is None else {path: _as_cast(*request) for path, request in in_place.casts.items()}
    numbers: dict[object, int] = {
        names_of(path): number for number, (path, param) in enumerate(leaves) if not is_fp8(param)
    }
    own: dict[KernelNames, tuple[Fp8Pair, Cast]] = {}
    shared = []
    for path, (pair, cast) in requests.items():
        if isinstance(path[0], str) and cast.rule.tile is None:
            own[path] = pair, cast
            continue
        kernels = (path,) if isinstance(path[0], str) else path
        if all(kernel in numbers for kernel in kernels):
            shared.append(_shared_cast(pair, cast, tuple(numbers[kernel] for kernel in kernels)))
    return [own.get(names_of(path)) for path, _ in leaves], shared


def _as_cast(pair: Fp8Pair, cast: jax.Array | Cast) -> tuple[Fp8Pair, Cast]:
    return pair, cast if isinstance(cast, Cast) else Cast.with_scale(pair.rowwise.dtype, cast)


def _shared_cast(pair: Fp8Pair, cast: Cast, leaves: tuple[int, ...]) -> SharedCast:
    if cast.rule.tile is None:
        return SharedCast(pair, cast.known_scale, leaves)
    return SharedCast(pair, None, leaves, cast.rule)


@dataclass(frozen=True, eq=False)
class NewParam:
    """A new param in the place of an update, with the FP8 copies that `InPlace` asked for; not an array.

    Args:
      value: the new param.
      cast: its copies in FP8, if asked for. The first of several kernels side by side has the copy of all.
      applied: bool[], False if the step was skipped and nothing changed; None where steps are never skipped.
    """

    value: Param
    cast: Fp8Pair | None = None
    applied: jax.Array | None = None


class NotLastError(ValueError):
    """Another transform computes with what `fused_adam` returns in place of updates."""

    def __init__(self):
        super().__init__(
            "fused_adam must be the last transform that touches the updates when it works in place, but another one "
            "computes with its result; move fused_adam to the end of the chain, or call update without in_place"
        )


def _refuse(*_: object) -> NoReturn:
    raise NotLastError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class NewValues:
    """The values of an `Fp8Array` in the place of an update. They can be read like an array. Operators raise: values of
    two FP8 arrays have different scales, so their sum means nothing.
    """

    array: jax.Array

    __array_ufunc__ = None  # NumPy leaves the operators to this class

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "array":
            raise AttributeError(name)
        return getattr(self.array, name)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array, dtype)

    @classmethod
    def as_update(cls, param: Fp8Array) -> Fp8Array:
        """A new param in FP8 as the update that replaces the old one."""
        return Fp8Array(cls(param.values), param.scale)  # type: ignore[arg-type]


def _refuse_values(*_: object) -> NoReturn:
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


def delta_to(param: Param, leaf: Leaf, update: jax.Array) -> Param:
    """What to add to a param to arrive at the new one; of a param in FP8 the new one itself."""
    if isinstance(param, Fp8Array):
        return NewValues.as_update(fp8_values(leaf).rowwise)
    if leaf.master is None:
        return update
    new, old = leaf.param.astype(jnp.float32), param.astype(jnp.float32)
    return jnp.where(new == old, -jnp.float32(0), new - old)  # adding -0 changes nothing, not even a -0


def with_landed_master(param: Param, delta: PyTree, leaf: Leaf) -> Leaf:
    """The leaf, with masters that fit the sum of param and delta in float32. No float32 delta leads from a bfloat16
    param to one that is 2**16 times smaller: there the sum is another number, and becomes the master.
    """
    if leaf.master is None or isinstance(param, Fp8Array):
        return leaf
    landed = (param.astype(jnp.float32) + delta).astype(param.dtype)
    own = jnp.zeros((), REMAINDER) if leaf.master.dtype == REMAINDER else landed.astype(leaf.master.dtype)
    return replace(leaf, master=jnp.where(same_numbers(landed, leaf.param), leaf.master, own))


def new_param(param: Param, leaf: Leaf, shared_pair: Fp8Pair | None, applied: jax.Array | None) -> NewParam:
    """The result for a param in place; `shared_pair`: the copy of several kernels of which it is the first."""
    if is_fp8(param):
        return NewParam(fp8_values(leaf).rowwise, None, applied)
    return NewParam(leaf.param, leaf.cast or shared_pair, applied)


def fp8_values(leaf: Leaf) -> Fp8Pair:
    """The values of a param in FP8."""
    assert leaf.cast is not None, "a leaf of such a param has them"
    return leaf.cast


def leaf_of(
    gradient: jax.Array,
    param: Param,
    state: ParamState,
    cast: tuple[Fp8Pair, Cast] | None,
    decays: bool,
    coefficients: Coefficients,
    l2: bool,
) -> Leaf:
    """One param as `adam` takes it; `cast`: the copy in FP8 that `in_place` asks for, and how it is cast."""
    leaf = Leaf(gradient, state.mu, state.nu, None if is_fp8(param) else param, state.master, decays=decays)
    if isinstance(param, Fp8Array):
        assert state.fp8 is not None, "as Storage.check has seen"
        values = Fp8Pair.with_shared_scale(param.values, state.fp8["transposed"], param.scale, state.fp8["amax"])
        leaf = replace(leaf, cast=values, scale=scale_from_amax(values.amax, param.dtype))
    elif cast is not None:
        leaf = replace(leaf, cast=cast[0], scale=cast[1].known_scale)
    return with_moment_scales(leaf, param, coefficients, l2)


def next_state(param: Param, leaf: Leaf, before: ParamState, applied: jax.Array | None) -> ParamState:
    """The state of a param after the step. A skipped step leaves the arrays of a leaf as they are, but for a param in
    FP8 its master may have changed before the step (`with_own_master`): there the state from `before` is chosen.
    """
    if not is_fp8(param):
        return ParamState(leaf.mu, leaf.nu, leaf.master, None)
    cast = fp8_values(leaf)
    state = ParamState(leaf.mu, leaf.nu, leaf.master, {"amax": cast.amax, "transposed": cast.arrays[1]})
    return state if applied is None else jax.tree.map(partial(jnp.where, applied), state, before)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Update params by what an optimizer returned, also by the result of `fused_adam` in place.

    Args:
      params: a tree of arrays, and of `Fp8Array` for params in FP8.
      updates: for each param a delta, which is added in float32 and rounded once to the param's dtype (a param in FP8
        keeps its scale); or its replacement: an `Fp8Array`, or the result of `fused_adam` in place.

    Returns:
      The new params, with the structure, shapes and dtypes of `params`.

    Raises:
      ValueError: if `updates` have another structure than `params`, or an update is not an array of the shape of its
        param.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> params = {"bias": jnp.ones(2, jnp.bfloat16)}
      >>> fp8.apply_updates(params, {"bias": jnp.array([1.0, -0.5])})["bias"]
      Array([2, 0.5], dtype=bfloat16)
    """
    tree = jax.tree.structure(params, is_leaf=is_fp8)
    leaves = flatten_like("updates", tree, updates, "pass what update returned")
    return tree.unflatten(list(map(_apply, tree.flatten_up_to(params), leaves)))


def was_applied(updates: PyTree) -> jax.Array | None:
    """Whether the step was taken, bool[], from the updates of an optimizer that works in place; None if it never skips
    a step.
    """
    answers = [leaf.applied for leaf in jax.tree.leaves(updates) if isinstance(leaf, NewParam)]
    answers = list({id(applied): applied for applied in answers if applied is not None}.values())
    return jnp.all(jnp.stack(answers)) if len(answers) > 1 else next(iter(answers), None)


def _apply(param: Param, update: Param | NewParam) -> Param:
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
