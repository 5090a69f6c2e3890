"""The state of `fused_adam`: the arrays that it keeps for each param, their dtypes, and how it makes and checks them.

    params ─Storage.init→ a ParamState for each ─from_param_states→ FusedAdamState, which `update` takes and returns

                    master, by `master_dtype`                       fp8
    float32 param   none: the param is its own master               none
    bfloat16        float32, float16, or the remainder, 16 bits     none
    float16         float32 or float16                              none
    Fp8Array        float32 or float16                              amax for the next scale, transposed values

Every param has two moments. Moments in FP8 are `Fp8Array`s; kernels/storage.py says why so few bits are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import describe, flatten_like
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, is_fp8
from jax_fp8.core.scale import SMALLEST_SCALE
from jax_fp8.core.types import PyTree, TreeDef
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.explicit import zeros_like
from jax_fp8.kernels.storage import REMAINDER, off_the_tie, remainder_of, rounds_to

FP8_DTYPES = (np.dtype(E4M3), np.dtype(E5M2))
MOMENT_DTYPES = (*map(np.dtype, ("float32", "bfloat16")), *FP8_DTYPES)
LARGEST_INT32 = np.iinfo(np.int32).max
MASTER_DTYPES = tuple(map(np.dtype, ("float32", "float16")))

Param: TypeAlias = jax.Array | Fp8Array


class ParamState(NamedTuple):
    """The state of one param: the fields of a `FusedAdamState` but its count."""

    mu: Param
    nu: Param
    master: jax.Array | None
    fp8: dict[str, PyTree] | None


class FusedAdamState(NamedTuple):
    """Optimizer state; `mu`, `nu`, `master` and `fp8` have the params' structure, where a param in FP8 is one leaf.

    `count` int32[]: steps taken. `mu`, `nu`: moments; in FP8 they are `Fp8Array`, and `nu` then holds the square root.
    `master`: None for float32 params; with "remainder", uint16, the 16 bits that a bfloat16 param lacks. `fp8`: None
    unless the param is in FP8; then `{"amax": f32[], "transposed": FP8 (n, k) or None}`: the amax from which the next
    scale follows, and the weight in the other orientation, if both its dims are multiples of 16.
    """

    count: jax.Array
    mu: PyTree
    nu: PyTree
    master: PyTree
    fp8: PyTree

    @classmethod
    def from_param_states(cls, count: jax.Array, tree: TreeDef, states: Sequence[ParamState]) -> "FusedAdamState":
        """The state of params with this structure, from the state of each."""
        return cls(count, *(tree.unflatten([getattr(state, name) for state in states]) for name in ParamState._fields))

    def param_states(self, tree: TreeDef) -> list[ParamState]:
        """The state of each param of a tree with this structure."""
        fields = (self._flatten(name, tree) for name in ParamState._fields)
        return [ParamState(*row) for row in zip(*fields, strict=True)]

    def _flatten(self, name: str, tree: TreeDef) -> list:
        return flatten_like(
            f"state.{name}", tree, getattr(self, name), "pass the state that init made for these params"
        )


def masters_apart(opt_state: PyTree, params: PyTree) -> jax.Array | None:
    """How many elements of masters do not round to their params, int32[]; None where there are no masters.

    A step makes such a param its new master. Many of them after a restore mean that params and masters come from
    different runs, or that the masters were saved in another dtype.

    Args:
      opt_state: of any optimizer that has `fused_adam` in it.
      params: all that it trains.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8))
    nodes = jax.tree.leaves(opt_state, is_leaf=is_adam)
    masters = [leaf for node in nodes if is_adam(node) for leaf in jax.tree_util.tree_leaves_with_path(node.master)]
    pairs = [(master, by_path[path]) for path, master in masters if path in by_path]
    if not pairs:
        return None
    apart = [~rounds_to(master, param) for master, param in pairs]
    if sum(is_apart.size for is_apart in apart) <= LARGEST_INT32:
        return sum((jnp.sum(is_apart, dtype=jnp.int32) for is_apart in apart), jnp.int32(0))
    # An int32 sum could overflow here. A float32 sum is about right, and its largest value below 2**31 fits an int32.
    total = sum((jnp.sum(is_apart, dtype=jnp.float32) for is_apart in apart), jnp.float32(0))
    return jnp.minimum(total, np.float32(LARGEST_INT32 - 127)).astype(jnp.int32)


