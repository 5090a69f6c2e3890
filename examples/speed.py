"""How fast a run is, in words that other runs understand: model FLOPs, their share of what the GPU could do, memory.

    tokens a second ─operations of a token, devices→ model TFLOP/s of a device ─peak of the GPU→ utilization

Model FLOPs are those of the model's products, forward and backward, whether a step computes some of them again or not.
Their share of the peak in bfloat16 is what is called MFU elsewhere. In FP8 it may exceed 1, so the share of the peak in
FP8 stands beside it.
"""

from typing import NamedTuple

import jax

import jax_fp8 as fp8
from jax_fp8.gpt_plans import operations_of_a_token
from jax_fp8.tools.peaks import Peak, peak_of

NOTHING = {"model_tflops": None, "bf16_utilization": None, "fp8_utilization": None}


class Speed(NamedTuple):
    """What turns tokens a second into figures of one device.

    Args:
      operations: model FLOPs that training on a token needs.
      devices: that share the work.
      peak: of one of them; None where it is not known.
      device: of this process, whose memory is looked at.
    """

    operations: float
    devices: int
    peak: Peak | None
    device: jax.Device

    @classmethod
    def of(cls, model: fp8.GPTConfig, mesh: jax.sharding.Mesh) -> "Speed":
        device = mesh.local_devices[0]
        return cls(operations_of_a_token(model), mesh.size, peak_of(device.device_kind), device)

    def figures(self, tokens_per_second: float | None) -> dict[str, float | None]:
        """As a row of the log has them; None where nothing is known."""
        return self._of_products(tokens_per_second) | {"peak_memory_gib": self._peak_memory()}

    def _of_products(self, tokens_per_second):
        if tokens_per_second is None:
            return NOTHING
        rate = tokens_per_second * self.operations / self.devices
        found = NOTHING | {"model_tflops": float(f"{rate / 1e12:.4g}")}
        if self.peak is not None:
            found |= {"bf16_utilization": round(rate / self.peak.bf16, 4)}
            found |= {"fp8_utilization": round(rate / self.peak.fp8, 4)}
        return found

    def _peak_memory(self) -> float | None:
        """GiB; a CPU has no such statistics."""
        most = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        return None if most is None else round(most / 2**30, 2)
