"""NVIDIA's peak figures of its GPUs: operations a second of dense matrix products, without sparsity.

    jax's name of a device ─peak_of→ Peak; operations a second ÷ peak → utilization

No program reaches these figures; plan/rates.py has measured rates.
"""

from typing import NamedTuple


class Peak(NamedTuple):
    """Operations a second of matrix products in bfloat16 and in FP8."""

    bf16: float
    fp8: float


SXM = Peak(989e12, 1979e12)
NVL = Peak(835e12, 1671e12)

# By `device.device_kind`. https://www.nvidia.com/en-us/data-center/h100/, /h200/, and /grace-hopper-superchip/.
PEAKS = {
    "NVIDIA H100 80GB HBM3": SXM,
    "NVIDIA H100 NVL": NVL,
    "NVIDIA H100 PCIe": Peak(756e12, 1513e12),
    "NVIDIA H200": SXM,
    "NVIDIA H200 NVL": NVL,
    "NVIDIA GH200 480GB": SXM,
    "NVIDIA GH200 144G HBM3e": SXM,
}


def peak_of(device_kind: str) -> Peak | None:
    """The peak of a device; None for one that the table does not have: a CPU, or another GPU."""
    return PEAKS.get(device_kind)