def with_own_master(param: Param, state: ParamState) -> ParamState:
    """The state of a param in FP8 in which values that somebody changed have become the master. All other states are
    returned as they are: for those params the Adam kernel does the same.

    The next scale must fit the changed values, too, so it follows from the amax of the new master.
    """
    if not isinstance(param, Fp8Array):
        return state
    assert state.master is not None and state.fp8 is not None, "as Storage.check has seen"
    same = rounds_to(state.master, param)
    master = jnp.where(same, state.master, param.dequantize(state.master.dtype))
    largest = jnp.where(jnp.all(same), state.fp8["amax"], amax(master))
    return state._replace(master=master, fp8=state.fp8 | {"amax": largest})


def is_adam(node: object) -> bool:
    """Whether a node of an optimizer's state is that of `fused_adam`."""
    return isinstance(node, FusedAdamState)


@dataclass(frozen=True)
class Storage:
    """The dtypes of the arrays in a state; `master_dtype` is uint16 for remainders."""

    master_dtype: np.dtype
    mu_dtype: np.dtype
    nu_dtype: np.dtype

    @classmethod
    def from_options(
        cls,
        master_dtype: jax.typing.DTypeLike,
        mu_dtype: jax.typing.DTypeLike,
        nu_dtype: jax.typing.DTypeLike,
    ) -> "Storage":
        """From the arguments of `fused_adam`; other dtypes are refused."""
        remainder = isinstance(master_dtype, str) and master_dtype == "remainder"
        return cls(
            REMAINDER if remainder else _dtype("master_dtype", master_dtype, MASTER_DTYPES),
            _dtype("mu_dtype", mu_dtype, MOMENT_DTYPES),
            _dtype("nu_dtype", nu_dtype, MOMENT_DTYPES),
        )

    def init(self, param: Param, master: jax.Array | None) -> ParamState:
        """The state of a param before the first step; `master` None: the param itself."""
        _check_param(param)
        like = param.values if isinstance(param, Fp8Array) else param
        mu, nu = _zeros(like, self.mu_dtype), _zeros(like, self.nu_dtype)
        if param.dtype == jnp.float32:  # its own master: a copy would hold the same bits
            return ParamState(mu, nu, None, None)
        if self.master_dtype == REMAINDER and param.dtype != jnp.bfloat16:
            raise ValueError(
                f'master_dtype="remainder" needs bfloat16 or float32 params, got {param.dtype} of shape {param.shape}; '
                "use master_dtype=jnp.float32"
            )
        if master is None:
            master = param.dequantize() if isinstance(param, Fp8Array) else param
        master = jnp.array(master, jnp.float32, copy=True)  # a step donates its state, but not the caller's array
        if param.dtype == jnp.bfloat16 and self.master_dtype != jnp.float16:
            # Also without remainders, so that float32 masters give the same params (kernels/storage.py).
            master = off_the_tie(master)
        if isinstance(param, Fp8Array):
            master = master.astype(self.master_dtype)
            return ParamState(mu, nu, master, {"amax": amax(master), "transposed": _transposed(param)})
        if self.master_dtype == REMAINDER:
            return ParamState(mu, nu, _remainder_beside(param, master), None)
        return ParamState(mu, nu, master.astype(self.master_dtype), None)

    def check(self, param: Param, state: ParamState) -> None:
        """Raise unless the state is one that `init` makes for this param."""
        fp8 = {"amax": None, "transposed": None} if state.fp8 is None else state.fp8
        arrays = {"mu": state.mu, "nu": state.nu, "master": state.master}
        arrays |= {"fp8[transposed]": fp8["transposed"], "fp8[amax]": fp8["amax"]}
        # An array without a dtype here must be None: such is the master of a float32 param.
        dtypes = {"mu": self.mu_dtype, "nu": self.nu_dtype}
        if param.dtype != jnp.float32:
            dtypes["master"] = self.master_dtype
        if is_fp8(param):
            dtypes["fp8[amax]"] = np.dtype(jnp.float32)
        if _has_transposed(param):
            dtypes["fp8[transposed]"] = param.dtype
        for name, array in arrays.items():
            shape = {"fp8[transposed]": param.shape[::-1], "fp8[amax]": ()}.get(name, param.shape)
            wanted = _describe(shape, dtypes.get(name))
            arrived = "nothing" if array is None else _describe(array.shape, array.dtype)
            if arrived != wanted:
                raise ValueError(
                    f"state.{name} of a {param.dtype} param must be {wanted} in this fused_adam, got {arrived}; "
                    "use the params and dtypes that the state was made or saved with, or make a new state with init"
                )


