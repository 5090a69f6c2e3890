"""A state that comes to a step from somewhere else: a file, another step, a hand. The step looks at it once.

What only the numbers of a state tell is read here, by the host, which waits for the device. A state that the step
returned itself is known by its arrays, and is not read.
"""

import dataclasses
import operator
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8.core.state import check_dtypes, map_gemms_with_path
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.optim.adam_state import masters_apart
from jax_fp8.state.checks import check_on_mesh
from jax_fp8.state.weight_cache import outdated


class Arrivals:
    """What a step remembers of the state that it returned, and what it has said of others.

    Args:
      mesh: of the step, if it has one.
    """

    def __init__(self, mesh: Mesh | None):
        self._mesh, self._returned, self._weights, self._has_warned = mesh, (), (), False
        self._masters_apart = jax.jit(inside_its_mesh(masters_apart))

    def returned(self, state: Any) -> None:
        self._returned = tuple(jax.tree.leaves((state.step, state.fp8)))
        self._weights = tuple(jax.tree.leaves((state.params, state.cache)))

    def check(self, state: Any) -> bool:
        """Whether step count and FP8 state are the arrays that the step returned, and not equal ones. Else raise unless
        the state is one to go on from.
        """
        if _are_same(self._returned, (state.step, state.fp8)):
            return True
        if self._mesh is not None:
            check_on_mesh(state, self._mesh)
        if state.fp8:
            check_numbers(state.fp8)
        self._warn_of_masters(state)
        return False

    def with_own_cache(self, state: Any) -> Any:
        """The state, whose weights in FP8 are cast again unless they and the params are the arrays that the step
        returned: the version of a cache is a hash of samples, and may miss a param of which a few elements are new.
        """
        if not state.cache or _are_same(self._weights, (state.params, state.cache)):
            return state
        return dataclasses.replace(state, cache=outdated(state.cache))

    def _warn_of_masters(self, state) -> None:
        if self._has_warned or not int(state.step):
            return
        apart = self._masters_apart(state.opt_state, state.params)
        if apart is None or not int(apart):
            return
        self._has_warned = True
        warnings.warn(
            f"masters in state.opt_state must round to their params, got {int(apart):,} elements that do not, whose "
            "params this step takes for new masters; restore into the dtypes that were saved, if params were not "
            "changed on purpose",
            stacklevel=4,
        )


def _are_same(arrays: tuple, tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return len(leaves) == len(arrays) and all(map(operator.is_, leaves, arrays))


def on_host(fp8_state: Mapping) -> dict:
    """A copy of the state in NumPy's arrays."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            sharding: Any = leaf.sharding
            return jax.device_put(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
        return leaf

    return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(whole, dict(fp8_state))))


def check_numbers(fp8_state: Mapping) -> None:
    """Raise unless every scale is a positive finite number, and no amax of a history is negative or not finite: from a
    damaged file, or through a dtype with too small a range.
    """
    check_dtypes(fp8_state)

    def check(path, gemm):
        scale, history = gemm["scale"], gemm["amax_history"][..., 1:]  # the first slot may have staged anything
        _check(path, "scale", "positive and finite", scale, scale > 0)
        _check(path, "amax_history", "finite and not negative", history, history >= 0)

    map_gemms_with_path(check, on_host(fp8_state))


def _check(path, name, property_, numbers, holds) -> None:
    bad = ~(np.isfinite(numbers) & holds)
    if bad.any():
        raise ValueError(
            f"every {name} of the FP8 state must be {property_}, got {numbers[bad][0]} in "
            f'{"/".join(path) or "the layer"}; restore another checkpoint, or put the collection "fp8" of model.init '
            "in its place, which the next step warms"
        )
