"""What the layers of a model keep for the backward, as a user says it.

none                        all that the backward wants
norms                       `recompute=True`: what it wants of norms and casts is made again
full                        what enters a layer; all of its forward is computed again
offload:8                   all, but of 8 layers in the host's memory; core/checkpoint_names.py says what
offload:8:mlp_hidden,...    of 8 layers these alone in the host's memory, all else on the device
"""

from dataclasses import dataclass

from jax_fp8.core.checkpoint_names import RESIDUAL_NAMES

KINDS = ("none", "norms", "full", "offload")


@dataclass(frozen=True)
class Remat:
    """Of a model with so many layers.

    Args:
      kind: one of KINDS.
      count: layers of which something is offloaded.
      names: of what is offloaded, among RESIDUAL_NAMES.
    """

    kind: str
    num_layers: int
    count: int = 0
    names: tuple[str, ...] = RESIDUAL_NAMES

    @classmethod
    def parse(cls, text: str, num_layers: int) -> "Remat":
        kind, *others = text.split(":") if isinstance(text, str) else [""]
        if kind in KINDS and kind != "offload" and not others:
            return cls(kind, num_layers)
        number, names = others[0] if others else "", others[1].split(",") if len(others) == 2 else RESIDUAL_NAMES
        is_count = number.isdecimal() and int(number) <= num_layers
        if kind != "offload" or len(others) not in (1, 2) or not is_count or not {*names} <= {*RESIDUAL_NAMES}:
            raise ValueError(
                f"remat must be none, norms, full, offload:N with N of {num_layers} layers, or offload:N:NAMES with "
                f"some of {','.join(RESIDUAL_NAMES)}, got {text!r}; choose one of these"
            )
        return cls(kind, num_layers, int(number), tuple(names))

    def of_layer(self, index: int) -> str:
        """One of KINDS.

        Layers that are offloaded stand as far apart as possible, beginning with the first, so that copies have the time
        of those between. The last one would be wanted again before it has left.
        """
        if self.kind == "offload" and index * self.count % self.num_layers >= self.count:
            return "none"
        return self.kind
