"""The shape of a GPT, for plan/arithmetic.py: numbers alone, without the model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a GPT, in elements.

    Args:
      mlp: width of the output of the MLP's activation function.
      vocab: size of the vocabulary.
      is_gated: whether the MLP has a gate.
      is_tied: whether the head shares the embedding's table.
      head_dim: features of one head; None means `width / heads`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    is_gated: bool = False
    is_tied: bool = True
    head_dim: int | None = None

    @property
    def query_width(self) -> int:
        return self.width if self.head_dim is None else self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.query_width * self.kv_heads // self.heads

    @property
    def of_layers(self) -> int:
        """Parameters of all layers' matrices."""
        attention = 2 * self.width * (self.query_width + self.kv_width)
        return self.layers * (attention + (3 if self.is_gated else 2) * self.width * self.mlp)

    @property
    def of_ranks(self) -> int:
        """Parameters of adapters of rank 1 on all layers' matrices: rows plus columns of each."""
        attention = 4 * self.width + 2 * (self.query_width + self.kv_width)
        return self.layers * (attention + (3 if self.is_gated else 2) * (self.width + self.mlp))

    @property
    def of_tables(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.is_tied else 2) * self.vocab * self.width
