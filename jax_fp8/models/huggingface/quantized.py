"""Checkpoints in FP8 with a scale for each square of a weight, as of DeepSeek-V3 and Qwen3-FP8.

    file        X.weight f8e4m3[out, in]    X.weight_scale_inv f32[out / 128, in / 128], rounded up
    tensor      weight * scale of its square                (the name says inverse; it is what values are multiplied by)

Linear maps of layers are in FP8; embeddings, head, norms, biases and routers keep their dtype. The numbers are what
`BlockScaling` gives a weight, so training by it starts from the values of the file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.files import shortened, shown
from jax_fp8.models.huggingface.layouts import Entry
from jax_fp8.models.tensor_file import Tensor

FIELD = "quantization_config"
SCALE = "_scale_inv"
VALUES = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0  # of E4M3
BLOCK = 128
WRITTEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
# What may stand there: the values of a field, or None where any value has no effect on weights.
ALLOWED = {"quant_method": ("fp8",), "fmt": ("e4m3",), "activation_scheme": None, "modules_to_not_convert": None}


def block_of(described: Mapping[str, object], where: str) -> tuple[int, int] | None:
    """The rows and columns that share a scale, from a config.json; None where its weights are not quantized."""
    quantization = described.get(FIELD)
    if quantization is None:
        return None
    if isinstance(quantization, dict) and quantization.get("quant_method") == "fp8":
        others = {name: value for name, value in quantization.items() if name != "weight_block_size"}
        block = quantization.get("weight_block_size")
        if _is_block(block) and all(_is_allowed(name, value) for name, value in others.items()):
            rows, columns = block
            return rows, columns
    raise ValueError(
        f'{FIELD} in {where} must be None, or of quant_method "fp8" with fmt "e4m3" and a weight_block_size such as '
        f"[128, 128], got {shown(quantization, 300)}; no other can be converted"
    )


def _is_block(block: object) -> TypeGuard[list[int]]:
    return isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def _is_allowed(name: str, value: object) -> bool:
    return name in ALLOWED and (ALLOWED[name] is None or value in ALLOWED[name])


def dequantized(
    tensors: Mapping[str, np.ndarray], block: tuple[int, int], where: str, dtype: jax.typing.DTypeLike
) -> dict[str, np.ndarray]:
    """The tensors of a file, those in FP8 multiplied by their scales in float32 and rounded to `dtype`."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name in set(tensors) - set(found):
        of, scale = name.removesuffix(SCALE), tensors[name]
        values = found.get(of)
        squares = (
            () if values is None else tuple(-(-size // part) for size, part in zip(values.shape, block, strict=False))
        )
        if values is None or values.dtype != VALUES or values.ndim != 2 or scale.shape != squares:
            arrived = "no such tensor" if values is None else f"{values.dtype.name}{list(values.shape)}"
            raise ValueError(
                f"{shortened(name)} in {where} must have a scale for each square of {block[0]} x {block[1]} of a "
                f"matrix in float8_e4m3fn, got {list(scale.shape)} for {arrived}; copy it again"
            )
        if scale.dtype.name not in ("float32", "bfloat16"):
            raise ValueError(f"{shortened(name)} in {where} must be of float32 or bfloat16, got {scale.dtype}")
        found[of] = _multiplied(values, scale.astype(np.float32), block).astype(dtype)
    return found


def _multiplied(values: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    whole = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
    return values.astype(np.float32) * whole[: values.shape[0], : values.shape[1]]


def quantized(tensor: Tensor, entry: Entry) -> dict[str, Tensor]:
    """What a file has for a tensor: the tensor itself, or for a linear layer its values in FP8 and its scales."""
    if entry.paths[0][-1] != "kernel" or "router" in entry.paths[0]:
        return {entry.name: tensor}
    rows, columns = tensor.shape
    values = replace(tensor, dtype=VALUES, make=lambda: _quantize(tensor.make())[0])
    squares = (-(-rows // BLOCK), -(-columns // BLOCK))
    scale = Tensor(squares, np.dtype(np.float32), lambda: _quantize(tensor.make())[1])
    return {entry.name: values, f"{entry.name}{SCALE}": scale}


def _quantize(weight: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values in FP8 and scales of a matrix: the largest number of each square becomes 448."""
    weight = np.asarray(weight).astype(np.float32)
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    squares = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = np.abs(squares).max(axis=(1, 3))
    scale = np.where(amax > 0, amax / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    values = (squares / scale[:, None, :, None]).clip(-LARGEST, LARGEST).reshape(padded.shape)
    return values[:rows, :columns].astype(VALUES), scale
