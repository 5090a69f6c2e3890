"""Compiles the handlers of csrc to a CPU program that calls them, under AddressSanitizer and UBSan.

    csrc/*.cc                handlers, unchanged
    csrc/*.cu                kernels, as tests/emulation rewrites them
    driver.cc                the program; its table of targets is read from csrc/module.cc
    cublaslt.cc              the fake library that csrc/cublaslt.cc opens

Objects are kept in pytest's cache folder, until a text or the compiler changes.
"""

import concurrent.futures
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
from collections.abc import Iterable

import jax
from emulation.compiler import CSRC, KEPT, gcc, keep, only_here, run_compiler
from emulation.compiler import HERE as EMULATION
from emulation.rewrite import rewrite

HERE = pathlib.Path(__file__).parent
FOLDER = KEPT.parent / "handlers"
CHECKS = [
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
    "--param",
    "asan-stack=0",  # threads of kernels have stacks that AddressSanitizer does not know
]
FLAGS = [
    *("-std=c++20", "-fPIC", "-w", "-O0", "-g1", "-fno-strict-aliasing", "-fno-gnu-unique", "-ffp-contract=off"),
    *("-DCUDART_VERSION=13000", "-I.", f"-I{EMULATION}", f"-I{HERE}", "-isystem", jax.ffi.include_dir()),
]
COMMON = "common.h"  # the headers of all handlers, compiled once
DAYS = 7  # for which a program is kept after its last use

CUBLASLT, SONAME = "made_up_cublaslt.cc", "libcublasLt.so.13"

LINKS = ("activation", "amax", "cached_attention", "few_rows_gemm", "norm", "quantize")  # what a chain calls
Change = tuple[str, str, str]


