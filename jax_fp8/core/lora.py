"""`Lora`: which linear layers have adapters, as one value. ops/adapters.py computes them."""

from dataclasses import dataclass

from jax.nn import initializers

from jax_fp8.core.checks import check_integer, check_number, describe

LORA_A, LORA_B = "lora_a", "lora_b"  # the params of an adapter, (in, rank) and (rank, features)
# Their initializers: `a` is uniform up to 1 / sqrt(in), as in PEFT, and a new adapter adds nothing.
FIRST_MATRIX, SECOND_MATRIX = initializers.variance_scaling(1 / 3, "fan_in", "uniform"), initializers.zeros


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which linear layers have adapters, and of which size.

    Args:
      rank: of the product of both matrices.
      alpha: the adapter is multiplied by `alpha / rank`; None is `rank`.
      targets: names of layers with adapters, such as ("query", "value"); None is every linear layer.

    Raises:
      ValueError: if `rank` is no positive integer, `alpha` no positive number, or `targets` no tuple of names.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer = fp8.Dense(32, lora=fp8.Lora(rank=4, alpha=8))
      >>> params = layer.init(jax.random.key(0), jnp.ones((16, 16)))["params"]
      >>> params["lora_a"].shape, params["lora_b"].shape
      ((16, 4), (4, 32))
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] | None = None

    def __post_init__(self):
        check_integer("rank", self.rank)
        if self.alpha is not None:
            check_number("alpha", self.alpha, "that is positive", lambda alpha: alpha > 0)
        targets = self.targets
        if targets is not None and (not isinstance(targets, tuple) or not all(isinstance(n, str) for n in targets)):
            raise ValueError(f'targets must be a tuple of names of layers, such as ("query", "value"), got {targets!r}')

    @property
    def scaling(self) -> float:
        """What the product is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def is_for(self, layer: str) -> bool:
        """Whether a layer of this name has an adapter."""
        return self.targets is None or layer in self.targets


def check_lora(layer: str, lora: object) -> None:
    """Raise unless this is a `Lora` or None."""
    if lora is not None and not isinstance(lora, Lora):
        raise ValueError(f"{layer}: lora must be a Lora or None, got {describe(lora)}; pass fp8.Lora(rank=16)")
