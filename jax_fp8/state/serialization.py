"""`flax.serialization` of what is not a dict or an array:
`to_bytes`, `to_state_dict` and their inverses know FP8 arrays and states.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import serialization

from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair


def register_serialization(cls: type, names: Sequence[str], may_be_empty: Sequence[str] = ()) -> None:
    """A dataclass is a state dict of these attributes; what is static of it comes from the target. Those of
    `may_be_empty` are left out where they are.
    """

    def saved(value) -> list[str]:
        return [name for name in names if name not in may_be_empty or getattr(value, name)]

    def to_state_dict(value) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(value, name)) for name in saved(value)}

    def from_state_dict(target, state):
        _check(cls, saved(target), state)
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name) for name in state
        }
        return dataclasses.replace(target, **restored)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


def _check(cls, names, state):
    if set(state) != set(names):
        raise ValueError(
            f"a saved {cls.__name__} must hold {sorted(names)}, got {sorted(state)}; restore it into its like"
        )


def _pair_to_state_dict(pair: Fp8Pair) -> dict[str, Any]:
    return {name: serialization.to_state_dict(leaf) for name, leaf in _named_leaves(pair)}


def _pair_from_state_dict(target: Fp8Pair, state: dict[str, Any]) -> Fp8Pair:
    named, shared = target.tree_flatten_with_keys()
    names = [key.name for key, _ in named]
    _check(Fp8Pair, names, state)
    leaves = [
        serialization.from_state_dict(leaf, state[name], name=name)
        for name, (_, leaf) in zip(names, named, strict=True)
    ]
    return Fp8Pair.tree_unflatten(shared, leaves)


def _named_leaves(pair) -> list[tuple[str, Any]]:
    return [(key.name, leaf) for key, leaf in pair.tree_flatten_with_keys()[0]]


register_serialization(Fp8Array, ["values", "scale"])
serialization.register_serialization_state(Fp8Pair, _pair_to_state_dict, _pair_from_state_dict)
