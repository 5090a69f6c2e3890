"""A program on its way through the compiler, with the one thing that jax does not keep:
the listing of what will be launched.

    lowered ─Lowering.compile→ Compilation: jax's own, and the thunk listing

XLA gives the optimised HLO at any time, but decides what shares a CUDA graph later, and tells only in files that it
writes while compiling. So a `Lowering` compiles into a folder and its `Compilation` keeps what was found there.
"""

import pathlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Compilation:
    """jax's `Compiled`, to be called and asked as that, and the thunk listing of its compilation;
    None when there was none.
    """

    compiled: jax.stages.Compiled
    thunks: str | None

    def listing(self) -> str:
        """The thunks, or an error that says why there are none."""
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@dataclass(frozen=True)
class Lowering:
    """jax's `Lowered`, to be asked as that, whose `compile` keeps the listing of what will be launched."""

    lowered: jax.stages.Lowered

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compilation:
        """Compile; with an `xla_dump_to` of the caller's, the listing is there and not in the `Compilation`."""
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, **(compiler_options or {})}
            compiled = self.lowered.compile(compiler_options=options)
            return Compilation(compiled, _dumped_thunks(pathlib.Path(folder)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


def _dumped_thunks(folder: pathlib.Path) -> str | None:
    """The listing written last: of the program, not of what was compiled on the way to time it,
    and after the passes that make CUDA graphs.

    If these changed nothing, XLA wrote only the listing before them.
    """
    paths = folder.glob("*.thunk_sequence*.txt")
    last = max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return last.read_text() if last else None
