"""Checks of a state that a step did not return itself: one from a file, from another step, or edited by hand.

    state ─are its arrays those that the step returned last?→ yes: use it as it is
                                                            → no: read its numbers on the host, once, and check them

Reading numbers makes the host wait for the device. So the step remembers the arrays it returned, and does not read
these again.
"""

import dataclasses
import operator
import warnings
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import check_dtypes, map_gemms_with_path
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.optim.adam_state import masters_apart
from jax_fp8.state.checks import check_on_mesh
from jax_fp8.state.train_state import TrainState
from jax_fp8.state.weight_cache import outdated


class Arrivals:
    """The arrays that a step returned last, and whether it has already warned about masters.

    Args:
      mesh: of the step, if it has one.
    """

    def __init__(self, mesh: Mesh | None):
        self._mesh, self._returned, self._weights, self._has_warned = mesh, (), (), False
        self._masters_apart = jax.jit(inside_its_mesh(masters_apart))

    def returned(self, state: TrainState) -> None:
        self._returned = tuple(jax.tree.leaves((state.step, state.fp8)))
        self._weights = tuple(jax.tree.leaves((state.params, state.cache)))

    def check(self, state: TrainState) -> bool:
        """Whether step count and FP8 state are the very arrays that the step returned. Raise if they are others, and
        training cannot continue from this state.
        """
        if _are_same(self._returned, (state.step, state.fp8)):
            return True
        if self._mesh is not None:
            check_on_mesh(state, self._mesh)
        if state.fp8:
            check_numbers(state.fp8)
        self._warn_of_masters(state)
        return False

    def with_own_cache(self, state: TrainState) -> TrainState:
        """The state, its weight cache marked as outdated unless cache and params are the arrays that the step returned.

        The version of a cache cannot replace this check: it hashes samples of the params, and may miss a param of which
        only a few elements changed.
        """
        if not state.cache or _are_same(self._weights, (state.params, state.cache)):
            return state
        return dataclasses.replace(state, cache=outdated(state.cache))

    def _warn_of_masters(self, state: TrainState) -> None:
        if self._has_warned or not int(state.step):
            return
        apart = self._masters_apart(state.opt_state, state.params)
        if apart is None or not int(apart):
            return
        self._has_warned = True
        warnings.warn(
            f"masters in state.opt_state must round to their params, got {int(apart):,} elements that do not; this "
            "step replaces such masters by their params; restore into the dtypes that were saved, unless the params "
            "were changed on purpose",
            stacklevel=4,
        )


def _are_same(arrays: tuple[jax.Array, ...], tree: PyTree) -> bool:
    leaves = jax.tree.leaves(tree)
    return len(leaves) == len(arrays) and all(map(operator.is_, leaves, arrays))


def on_host(fp8_state: Mapping) -> dict:
    """A copy of the state as NumPy arrays."""

    def replicated(leaf: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        """The host can read an array that is split over processes only after every device has all of it."""
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            assert isinstance(leaf.sharding, NamedSharding), "arrays of several processes lie on a mesh"
            return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
        return leaf

    return jax.tree.map(np.asarray, jax.device_get(jax.tree.map(replicated, dict(fp8_state))))


def check_numbers(fp8_state: Mapping) -> None:
    """Raise unless every scale is positive and finite, and every amax of a history is finite and not negative. They may
    not be in a damaged file, or after a dtype with too small a range.
    """
    check_dtypes(fp8_state)

    def check(path: LayerPath, gemm: Mapping[str, np.ndarray]) -> None:
        scale, history = gemm["scale"], gemm["amax_history"][..., 1:]  # slot 0 is staged, and may hold any number
        _check(path, "scale", "positive and finite", scale, scale > 0)
        _check(path, "amax_history", "finite and not negative", history, history >= 0)

    map_gemms_with_path(check, on_host(fp8_state))


def _check(path: LayerPath, name: str, property_: str, numbers: np.ndarray, holds: np.ndarray) -> None:
    bad = ~(np.isfinite(numbers) & holds)
    if bad.any():
        raise ValueError(
            f"every {name} of the FP8 state must be {property_}, got {numbers[bad][0]} in "
            f'{"/".join(path) or "the layer"}; restore another checkpoint, or replace it by the collection "fp8" of '
            "model.init, to which the next step gives first scales"
        )
