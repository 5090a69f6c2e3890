"""Results of which each device computes a part, though no operand is split that way: some columns of a product."""

from dataclasses import dataclass

from jax_fp8.kernels.explicit import AnyMesh, Split, divides


@dataclass(frozen=True)
class PartialResult:
    """A dim that only results have, such as some columns of a matrix. The operation gathers the operands along that
    dim, and each device computes its own part of the result.

    Args:
      dim: of the results.
      of: the dim of the operands that it is a part of.
      size: its number of elements.
      axes: the axes of an Explicit mesh that split it. On an Auto mesh the compiler chooses them.
    """

    dim: str
    of: str
    size: int
    axes: tuple[str, ...] = ()

    def can_be(self, mesh: AnyMesh, axes: tuple[str, ...], split: Split) -> bool:
        """Whether these axes can split it: they split no other dim, and parts are multiples of 16, as GEMMs need."""
        used = {axis for dim, others in split.items() if dim != self.of for axis in others}
        return bool(axes) and not used & set(axes) and self.size % 16 == 0 and divides(mesh, axes, self.size // 16)
