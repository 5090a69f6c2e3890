"""The parts that all result files share: where and when the figures were measured, and tables in Markdown.

A figure without its device, versions and date cannot be compared with another one, so all benchmarks write them.
"""

import datetime
import importlib.metadata
import os
import pathlib
import platform

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "nvidia-cublas", "nvidia-cudnn-cu13", "jax-cuda13-plugin")


def environment() -> dict:
    """The device, the versions and the date of this process. Initialises the JAX backend."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment_line(found: dict) -> str:
    """One sentence of Markdown for the head of a result file."""
    capability = f" (compute capability {found['compute_capability']})" if found["compute_capability"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    flags = f", XLA_FLAGS `{found['xla_flags']}`" if found["xla_flags"] else ""
    return f"{found['device']}{capability}, {found['date']}, Python {found['python']}, {versions}{flags}."


def table(headings: list[str], rows: list[list]) -> str:
    """A Markdown table. A column is numeric, and aligned to the right, if no row has text in it except a dash."""
    numeric = [all(isinstance(row[i], int | float) or row[i] == "-" for row in rows) for i in range(len(headings))]
    lines = [headings, ["---:" if right else "---" for right in numeric], *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(path: pathlib.Path, text: str) -> None:
    """Write one result file, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip("\n") + "\n")
