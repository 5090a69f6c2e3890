"""The field `remat` of a GPT: what its layers keep for the backward, and where.

none                        keep all residuals on the device
norms                       `recompute=True`: the backward computes norms and casts again
full                        keep the input of each layer; the backward computes its whole forward again
offload:8                   8 layers keep their residuals in the host's memory; core/checkpoint_names.py lists these
offload:8:mlp_hidden,...    8 layers keep these residuals alone in the host's memory, all others on the device
"""

from dataclasses import dataclass

from jax_fp8.core.checkpoint_names import RESIDUAL_NAMES

KINDS = ("none", "norms", "full", "offload")


@dataclass(frozen=True)
class Remat:
    """What the layers of a model keep.

    Args:
      kind: one of KINDS.
      num_layers: of the model.
      count: the number of layers that offload residuals.
      names: of the residuals that they offload, among RESIDUAL_NAMES.
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

    def kind_for(self, index: int) -> str:
        """The kind, one of KINDS, for the layer with this number.

        Layers that offload are as far apart as possible, beginning with the first, so that copies have the time of the
        layers between. The backward would need residuals of the last layer before their copy had ended.
        """
        if self.kind == "offload" and index * self.count % self.num_layers >= self.count:
            return "none"
        return self.kind