@functools.cache
def has_sanitizers() -> bool:
    """Whether there is a GCC, and the libraries of its sanitizers."""
    compiler = gcc()
    if compiler is None:
        return False
    found = [
        subprocess.run(
            [*shlex.split(compiler[0]), f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout
        for name in ("asan", "ubsan")
    ]
    return all(os.path.isabs(path) for path in found)


@functools.cache
def targets() -> dict[str, dict[str, str]]:
    """The stages of each target of csrc/module.cc, with the names of their handlers."""
    text = re.sub(r"\s+", " ", (CSRC / "module.cc").read_text())
    found = {}
    for name, stages in re.findall(r'table\["(\w+)"\] = py::dict\(((?:"\w+"_a = capsule\(\w+\)(?:, )?)+)\)', text):
        found[name] = dict(re.findall(r'"(\w+)"_a = capsule\((\w+)\)', stages))
    return found


def operation_of(target: str) -> str:
    """The operation of a target: the longest name of a file in csrc with which the target begins."""
    names = (path.stem for path in CSRC.glob("*.cc"))
    return max((name for name in names if target.startswith(f"jax_fp8_{name}")), key=len)


def build(operations: Iterable[str], changes: tuple[Change, ...] = ()) -> pathlib.Path:
    """The program that calls the targets of these operations.

    Args:
      changes: (file of csrc, text, other text) to be replaced before: mistakes that a test must notice.
    """
    operations = sorted(operations)
    texts = _texts(changes) | {"targets.h": _table(operations)}
    sources = _sources_of(operations)
    folder = FOLDER / _key(sources, sorted(texts.items()))
    program = folder / "driver"
    with only_here(f"handlers_{folder.name[:2]}"):
        if not program.exists():
            _make(texts, sources, folder)
        os.utime(folder)
    return program


def _sources_of(operations):
    """The sources to compile: those of the operations, the files that a GEMM needs, and the emulation's."""
    operations = {*operations, *(LINKS if "chain" in operations else ())}
    names = {"driver.cc", CUBLASLT, *(f"emulation/{path.name}" for path in EMULATION.glob("*.cc"))}
    for name in operations:
        names |= {path.name for path in CSRC.glob(f"{name}.c[cu]")}
    if names & {"gemm.cc", "weight_gradient.cc"}:
        names |= {"gemm_plan.cc", "cublaslt.cc"}
    if "gemm.cc" in names:
        names |= {"gemm_by_tile.cc", "grouped_gemm.cu"}
    return sorted(names)


def _texts(changes):
    """The texts by name of all files that the compiler needs."""
    paths = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *CSRC.glob("*.cu"), *CSRC.glob("*.cc")]
    texts = {str(path.relative_to(CSRC)): path.read_text() for path in sorted(paths)}
    for file, text, other in changes:
        if text not in texts[file]:
            raise ValueError(f"{file} must contain what is to be changed, got {text!r}")
        texts[file] = texts[file].replace(text, other)
    texts |= {name: rewrite(text, f"csrc/{name}") for name, text in texts.items() if not name.endswith(".cc")}
    texts |= {name: f'#line 1 "csrc/{name}"\n{text}' for name, text in texts.items() if name.endswith(".cc")}
    texts |= {"driver.cc": (HERE / "driver.cc").read_text(), CUBLASLT: (HERE / "cublaslt.cc").read_text()}
    texts[COMMON] = '#include "ffi.h"\n'
    # The sanitizers' own library reports failures here, not tests/emulation/checks.h.
    for path in sorted([*EMULATION.glob("*.h"), *EMULATION.glob("*.cc")]):
        texts[f"emulation/{path.name}"] = "" if path.name == "checks.h" else path.read_text()
    return texts


def _table(operations):
    """The C++ text of the table of targets, like the one in csrc/module.cc."""
    rows = []
    for name, stages in targets().items():
        operation = operation_of(name)
        if operation not in operations:
            continue
        handlers = [
            f"jax_fp8::{stages[stage]}" if stage in stages else "nullptr"
            for stage in ("instantiate", "initialize", "execute")
        ]
        has_state = "instantiate" in stages
        kept = [f"jax_fp8::{operation}_state_type_{what}" if has_state else "nullptr" for what in ("id", "info")]
        rows.append(f'  {{"{name}", {", ".join([*handlers, *kept])}}},')
    lines = [f'#include "{operation}.h"' for operation in operations]
    lines += [
        "struct Target {",
        "  const char* name;",
        "  XLA_FFI_Handler *instantiate, *initialize, *execute;",
        "  XLA_FFI_TypeId* (*state_id)();",
        "  const XLA_FFI_TypeInfo* (*state_info)();",
        "};",
        "inline const Target kTargets[] = {",
    ]
    return "\n".join([*lines, *rows, "};", ""])


def _key(*what):
    ours = [path.read_text() for path in (pathlib.Path(__file__), *sorted(HERE.glob("*.h")))]
    return hashlib.sha256(repr([*what, ours, gcc(), FLAGS, CHECKS]).encode()).hexdigest()[:32]


def _make(texts, sources, kept):
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jax_fp8_handlers_") as folder:
        for name, text in texts.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        objects = {name: FOLDER / f"{_key(name, _headers_of(name, texts), texts[name])}.o" for name in sources}
        missing = [name for name in sources if not objects[name].exists()]
        if any(map(_includes_common, missing)):
            run_compiler([*FLAGS, *CHECKS, "-x", "c++-header", COMMON, "-o", f"{COMMON}.gch"], folder)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: _compile(name, folder, objects[name]), missing))
        library = str(objects.pop(CUBLASLT))
        run_compiler(["-shared", *CHECKS, library, f"-Wl,-soname,{SONAME}", "-o", SONAME], folder)
        run_compiler([*CHECKS, *map(str, objects.values()), "-ldl", "-o", "driver"], folder)
        for name in (SONAME, "driver"):
            keep(pathlib.Path(folder, name), kept / name)
    for old in FOLDER.iterdir():
        if old.is_dir() and old.stat().st_mtime < time.time() - DAYS * 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)


def _includes_common(name):
    return name.endswith(".cc") and not name.startswith("emulation/") and name != CUBLASLT


def _headers_of(name, texts):
    """The headers that a source may include: only the program includes the table, and the scheduler none of csrc."""
    headers = {other: text for other, text in texts.items() if other.endswith((".h", ".cuh"))}
    if name != "driver.cc":
        del headers["targets.h"]
    if name.startswith("emulation/"):
        headers = {other: text for other, text in headers.items() if other.startswith("emulation/")}
    return sorted(headers.items())


def _compile(name, folder, kept):
    """The object of one source. Kernels include CUDA's header implicitly, as with nvcc. The scheduler has no sanitizer
    checks, since it switches stacks.
    """
    first = ["-include", "cuda_runtime_api.h"] if name.endswith(".cu") else []
    first = ["-include", COMMON] if _includes_common(name) else first
    checks = ["-O2"] if name.startswith("emulation/") else CHECKS
    target = name.replace("/", "_") + ".o"
    run_compiler([*FLAGS, *checks, *first, "-x", "c++", "-c", name, "-o", target], folder)
    keep(pathlib.Path(folder, target), kept)
