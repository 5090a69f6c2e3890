"""Names for the trees of arrays that flow through the library, for annotations.

jax types a tree of arrays as `Any`, and so does this module; the names say what a signature takes.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Nested containers with leaves of one kind, arrays unless the name of the argument says otherwise."""

TreeDef: TypeAlias = Any
"""The structure of a tree, a `jax.tree_util.PyTreeDef`, which type checkers cannot name."""

Variables: TypeAlias = Mapping[str, PyTree]
"""Flax's collections by name: `{"params": ..., "fp8": ...}`."""

Batch: TypeAlias = PyTree
"""What a loss takes beside the variables. Each leaf's first dim is that of the samples."""
