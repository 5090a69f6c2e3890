"""Paths of layers: the names that lead to a module in its model, and to its variables in every collection.

A GEMM may multiply by several kernels side by side, each a layer of its own: queries, keys and values are one product
of the same input. The name of the GEMM joins the names of the layers: the GEMM `attention/query+key+value` has the
kernels `attention/query/kernel`, `attention/key/kernel` and `attention/value/kernel`, in this order.

The name of a GEMM of experts begins with "+": `mlp/+gate+up` has the kernels `mlp/gate/kernel` and `mlp/up/kernel`,
each (experts, k, n). A name that begins with "~" leads to no kernel: a layer has passed the kernel as an array, or the
GEMM is one of attention. Code that needs the kernels of GEMMs (a weight cache, gradient accumulation inside GEMMs)
leaves such GEMMs out.

So the name of a layer with a kernel of its own must not contain "+" or begin with "~", and a module with FP8 layers
must not have the name of an array in the collections "fp8" and "fp8_cache".
"""

from collections.abc import Callable, Mapping

import jax
from jax.tree_util import KeyPath

from jax_fp8.core.types import PyTree

LayerPath = tuple[str, ...]  # as in `nn.Module.path`
BESIDE = "+"
WITHOUT_KERNEL = "~"


def joined_name(names: tuple[str, ...]) -> str:
    """The name of the GEMM of these layers."""
    return BESIDE.join(names)


def experts_name(names: tuple[str, ...]) -> str:
    """The name of the GEMM of these layers, each of which has a kernel for every expert."""
    return BESIDE + joined_name(names)


def is_of_experts(gemm: LayerPath) -> bool:
    """Whether the kernels of a GEMM are those of experts."""
    return bool(gemm) and gemm[-1].startswith(BESIDE)


def kernelless_name(name: str) -> str:
    """The name of a GEMM that multiplies by no layer's kernel."""
    return WITHOUT_KERNEL + name


UNNAMED = kernelless_name("product")
CORRECTION_BIAS = "correction_bias"  # the last name of a router's bias, which no gradient trains (optim/balance.py)
AMAX_HISTORY = "amax_history"  # a node of the FP8 state with this entry is the state of a GEMM
OF_CACHE = VERSION, CAST_BY = "params_version", "cast_by"  # entries beside the names of layers in a weight cache


def check_layer_name(path: LayerPath) -> None:
    """Raise where the name of a layer, the last of its path, would be read as the name of a GEMM with other kernels."""
    if path and (BESIDE in path[-1] or path[-1].startswith(WITHOUT_KERNEL)):
        raise ValueError(
            f'the name of an FP8 layer must not hold "{BESIDE}", which joins names of kernels in the FP8 state, nor '
            f'begin with "{WITHOUT_KERNEL}", got {"/".join(path)}; give the layer another name'
        )


def check_gemm_path(path: LayerPath) -> None:
    """Raise where a module around a GEMM has the name of an array in the collections of FP8."""
    reserved = [name for name in path if name == AMAX_HISTORY] + [name for name in path[:1] if name in OF_CACHE]
    if reserved:
        raise ValueError(
            f'a module with FP8 layers must not be called "{reserved[0]}", which is an array in their collections, got '
            f"{'/'.join(path)}; give the module another name"
        )


def shown(gemm: LayerPath) -> LayerPath:
    """The path of a GEMM as messages show it: without the "+" in front that says experts."""
    return (*gemm[:-1], gemm[-1].removeprefix(BESIDE)) if is_of_experts(gemm) else gemm


def kernel_paths(gemm: LayerPath) -> tuple[LayerPath, ...]:
    """The paths of a GEMM's kernels, from left to right; () where no path leads to them."""
    if not gemm:
        return (("kernel",),)
    *parents, name = gemm
    if name.startswith(WITHOUT_KERNEL):
        return ()
    return tuple((*parents, layer, "kernel") for layer in name.removeprefix(BESIDE).split(BESIDE))


def at_path(tree: PyTree, path: LayerPath) -> PyTree:
    """The node of nested dicts at this path, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def put_at_path(tree: dict[str, PyTree], path: LayerPath, node: Mapping[str, PyTree]) -> None:
    """Add the entries of a node at this path of nested dicts; dicts on the way that are missing are made."""
    for name in path:
        tree = tree.setdefault(name, {})
    tree.update(node)


def map_with_names(
    fn: Callable[..., PyTree], tree: PyTree, *others: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> PyTree:
    """`jax.tree.map` over nested dicts; `fn` takes the names that lead to a leaf first."""

    def call(path: KeyPath, *leaves: PyTree) -> PyTree:
        return fn(names_of(path), *leaves)

    return jax.tree_util.tree_map_with_path(call, tree, *others, is_leaf=is_leaf)


def names_of(path: KeyPath) -> LayerPath:
    """The names of a jax key path. A key that is not one of a dict becomes None, which equals no name."""
    return tuple(getattr(key, "key", None) for key in path)  # type: ignore[return-value]
