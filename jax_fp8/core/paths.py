"""Layers by their path: the names that lead to a module in its model, and to its variables in every collection."""

from collections.abc import Mapping
from typing import Any

LayerPath = tuple[str, ...]  # as in `nn.Module.path`


def at_path(tree: Any, path: tuple) -> Any:
    """The node of nested dicts that these names lead to, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def put_at_path(tree: dict, path: tuple, node: Mapping) -> None:
    """Add what a node holds to the one that these names lead to, in a tree that is being made."""
    for name in path:
        tree = tree.setdefault(name, {})
    tree.update(node)
