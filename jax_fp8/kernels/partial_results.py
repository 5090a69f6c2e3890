"""Results that a device makes in part, though no operand is split that way: some columns of a product, say."""

from dataclasses import dataclass
from typing import Any

from jax_fp8.kernels.explicit import Split, divides


@dataclass(frozen=True)
class PartialResult:
    """A dim that only results have, some columns of a matrix, say. The operation gathers what they are made of,
    and each device makes those that it is to have.

    Args:
      dim: of the results.
      of: the dim of the operands that it is a part of.
      size: elements of it.
      axes: of an Explicit mesh, by which it is to be split. On an Auto mesh the compiler says so.
    """

    dim: str
    of: str
    size: int
    axes: tuple[str, ...] = ()

    def can_be(self, mesh: Any, axes: tuple[str, ...], split: Split) -> bool:
        """Whether these axes can split it: into multiples of 16, as GEMMs want them, and no other dim."""
        used = {axis for dim, others in split.items() if dim != self.of for axis in others}
        return bool(axes) and not used & set(axes) and self.size % 16 == 0 and divides(mesh, axes, self.size // 16)