def _zeros(like: jax.Array, dtype: np.dtype) -> Param:
    zeros = zeros_like(like, dtype)
    return Fp8Array(zeros, jnp.float32(SMALLEST_SCALE)) if dtype in FP8_DTYPES else zeros


def _remainder_beside(param: jax.Array, master: jax.Array) -> jax.Array:
    """The remainders of masters; 0, that of the param itself, where a master does not round to its param."""
    return jnp.where(master.astype(param.dtype) == param, remainder_of(master), np.uint16(0))


def _has_transposed(param: Param) -> bool:
    """Whether this is an FP8 matrix that a GEMM can multiply by: FP8 GEMMs need dims that are multiples of 16."""
    return is_fp8(param) and len(param.shape) == 2 and not any(size % 16 for size in param.shape)


def _transposed(param: Fp8Array) -> jax.Array | None:
    return param.values.T if _has_transposed(param) else None


def _describe(shape: tuple[int, ...], dtype: np.dtype | None) -> str:
    return "nothing" if dtype is None else f"{np.dtype(dtype).name} of shape {shape}"


def initial_masters(master: PyTree, params: PyTree, tree: TreeDef) -> list[jax.Array | None]:
    """The masters that the user passed, one for each param; None where a param is to be its own first master."""
    if master is None:
        return [None] * tree.num_leaves
    masters = flatten_like("master", tree, master, "make it with jax.tree.map over params")
    for param, its_master in zip(tree.flatten_up_to(params), masters, strict=True):
        if its_master is None and param.dtype == jnp.float32:
            continue
        shape = getattr(its_master, "shape", None)
        if shape != param.shape or not jnp.issubdtype(jnp.result_type(its_master), jnp.floating):
            raise ValueError(
                f"master must hold a floating point array of shape {param.shape} for a {param.dtype} param, got "
                f"{getattr(its_master, 'dtype', type(its_master).__name__)} of shape {shape}; "
                "make it from params by astype(jnp.float32)"
            )
    return masters


def _check_param(param: PyTree) -> None:
    if not hasattr(param, "dtype"):
        raise ValueError(f"fused_adam needs params that are arrays, got {describe(param)}; pass jnp.float32(...)")
    if not is_fp8(param) and param.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"fused_adam needs floating point params (float32, bfloat16, float16 or Fp8Array), "
            f"got {param.dtype} of shape {param.shape}; mask it with optax.masked"
        )


def _dtype(name: str, option: jax.typing.DTypeLike, allowed: tuple[np.dtype, ...]) -> np.dtype:
    try:
        dtype = np.dtype(option)
    except TypeError:
        dtype = option
    if dtype == np.float16 and allowed is MOMENT_DTYPES:
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, allowed))}, got float16, whose smallest number is 6e-8, more "
            "than the squares of most gradients; use bfloat16, which has as many bytes"
        )
    if dtype not in allowed:
        names = [*map(str, allowed), *(['"remainder"'] if allowed is MASTER_DTYPES else [])]
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {dtype}")
    return np.dtype(dtype)
