"""The logs of a run as TensorBoard shows them: `--tensorboard` → `runs/<name>/tensorboard/<run>`.

Each row of metrics.jsonl is a few curves, and so is each row of diagnostics.jsonl, of which the worst tensor of each
kind and the norm of every layer's gradients are shown. TensorBoard leaves out what an interrupted run wrote after its
last checkpoint.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

OF_METRICS = ("loss", "val_loss", "tokens_per_second", "model_tflops", "bf16_utilization", "fp8_utilization",
              "peak_memory_gib")  # fmt: skip
WORST = {"saturated": max, "underflowed": max, "nonfinite": max, "error": max, "headroom": min}


def check() -> None:
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError("--tensorboard needs tensorboardX, which is not installed; pip install tensorboardX")


class Scalars:
    """Curves of one training run; without a folder there are none.

    Args:
      after: the step after which a run goes on.
    """

    def __init__(self, folder: Path | None, after: int = 0):
        self._writer: Any = None
        if folder is not None:
            # Asked for here: who does not want curves does not need the library.
            library = importlib.import_module("tensorboardX")
            self._writer = library.SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def add_metrics(self, step: int, row: dict[str, Any]) -> None:
        self._add({name: row[name] for name in OF_METRICS}, step)

    def add_diagnostics(self, step: int, row: dict[str, Any]) -> None:
        found = {f"gradient_norm/{of['layer']}": of["norm"] for of in row["gradients"]}
        for kind in dict.fromkeys(of["tensor"] for of in row["tensors"]):
            for name, worst in WORST.items():
                values = [of[name] for of in row["tensors"] if of["tensor"] == kind and of[name] is not None]
                found[f"{name}/{kind}"] = worst(values, default=None)
        self._add(found, step)

    def flush(self) -> None:
        """On the disk, when this returns."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, numbers, step):
        for name, number in numbers.items():
            if self._writer is not None and number is not None:
                self._writer.add_scalar(name, number, step)
