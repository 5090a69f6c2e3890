"""The state of `fused_adam`: what is kept of each param, in which dtypes, and how it is made and checked."""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import describe, flatten_like
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, is_fp8
from jax_fp8.core.scale import SMALLEST_SCALE
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.explicit import zeros_like
from jax_fp8.kernels.storage import REMAINDER, off_the_tie, remainder_of, rounds_to

FP8_DTYPES = (np.dtype(E4M3), np.dtype(E5M2))
MOMENT_DTYPES = (*map(np.dtype, ("float32", "bfloat16")), *FP8_DTYPES)
MOST = np.iinfo(np.int32).max
MASTER_DTYPES = tuple(map(np.dtype, ("float32", "float16")))


class FusedAdamState(NamedTuple):
    """Optimizer state; `mu`, `nu`, `master` and `fp8` have the params' structure, an FP8 param being one leaf.

    `count` int32[]: steps taken. `mu`, `nu`: moments; in FP8 they are `Fp8Array`, and `nu` then holds the square root.
    `master`: None for params that are float32 already; with "remainder", the 16 bits, uint16, that a bfloat16 param
    lacks. `fp8`: None but for params in FP8, where it is `{"amax": f32[], "transposed": FP8 (n, k) or None}`: the amax
    that the next scale is made from, and the weight in the other orientation, where both its dims are multiples of 16.
    """

    count: jax.Array
    mu: Any
    nu: Any
    master: Any
    fp8: Any

    @classmethod
    def of(cls, count: jax.Array, tree: Any, kept: Sequence["Kept"]) -> "FusedAdamState":
        """From what is kept of each param of a tree."""
        return cls(count, *(tree.unflatten([getattr(row, name) for row in kept]) for name in Kept._fields))

    def kept(self, tree: Any) -> list["Kept"]:
        """What is kept of each param of a tree."""
        return [Kept(*row) for row in zip(*(self._flatten(name, tree) for name in Kept._fields), strict=True)]

    def _flatten(self, name, tree) -> list:
        return flatten_like(
            f"state.{name}", tree, getattr(self, name), "pass the state that init made for these params"
        )


