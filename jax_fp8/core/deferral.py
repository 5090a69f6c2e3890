"""Weight gradients for later: where a backward pass leaves the operands of a wgrad GEMM instead of running it.

    dw[k, n] = xᵀ[k, m] · dyᵀ[n, m]ᵀ      xᵀ and dyᵀ are kept in FP8, with their scales

How often a GEMM is called, and with how many rows, is known only when the whole pass has been traced: a layer may be
shared, scanned over or rematerialised. So the pass is traced twice. In the first trace an `OperandSearch` takes notes,
and marks each call in the program, where a walk over it counts them (grads/wgrad_calls.py). In the second one
`OperandStores` write. Which place is free is counted while the pass runs, so nothing depends on the order of calls.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_fp8.core.fp8_array import Fp8Array


@dataclass(frozen=True)
class FoundOperands:
    """The operands of calls of one GEMM that look alike.

    Args:
      gemm: its number.
      name: of the layer, in profiles.
      accumulation: of its wgrad.
      types: as jax has them, of the values and the scale of xᵀ (k, m) and of dyᵀ (n, m).
      has_slot: the layer is one of several that are stacked.
    """

    gemm: int
    name: str
    accumulation: str
    types: tuple[Any, Any, Any, Any]
    has_slot: bool

    @property
    def shapes(self) -> tuple:
        return shapes_of(self.types)


class Notes:
    """What a search has found, each once. Two are equal only when they are the same one."""

    def __init__(self):
        self.found: list[FoundOperands] = []

    def number(self, operands: FoundOperands) -> int:
        """Of these operands, noted now if they are new."""
        if operands not in self.found:
            self.found.append(operands)
        return self.found.index(operands)


def call_mark(number: int) -> str:
    """The name under which a call that keeps the operands of this number stands in a program."""
    return f"jax_fp8 wgrad {number}"


def shapes_of(leaves: Any) -> tuple:
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandSearch:
    """Notes what a GEMM would keep, and leaves a mark in the program.

    Args:
      mark: of i32[]; written at each call, or the mark would be dead code.
      gemm: the number of the GEMM; static.
      notes: static.
    """

    mark: jax.Ref
    gemm: int = field(metadata={"static": True})
    notes: Notes = field(metadata={"static": True})

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: jax.Array | None, name: str, accumulation: str) -> None:
        types: Any = tuple(jax.typeof(leaf) for leaf in (x.values, x.scale, dy.values, dy.scale))
        number = self.notes.number(FoundOperands(self.gemm, name, accumulation, types, slot is not None))
        self.mark[...] = checkpoint_name(self.mark[...] + 1, call_mark(number))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandStore:
    """Room for the operands of calls that look alike.

    Args:
      refs: of values and scale of xᵀ (..., k, m), and of dyᵀ (..., n, m). Leading dims: the layers, if they are
        stacked, and the calls, if there are several.
      count: of i32[], or i32[layers]: the calls so far; None for one call.
      shapes: of what one call keeps, and the dtypes; static.
    """

    refs: tuple[jax.Ref, ...]
    count: jax.Ref | None
    shapes: tuple = field(metadata={"static": True})

    def write(self, operands: tuple, slot: jax.Array | None) -> None:
        at: tuple = () if slot is None else (slot,)
        place = at
        if self.count is not None:
            call = self.count[at or ...]
            self.count[at or ...] = call + 1
            place = (*at, call)
        for ref, operand in zip(self.refs, operands, strict=True):
            ref[place or ...] = operand


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OperandStores:
    """Those of one GEMM, whose calls need not look alike."""

    stores: tuple[OperandStore, ...]

    def keep(self, x: Fp8Array, dy: Fp8Array, slot: jax.Array | None, name: str, accumulation: str) -> None:
        """Write xᵀ (k, m) and dyᵀ (n, m) to where there is room for them."""
        operands = x.values, x.scale, dy.values, dy.scale
        (store,) = (store for store in self.stores if store.shapes == shapes_of(operands))
        store.write(operands, slot)
