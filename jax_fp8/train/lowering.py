"""jax's lowered and compiled programs, together with XLA's thunk listing, which says what a program launches.

    lowered ─Lowering.compile→ Compilation: jax's `Compiled` and the thunk listing

XLA returns the optimized HLO at any time. But only after that does it decide which thunks share a CUDA graph, and it
writes this only into dump files while it compiles. So `Lowering.compile` has XLA dump into a temporary folder, and
reads the listing from there.
"""

import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jax_fp8.core.types import PyTree


@dataclass(frozen=True)
class Compilation:
    """jax's `Compiled`, with all of its methods, and the thunk listing of its compilation, None if there was none."""

    compiled: jax.stages.Compiled
    thunks: str | None

    def listing(self) -> str:
        """The thunk listing; raise if there is none, with the reason."""
        if self.thunks is not None:
            return self.thunks
        shardings = jax.tree.leaves((self.compiled.input_shardings, self.compiled.output_shardings))
        platforms = sorted({device.platform for sharding in shardings for device in sharding.device_set})
        if "gpu" not in platforms:
            raise ValueError(
                f"capture_report needs a program compiled for a CUDA device, got platform {', '.join(platforms)}; "
                "lower it with arguments, or shapes with shardings, that are placed on one"
            )
        raise RuntimeError(
            "capture_report needs the compiler's thunk listing, got a compilation that left none; "
            "switch off jax's compilation cache, which skips the compiler, and set no xla_dump_to"
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@dataclass(frozen=True)
class Lowering:
    """jax's `Lowered`, with all of its methods; `compile` also keeps the thunk listing."""

    lowered: jax.stages.Lowered

    def compile(self, compiler_options: Mapping[str, str | bool | int | float] | None = None) -> Compilation:
        """Compile. If the caller sets `xla_dump_to`, the listing is there, and not in the `Compilation`."""
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, **(compiler_options or {})}
            compiled = self.lowered.compile(compiler_options=options)
            return Compilation(compiled, _dumped_thunks(pathlib.Path(folder)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


def _dumped_thunks(folder: pathlib.Path) -> str | None:
    """The listing that XLA wrote last: earlier ones are of kernels that it compiled for autotuning, or from before the
    passes that make CUDA graphs. If these passes changed nothing, XLA wrote only the listing from before them.
    """
    paths = folder.glob("*.thunk_sequence*.txt")
    last = max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return last.read_text() if last else None