def masters_apart(opt_state: Any, params: Any) -> jax.Array | None:
    """How many elements of masters do not round to their params, int32[]; None where there are no masters.

    A step takes such a param for the new master. After a restore many of them mean that params and masters are not of
    one run, or that the masters were saved in another dtype.

    Args:
      opt_state: of any optimizer that has `fused_adam` in it.
      params: all that it trains.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8))
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_adam)
    masters = [leaf for node in nodes if _is_adam(node) for leaf in jax.tree_util.tree_leaves_with_path(node.master)]
    pairs = [(master, by_path[path]) for path, master in masters if path in by_path]
    if not pairs:
        return None
    apart = [~rounds_to(master, param) for master, param in pairs]
    if sum(found.size for found in apart) <= MOST:
        return sum((jnp.sum(found, dtype=jnp.int32) for found in apart), jnp.int32(0))
    total = sum((jnp.sum(found, dtype=jnp.float32) for found in apart), jnp.float32(0))
    return jnp.minimum(total, np.float32(MOST - 127)).astype(jnp.int32)  # about, and at most what int32 holds


def with_own_master(param: Any, kept: "Kept") -> "Kept":
    """What is kept of a param in FP8, where changed values are the master; all other params as they were, for the step
    itself looks at them.

    The next scale follows from the weights that the param has, since those from before may be smaller.
    """
    if not is_fp8(param):
        return kept
    same = rounds_to(kept.master, param)
    master = jnp.where(same, kept.master, param.dequantize(kept.master.dtype))
    largest = jnp.where(jnp.all(same), kept.fp8["amax"], amax(master))
    return kept._replace(master=master, fp8=kept.fp8 | {"amax": largest})


def _is_adam(node) -> bool:
    return isinstance(node, FusedAdamState)


# What the state keeps of one param: all of its fields but the count.
Kept = namedtuple("Kept", FusedAdamState._fields[1:])


@dataclass(frozen=True)
class Storage:
    """The dtypes a state is kept in."""

    master_dtype: np.dtype
    mu_dtype: np.dtype
    nu_dtype: np.dtype

    @classmethod
    def of(cls, master_dtype, mu_dtype, nu_dtype) -> "Storage":
        """From dtypes as a user writes them."""
        remainder = isinstance(master_dtype, str) and master_dtype == "remainder"
        return cls(
            REMAINDER if remainder else _dtype("master_dtype", master_dtype, MASTER_DTYPES),
            _dtype("mu_dtype", mu_dtype, MOMENT_DTYPES),
            _dtype("nu_dtype", nu_dtype, MOMENT_DTYPES),
        )

    def init(self, param, master) -> Kept:
        _check_param(param)
        like = param.values if is_fp8(param) else param
        mu, nu = _zeros(like, self.mu_dtype), _zeros(like, self.nu_dtype)
        if param.dtype == jnp.float32:
            return Kept(mu, nu, None, None)
        if self.master_dtype == REMAINDER and param.dtype != jnp.bfloat16:
            raise ValueError(
                f'master_dtype="remainder" needs bfloat16 or float32 params, got {param.dtype} of shape {param.shape}; '
                "use master_dtype=jnp.float32"
            )
        if master is None:
            master = param.dequantize() if is_fp8(param) else param
        master = jnp.array(master, jnp.float32, copy=True)  # the caller's: the state is donated
        if param.dtype == jnp.bfloat16 and self.master_dtype != jnp.float16:
            master = off_the_tie(master)
        if self.master_dtype == REMAINDER:
            return Kept(mu, nu, _remainder_beside(param, master), None)
        master = master.astype(self.master_dtype)
        fp8 = {"amax": amax(master), "transposed": _transposed(param)} if is_fp8(param) else None
        return Kept(mu, nu, master, fp8)

    def check(self, param, kept: Kept) -> None:
        """Raise unless the state is one that `init` makes for this param."""
        fp8 = {"amax": None, "transposed": None} if kept.fp8 is None else kept.fp8
        found = {name: getattr(kept, name) for name in ("mu", "nu", "master")}
        found |= {"fp8[transposed]": fp8["transposed"], "fp8[amax]": fp8["amax"]}
        expected = {"mu": self.mu_dtype, "nu": self.nu_dtype}
        if param.dtype != jnp.float32:
            expected["master"] = self.master_dtype
        if is_fp8(param):
            expected["fp8[amax]"] = jnp.float32
        if _has_transposed(param):
            expected["fp8[transposed]"] = param.dtype
        for name, array in found.items():
            shape = {"fp8[transposed]": param.shape[::-1], "fp8[amax]": ()}.get(name, param.shape)
            wanted = _describe(shape, expected.get(name))
            arrived = "nothing" if array is None else _describe(array.shape, array.dtype)
            if arrived != wanted:
                raise ValueError(
                    f"state.{name} of a {param.dtype} param must be {wanted} in this fused_adam, got {arrived}; "
                    "use the params and dtypes that the state was made or saved with, or make a new state with init"
                )


def _zeros(like, dtype):
    zeros = zeros_like(like, dtype)
    return Fp8Array(zeros, jnp.float32(SMALLEST_SCALE)) if dtype in FP8_DTYPES else zeros


def _remainder_beside(param, master) -> jax.Array:
    """The remainder of a master that rounds to `param`;
    of the param itself where the master rounds to something else.
    """
    return jnp.where(master.astype(param.dtype) == param, remainder_of(master), np.uint16(0))


def _has_transposed(param) -> bool:
    """Whether this is an FP8 matrix that a GEMM could take."""
    return is_fp8(param) and len(param.shape) == 2 and not any(size % 16 for size in param.shape)


def _transposed(param):
    return param.values.T if _has_transposed(param) else None


def _describe(shape, dtype) -> str:
    return "nothing" if dtype is None else f"{np.dtype(dtype).name} of shape {shape}"


def given_masters(master, params, tree) -> list:
    if master is None:
        return [None] * tree.num_leaves
    masters = flatten_like("master", tree, master, "make it with jax.tree.map over params")
    for param, given in zip(tree.flatten_up_to(params), masters, strict=True):
        if given is None and param.dtype == jnp.float32:
            continue
        if getattr(given, "shape", None) != param.shape or not jnp.issubdtype(jnp.result_type(given), jnp.floating):
            raise ValueError(
                f"master must hold a floating point array of shape {param.shape} for a {param.dtype} param, got "
                f"{getattr(given, 'dtype', type(given).__name__)} of shape {getattr(given, 'shape', None)}; "
                "make it from params by astype(jnp.float32)"
            )
    return masters


def _check_param(param):
    if not hasattr(param, "dtype"):
        raise ValueError(f"fused_adam needs params that are arrays, got {describe(param)}; pass jnp.float32(...)")
    if not is_fp8(param) and param.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"fused_adam needs floating point params (float32, bfloat16, float16 or Fp8Array), "
            f"got {param.dtype} of shape {param.shape}; mask it with optax.masked"
        )


def _dtype(name, dtype, allowed) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = dtype
    if found == np.float16 and allowed is MOMENT_DTYPES:
        raise ValueError(
            f"{name} must be one of {', '.join(map(str, allowed))}, got float16, whose smallest number is 6e-8, more "
            "than the squares of most gradients; use bfloat16, which has as many bytes"
        )
    if found not in allowed:
        names = [*map(str, allowed), *(['"remainder"'] if allowed is MASTER_DTYPES else [])]
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {found}")
    return found
