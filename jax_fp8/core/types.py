"""Names for the trees of arrays that flow through the library, for annotations.

jax types a tree of arrays as `Any`, and so does this module; the names say what a signature takes.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import jax

PyTree: TypeAlias = Any
"""Nested containers with leaves of one kind, arrays unless the name of the argument says otherwise."""

TreeDef: TypeAlias = Any
"""The structure of a tree, a `jax.tree_util.PyTreeDef`, which type checkers cannot name."""

Variables: TypeAlias = Mapping[str, PyTree]
"""Flax's collections by name: `{"params": ..., "fp8": ...}`."""

Batch: TypeAlias = PyTree
"""What a loss takes beside the variables. Each leaf's first dim is that of the samples."""


class RandomLoss(Protocol):
    """A loss that draws, such as dropout's masks; `rngs` are its keys by name."""

    def __call__(self, variables: Variables, batch: Batch, /, *, rngs: Mapping[str, jax.Array]) -> PyTree: ...
