"""The shape of a GPT as arithmetic knows it: numbers alone, without the model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a GPT, in elements; `mlp` is the width of its activation's result; `head_dim` None is `width / heads`."""

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
    def of_tables(self) -> int:
        """Parameters of embedding and head."""
        return (1 if self.is_tied else 2) * self.vocab * self.width
