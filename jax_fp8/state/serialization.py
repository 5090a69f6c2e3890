"""`flax.serialization` of FP8 arrays and of our dataclasses, for `to_bytes`, `to_state_dict` and their inverses."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax import serialization

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.types import PyTree

StateDict = dict[str, PyTree]


def register_serialization(cls: type, names: Sequence[str], may_be_empty: Sequence[str] = ()) -> None:
    """Save a dataclass as a state dict of these attributes, and restore its static fields from the target. Attributes
    of `may_be_empty` are saved only if they are not empty.
    """

    def saved_names(value: object) -> list[str]:
        return [name for name in names if name not in may_be_empty or getattr(value, name)]

    def to_state_dict(value: object) -> StateDict:
        return {name: serialization.to_state_dict(getattr(value, name)) for name in saved_names(value)}

    def from_state_dict(target: Any, state: StateDict) -> object:
        _check_names(cls, saved_names(target), state)
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name) for name in state
        }
        return dataclasses.replace(target, **restored)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


def _check_names(cls: type, names: Collection[str], state: Mapping[str, PyTree]) -> None:
    if set(state) != set(names):
        raise ValueError(
            f"a saved {cls.__name__} must hold {sorted(names)}, got {sorted(state)}; restore it into one that holds "
            "the same"
        )


def _pair_to_state_dict(pair: Fp8Pair) -> StateDict:
    return {key.name: serialization.to_state_dict(leaf) for key, leaf in pair.tree_flatten_with_keys()[0]}


def _pair_from_state_dict(target: Fp8Pair, state: StateDict) -> Fp8Pair:
    leaves_with_keys, shares_scale = target.tree_flatten_with_keys()
    names = [key.name for key, _ in leaves_with_keys]
    _check_names(Fp8Pair, names, state)
    leaves = [
        serialization.from_state_dict(leaf, state[name], name=name)
        for name, (_, leaf) in zip(names, leaves_with_keys, strict=True)
    ]
    return Fp8Pair.tree_unflatten(shares_scale, leaves)


register_serialization(Fp8Array, ["values", "scale"])
serialization.register_serialization_state(Fp8Pair, _pair_to_state_dict, _pair_from_state_dict)
