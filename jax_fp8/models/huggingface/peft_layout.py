"""How adapters lie in a file of PEFT: the names of linear layers, and the matrices of those that hold several of ours.

Where a family has one matrix for several of our layers, such as the queries, keys and values of Phi-3, a file has one
adapter for them. Written, its first matrix has those of all layers one below the other, and its second one is
block-diagonal. Read, such blocks become the adapters of the layers again. Any other adapter of such a matrix becomes
one for each layer: with the whole first matrix, and the layer's rows of the second.
"""

import jax
import numpy as np

from jax_fp8.core.paths import LayerPath
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.huggingface.layouts import Entry, entries_of

PREFIX = "base_model.model."


def linear_entries(config: GPTConfig, family: str) -> list[Entry]:
    """The weights of all linear layers that can have an adapter; experts and routers cannot."""
    return [
        entry
        for entry in entries_of(config, family)
        if entry.paths[0][-1] == "kernel" and entry.expert is None and entry.paths[0][-2] != "router"
    ]


def module_of(entry: Entry) -> str:
    """The name of a linear layer in PyTorch."""
    return entry.name.removesuffix(".weight")


def suffix_of(entry: Entry) -> str:
    """The end of that name, which is the same in all layers of a model and names no other linear layer of one."""
    return ".".join(module_of(entry).split(".")[-2:])


def layers_of(entry: Entry) -> list[str]:
    """The names of our layers that a tensor has the kernels of."""
    return [path[-2] for path in entry.paths]


def tensor_names(entry: Entry) -> tuple[str, str]:
    """Of both matrices in a file."""
    return f"{PREFIX}{module_of(entry)}.lora_A.weight", f"{PREFIX}{module_of(entry)}.lora_B.weight"


def split_pair(entry: Entry, a: np.ndarray, b: np.ndarray, rank: int) -> dict[LayerPath, tuple[np.ndarray, np.ndarray]]:
    """The adapters (in, rank) and (rank, features) of our layers, from that of the tensor that has their kernels.

    `rank`: of adapters of one layer.
    """
    parts, paths = entry.params_of(b.T if entry.is_transposed else b), [path[:-1] for path in entry.paths]
    blocks = [slice(index * rank, (index + 1) * rank) for index in range(len(paths))]
    is_joined = len(paths) > 1 and a.shape[1] == len(paths) * rank
    if is_joined and not any(np.delete(part, own, axis=0).any() for part, own in zip(parts, blocks, strict=True)):
        cut = {path: (a[:, own], part[own]) for path, part, own in zip(paths, parts, blocks, strict=True)}
        return {path: pair for path, pair in cut.items() if pair[0].any()}  # zeros take the place of no adapter
    return {path: (a, part) for path, part in zip(paths, parts, strict=True)}


def side_by_side(pairs: list[tuple[jax.Array, jax.Array]]) -> np.ndarray:
    return np.concatenate([np.asarray(a) for a, _ in pairs], axis=1)


def block_diagonal(pairs: list[tuple[jax.Array, jax.Array]]) -> np.ndarray:
    blocks = [np.asarray(b) for _, b in pairs]
    rows, columns = (sum(sizes) for sizes in zip(*(block.shape for block in blocks), strict=True))
    whole = np.zeros((rows, columns), np.result_type(*blocks))
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole
