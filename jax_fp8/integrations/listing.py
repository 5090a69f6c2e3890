"""What an adapter says of a model: which of its products are in FP8, and which are left, each by its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Listing:
    """Products of a model by their paths; it prints as a list.

    Args:
      in_fp8: those that are in FP8.
      left: those that are not, each with the reason.

    Example:
      >>> from jax_fp8.integrations.listing import Listing
      >>> print(Listing(("mlp/up", "mlp/down"), {"head": "10 columns are no multiple of 16"}))
      in FP8: mlp/up, mlp/down
      left as it is: head (10 columns are no multiple of 16)
    """

    in_fp8: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        taken = ", ".join(self.in_fp8) or "nothing"
        others = ", ".join(f"{name} ({reason})" for name, reason in self.left.items())
        return "\n".join([f"in FP8: {taken}", *([f"left as it is: {others}"] if others else [])])


def why_not_sizes(contracted: int, columns: int) -> str | None:
    """The reason why a kernel with so many rows and columns cannot be in FP8, or None."""
    for size, side in ((contracted, "rows"), (columns, "columns")):
        if size % 16:
            return f"{size} {side} are no multiple of 16"
    return None
