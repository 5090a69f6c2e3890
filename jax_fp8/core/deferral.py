"""Delayed weight gradients: where a backward pass leaves the operands of a wgrad GEMM instead of running it.

    dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      xᵀ and dyᵀ are kept in FP8, with their scales

How often a GEMM is called, and with how many rows, is known only when the whole pass has been traced: a layer may be
shared, scanned over or rematerialised. So the pass is traced twice. In the first trace an `OperandSearch` notes the
operands and marks each call in the program, and grads/wgrad_calls.py counts the marks. In the second trace
`OperandStores` write the operands to Refs. A counter beside each Ref finds the next free element while the pass runs,
so nothing depends on the order of calls.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray

from jax_fp8.core.fp8_array import Fp8Array

Shapes = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of each array that one call keeps


class HasShape(Protocol):
    """An array, or the type of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


@dataclass(frozen=True)
class FoundOperands:
    """The operands that some calls of one GEMM keep, all of the same types.

    Args:
      gemm: the number of the GEMM.
      name: the name of its layer, for profiles.
      accumulation: how its wgrad accumulates.
      types: jax's types of the values and the scale of xᵀ (k, m) and of dyᵀ (n, m).
      has_slot: whether the layer is one of several that are stacked.
    """

    gemm: int
    name: str
    accumulation: str
    types: tuple[ShapedArray, ShapedArray, ShapedArray, ShapedArray]
    has_slot: bool

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.types)


class Deferral(Protocol):
    """Takes the operands xᵀ (k, m) and dyᵀ (n, m) of a wgrad GEMM, which the backward then does not run."""

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: jax.Array | None, name: str, accumulation: str) -> None: ...


class Notes:
    """The operands that a search has found, each once. Notes are equal only to themselves, so they can be static."""

    def __init__(self):
        self.found: list[FoundOperands] = []

    def number(self, operands: FoundOperands) -> int:
        """The number of these operands, noted now if they are new."""
        if operands not in self.found:
            self.found.append(operands)
        return self.found.index(operands)


def call_mark(number: int) -> str:
    """The name in a program of a call that keeps the operands of this number."""
    return f"jax_fp8 wgrad {number}"


def shapes_of(leaves: Iterable[HasShape]) -> Shapes:
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandSearch:
    """Notes the operands that a GEMM would keep, and leaves a mark in the program.

    Args:
      mark: Ref of i32[]. Each call writes to it: without this effect, the mark would be dead code.
      gemm: the number of the GEMM; static.
      notes: static.
    """

    mark: jax.Ref
    gemm: int = field(metadata={"static": True})
    notes: Notes = field(metadata={"static": True})

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: jax.Array | None, name: str, accumulation: str) -> None:
        types = jax.typeof(x.values), jax.typeof(x.scale), jax.typeof(dy.values), jax.typeof(dy.scale)
        number = self.notes.number(FoundOperands(self.gemm, name, accumulation, types, slot is not None))
        self.mark[...] = checkpoint_name(self.mark[...] + 1, call_mark(number))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandStore:
    """Memory for the operands of calls whose operands have the same types.

    Args:
      refs: Refs of values and scale of xᵀ (..., k, m), and of dyᵀ (..., n, m). Leading dims: the layers, if they are
        stacked, and the calls, if there are several.
      count: Ref of i32[], or i32[layers]: the number of calls so far; None where there is one call only.
      shapes: the shapes and dtypes of one call's operands; static.
    """

    refs: tuple[jax.Ref, ...]
    count: jax.Ref | None
    shapes: Shapes = field(metadata={"static": True})

    def write(self, operands: tuple[jax.Array, ...], slot: jax.Array | None) -> None:
        layer = () if slot is None else (slot,)
        index = layer
        if self.count is not None:
            call = self.count[layer or ...]
            self.count[layer or ...] = call + 1
            index = (*layer, call)
        for ref, operand in zip(self.refs, operands, strict=True):
            ref[index or ...] = operand


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandStores:
    """The stores of one GEMM: one for each set of operand types among its calls."""

    stores: tuple[OperandStore, ...]

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: jax.Array | None, name: str, accumulation: str) -> None:
        """Write xᵀ (k, m) and dyᵀ (n, m) to the store of their types."""
        operands = x.values, x.scale, dy.values, dy.scale
        (store,) = (store for store in self.stores if store.shapes == shapes_of(operands))
        store.write(operands, slot)
