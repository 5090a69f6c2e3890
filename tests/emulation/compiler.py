"""Compiles a CUDA source to a shared library for the CPU.

The library stays in pytest's cache folder until a text or the compiler changes.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

from emulation.rewrite import rewrite

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
KEPT = ROOT / ".pytest_cache/emulation"
KEPT_DAYS = 7  # after the last use

FLAGS = ["-std=c++20", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique"]
CHECKS = [
    "-fsanitize=alignment,bounds,shift,null,pointer-overflow,signed-integer-overflow,float-cast-overflow",
    "-fno-sanitize-recover=all",
]


class CompilerError(RuntimeError):
    """The compiler's messages."""


@functools.cache
def gcc() -> tuple[str, str] | None:
    """The command of GCC (CXX before g++) and its version. None if none has std::source_location, from GCC 11 on."""
    for command in (os.environ.get("CXX", ""), "g++"):
        if command and shutil.which(shlex.split(command)[0]):
            ask = [*shlex.split(command), "-dM", "-E", "-x", "c++", os.devnull]
            macros = subprocess.run(ask, capture_output=True, text=True).stdout
            version = re.search(r'#define __VERSION__ "((\d+).*)"', macros)
            if version and int(version[2]) >= 11 and "__clang__" not in macros:
                return command, version[1]
    return None


def build(source: str, entries: str, changes: tuple[tuple[str, str, str], ...]) -> pathlib.Path:
    """The library of one source and its entries; see `compile_for_cpu`."""
    texts = _texts(source, entries, changes)
    level = "-O0" if changes else "-O1"  # a planted mistake runs once or twice, so compiling takes most of its time
    library = KEPT / f"{_key(sorted(texts.items()), CHECKS, level)}.so"
    with only_here(library.name[:2]):
        if library.exists():
            os.utime(library)
        else:
            _compile(texts, level, library)
    return library


def _key(*what):
    """A name for a file made of `what` and of the emulation's own sources: a hash of all of them and the compiler."""
    ours = [
        path.read_text() for path in (pathlib.Path(__file__), *sorted(HERE.glob("*.h")), *sorted(HERE.glob("*.cc")))
    ]
    return hashlib.sha256(repr([*what, ours, gcc(), FLAGS]).encode()).hexdigest()[:32]


def _texts(source, entries, changes):
    """The texts by name of all files that the compiler needs, other than the emulation's own headers."""
    is_file = source.endswith(".cu")
    texts = {str(path.relative_to(CSRC)): path.read_text() for path in sorted(CSRC.rglob("*.*h"))}
    texts |= {source: (CSRC / source).read_text()} if is_file else {"source.cu": source}
    for file, text, other in changes:
        if text not in texts[file]:
            raise ValueError(f"{file} must contain what is to be changed, got {text!r}")
        texts[file] = texts[file].replace(text, other)
    texts |= {name: rewrite(text, f"csrc/{name}") for name, text in texts.items()}
    texts["xla/ffi/api/c_api.h"] = "using XLA_FFI_Handler = void(void*);\n"
    texts["entries.cc"] = f'#include "{source if is_file else "source.cu"}"\n{rewrite(entries, "entries")}'
    return texts


def _compile(texts, level, library):
    with tempfile.TemporaryDirectory(prefix="jax_fp8_emulation_") as folder:
        for name, text in texts.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        checked = [*CHECKS, level, "-include", "cuda_runtime_api.h", f"-I{HERE}", "-I."]
        run_compiler([*FLAGS, *checked, "-c", "entries.cc"], folder)
        # The sanitizers' handlers are those of checks.h, so the compiler's own sanitizer library is not linked.
        run_compiler(["-shared", "-Wl,-Bsymbolic", "entries.o", str(_scheduler()), "-o", "kernels.so"], folder)
        keep(pathlib.Path(folder, "kernels.so"), library)


@functools.cache
def _scheduler():
    """The object file of the scheduler, with which every library is linked."""
    sources = sorted(HERE.glob("*.cc"))
    kept = KEPT / f"{_key()}.o"
    with only_here("scheduler"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(prefix="jax_fp8_emulation_") as folder:
                run_compiler([*FLAGS, "-O2", "-c", *map(str, sources)], folder)
                run_compiler(["-r", "-nostdlib", *(f"{path.stem}.o" for path in sources), "-o", "all.o"], folder)
                keep(pathlib.Path(folder, "all.o"), kept)
    return kept


def run_compiler(arguments: list[str], folder: str | pathlib.Path) -> None:
    """Runs GCC in a folder; raises its messages if it fails."""
    command = [*shlex.split(gcc()[0]), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompilerError(f"{shlex.join(command)}\n{done.stderr[:6000]}")


def keep(made: pathlib.Path, wanted: pathlib.Path) -> None:
    """Moves a file to the cache atomically, and removes files that were not used for long."""
    on_the_same_disk = wanted.with_suffix(f".{os.getpid()}")
    shutil.copy(made, on_the_same_disk)
    on_the_same_disk.replace(wanted)
    for old in wanted.parent.glob(f"*{wanted.suffix}"):
        if old.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
            old.unlink(missing_ok=True)


@contextlib.contextmanager
def only_here(name: str) -> Iterator[None]:
    """A lock between processes, by name, so that the workers of a test run do not compile the same file twice."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
