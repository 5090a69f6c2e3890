"""Synthetic runs: folders with the files of a run, healthy except for the faults that a test plants.

    healthy(layers, steps) ─plant→ Log ─write→ runs/x/

A healthy log looks like delayed scaling: amaxes drift and fluctuate, the scale follows the largest amax so far, a few
elements in a million saturate at a new amax, and errors are those of rounding.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GEMMS = ("attention/query+key+value", "attention/out", "mlp/gate+up", "mlp/down")
TENSORS = ("input", "kernel", "output_gradient")
LARGEST = {"input": 448.0, "kernel": 448.0, "output_gradient": 57344.0}
ROUNDING = {"input": 0.026, "kernel": 0.026, "output_gradient": 0.052}


@dataclass
class Log:
    """The rows of a run's files; tests change them and `write` them."""

    config: dict[str, Any]
    metrics: list[dict]
    diagnostics: list[dict]
    events: list[dict]

    def tensor(self, column: int, layer: str, tensor: str) -> dict[str, Any]:
        """The entry of a tensor in the diagnosed step of this column, which the caller may change."""
        return next(
            entry
            for entry in self.diagnostics[column]["tensors"]
            if entry["layer"] == layer and entry["tensor"] == tensor
        )

    def gradient(self, column: int, layer: str) -> dict[str, Any]:
        return next(entry for entry in self.diagnostics[column]["gradients"] if entry["layer"] == layer)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        for name in ("metrics", "diagnostics", "events"):
            rows = getattr(self, name)
            if rows:
                (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def healthy(layers: int = 2, count: int = 40, every: int = 10, run: str = "delayed", seed: int = 0) -> Log:
    """A healthy run of `count` diagnosed steps, one in `every`."""
    generator = np.random.default_rng(seed)
    steps = every * np.arange(1, count + 1)
    losses = 2.9 + 6 / (1 + steps / (every * 8)) + 0.02 * generator.standard_normal(count)
    names = [f"h_{layer}/{gemm}" for layer in range(layers) for gemm in GEMMS]
    tensors = {(name, tensor): _tensor(generator, tensor, count) for name in names for tensor in TENSORS}
    norms = {name: 0.2 * np.exp(0.25 * generator.standard_normal(count)) for name in ("embedding", *names, "norm")}
    diagnostics = [
        {
            "run": run,
            "step": int(step),
            "loss": float(losses[column]),
            "tensors": [
                {"layer": layer, "tensor": tensor} | {key: float(values[column]) for key, values in found.items()}
                for (layer, tensor), found in tensors.items()
            ],
            "gradients": [
                {"layer": layer, "norm": float(norm[column]), "nonfinite": 0} for layer, norm in norms.items()
            ],
        }
        for column, step in enumerate(steps)
    ]
    metrics = [_metrics_row(run, 0, None, float(losses[0]) + 1)]
    metrics += [
        _metrics_row(run, int(step), float(losses[column]), float(losses[column]) + 0.05 if column % 5 == 4 else None)
        for column, step in enumerate(steps)
    ]
    settings = {"preset": "tiny", "recipe": "delayed", "steps": int(steps[-1]), "batch_size": 8, "seq_len": 128}
    model = {"num_layers": layers, "hidden_size": 256, "num_heads": 8, "vocab_size": 512}
    config = {"settings": settings, "model": model, "jax": "0.11.2", "device": "1 x NVIDIA H200"}
    return Log(config, metrics, diagnostics, [])


def _tensor(generator: np.random.Generator, tensor: str, count: int) -> dict[str, np.ndarray]:
    flutter = 0.002 if tensor == "kernel" else 0.06
    amax = np.exp(np.cumsum(0.002 * generator.standard_normal(count)) + flutter * generator.standard_normal(count))
    amax *= 1e-3 if tensor == "output_gradient" else 4.0
    before = np.maximum.accumulate(np.concatenate([amax[:1], amax[:-1]]))
    headroom = before / amax
    saturated = np.where(headroom < 1, 2e-6, 0.0)
    error = ROUNDING[tensor] * (1 + 0.03 * generator.standard_normal(count))
    return {
        "amax": amax,
        "scale": before / LARGEST[tensor],
        "headroom": headroom,
        "saturated": saturated,
        "underflowed": np.full(count, 2e-4),
        "nonfinite": np.zeros(count),
        "error": error,
    }


def _metrics_row(run: str, step: int, loss: float | None, val_loss: float | None) -> dict[str, Any]:
    return {
        "run": run,
        "step": step,
        "loss": loss,
        "tokens_per_second": 92_000 + step % 700 if step else None,
        "val_loss": val_loss,
        "model_tflops": 612.0 if step else None,
        "bf16_utilization": 0.62 if step else None,
        "fp8_utilization": 0.31 if step else None,
        "peak_memory_gib": 34.7 if step else None,
    }


# --- Faults, each planted into one tensor or layer from a column on.


def freeze(log: Log, layer: str, tensor: str, column: int) -> None:
    """The scale no longer moves, while the amax doubles every five diagnosed steps."""
    scale = log.tensor(column, layer, tensor)["scale"]
    for later in range(column, len(log.diagnostics)):
        entry = log.tensor(later, layer, tensor)
        headroom = 2.0 ** (-(later - column) / 5)
        entry |= {"amax": scale * LARGEST[tensor] / headroom, "scale": scale, "headroom": headroom}
        entry |= {"saturated": min(0.5, 1e-3 * (1 / headroom - 1)), "error": min(0.9, entry["error"] / headroom)}


def put_outliers(log: Log, layer: str, tensor: str, column: int) -> None:
    """A few elements are so large that a fifth of the others underflows, at a scale that fits."""
    for later in range(column, len(log.diagnostics)):
        entry = log.tensor(later, layer, tensor)
        entry |= {"amax": 3e3, "scale": 3e3 / LARGEST[tensor], "headroom": 1.0, "underflowed": 0.2}


def widen(log: Log, layer: str, tensor: str, column: int) -> None:
    """One batch had values of 1e6, and the scale stays where they left it."""
    for later in range(column, len(log.diagnostics)):
        entry = log.tensor(later, layer, tensor)
        entry |= {"scale": 1e6 / LARGEST[tensor], "headroom": 1e6 / entry["amax"], "underflowed": 0.6, "error": 0.5}


def break_gradient(log: Log, layer: str, column: int) -> None:
    """The gradient of one layer has a NaN, in one step."""
    log.gradient(column, layer).update(norm=None, nonfinite=1)


def spike(log: Log, column: int, factor: float = 40.0) -> None:
    """All gradients are much larger in one step, and so is the loss."""
    for entry in log.diagnostics[column]["gradients"]:
        entry["norm"] *= factor
    log.diagnostics[column]["loss"] *= 2
    log.metrics[column + 1]["loss"] *= 2


def with_experts(log: Log, layers: int = 2, experts: int = 4) -> Log:
    """The log of a model with experts, which are used about evenly."""
    generator = np.random.default_rng(1)
    for row in log.diagnostics:
        shares = generator.uniform(0.8, 1.2, (layers, experts))
        row["experts"] = [
            {"layer": f"h_{layer}/mlp", "fractions": (own / own.sum()).tolist(), "dropped": 0.0, "entropy": 0.8}
            for layer, own in enumerate(shares)
        ]
    return log
