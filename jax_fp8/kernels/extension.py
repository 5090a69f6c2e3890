"""The CUDA kernels, as XLA sees them: names of custom-call targets.

The extension `jax_fp8._kernels` is a table from target names to handlers. Importing this file hands the table to XLA,
once, for the platform CUDA; on a machine without a GPU that only queues it, so the same programs can be lowered and
compiled there. Nothing fails here when there are no kernels: `built()` says whether there are, `missing_reason()` what
to do about it, and `is_broken()` whether they are there and cannot be used.
"""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypedDict

import jax

PLATFORM = "CUDA"
NAME = "jax_fp8._kernels"
PACKAGE = Path(__file__).parents[1]
ROOMS = ("core", "kernels")  # the Python side of what the extension is called with


class Loaded(NamedTuple):
    """The extension, or None and why; `is_broken` if there is one that cannot be loaded."""

    module: ModuleType | None
    reason: str = ""
    is_broken: bool = False


def _load() -> Loaded:
    """The extension of this package, or of an installed one that has the same Python sources."""
    try:
        return Loaded(importlib.import_module(NAME))
    except ModuleNotFoundError as error:
        if error.name != NAME:
            return _not_loaded(error)
        return _load_installed()
    except ImportError as error:
        return _not_loaded(error)


def _load_installed() -> Loaded:
    """A source folder that stands first on Python's path hides the installed package, and has no extension itself.

    The extension of the installed one is called in the same way if it came with the same Python sources; with others,
    its kernels may mean something else by the same arguments.
    """
    if not (PACKAGE.parent / "csrc/module.cc").is_file():
        lacks = f"jax_fp8 in {PACKAGE} lacks its extension{_for_another_python(PACKAGE)}"
        return Loaded(None, f"{lacks}; install jax_fp8 again")
    here = f"jax_fp8 was imported from its source folder {PACKAGE.parent}, which has no extension"
    path = next(_installed_extensions(), None)
    if path is None:
        missing = f"{sys.executable} has no jax_fp8 installed{_for_another_python(PACKAGE)}"
        return Loaded(None, f"{here}, and {missing}; run `pip install .` in the source folder")
    if _sources(path.parent) != _sources(PACKAGE):
        return Loaded(
            None,
            f"{here}, and the jax_fp8 installed in {path.parent} came with other Python sources; "
            "run `pip install .` in the source folder again, or start Python in another folder",
        )
    return _load_from(path)


def _installed_extensions() -> Iterator[Path]:
    """Files that this Python can load, of the distributions on its path."""
    for distribution in importlib.metadata.distributions(name="jax_fp8"):
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if path.parent.name == "jax_fp8" and _is_extension(path) and path.exists():
                yield path


def _is_extension(path: Path) -> bool:
    return path.name in {f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES}


def _for_another_python(package: Path) -> str:
    others = [path.name for path in sorted(package.glob("_kernels.*.so")) if not _is_extension(path)]
    return f" for this Python ({sys.implementation.cache_tag}), only {others[0]}" if others else ""


def _sources(package: Path) -> dict[Path, bytes]:
    paths = (path for room in ROOMS for path in (package / room).rglob("*.py"))
    return {path.relative_to(package): path.read_bytes() for path in paths}


def _load_from(path: Path) -> Loaded:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None, path
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return _not_loaded(error)
    sys.modules[NAME] = module
    return Loaded(module)


def _not_loaded(error: ImportError) -> Loaded:
    text = " ".join(str(error).split())
    reason = f"jax_fp8's extension is there and cannot be loaded ({text}); install jax_fp8 again, on this machine"
    return Loaded(None, reason, is_broken=True)


def _register(extension: ModuleType) -> tuple[str, ...]:
    """Types before targets: a handler is asked for its state type as soon as XLA knows it."""
    for name, registration in extension.types().items():
        jax.ffi.register_ffi_type(name, registration, platform=PLATFORM)
    targets = extension.targets()
    for name, stages in targets.items():
        jax.ffi.register_ffi_target(name, stages, platform=PLATFORM)
    return tuple(targets)


_extension, _not_there, _is_broken = _load()
TARGETS: tuple[str, ...] = _register(_extension) if _extension is not None else ()


def built() -> bool:
    """Whether the extension was built with CUDA kernels, and they are registered."""
    return bool(TARGETS)


def is_broken() -> bool:
    """Whether an extension is installed and cannot be loaded, so that somebody expects kernels and would get none."""
    return _is_broken


def missing_reason() -> str | None:
    """Why there are no kernels and what to do, in one sentence; None when there are."""
    if built():
        return None
    if _extension is None:
        return _not_there
    return (
        f"jax_fp8 was built without CUDA kernels ({_why_not_built(_extension)}); "
        "reinstall it with `pip install . -C cmake.define.JAX_FP8_KERNELS=ON`, which brings a compiler where none is"
    )


def compiled_for(architecture: str) -> bool:
    """Whether the kernels were compiled for an architecture, such as "90a". True without kernels, for references."""
    return not built() or architecture in _architectures()


def _architectures() -> tuple[str, ...]:
    names = "" if _extension is None else _extension.architectures()
    return tuple(name.removesuffix("-real") for name in names.split())


def check_target(name: str) -> None:
    """Raise where a GPU is to run a kernel that an older build of the extension does not have."""
    if built() and name not in TARGETS and jax.default_backend() == "gpu":
        raise ValueError(
            f"the CUDA kernel {name} is needed, but jax_fp8's extension was built before there was one; "
            "run `pip install .` in the source folder again"
        )


def _why_not_built(extension: ModuleType) -> str:
    """In the words of the build; older builds do not tell."""
    tell = getattr(extension, "why_no_kernels", None)
    return tell() if tell else "with JAX_FP8_KERNELS=OFF, or where no nvcc was found"


class BuildInfo(TypedDict):
    """The result of `build_info`."""

    built: bool
    reason: str | None
    path: str | None
    targets: tuple[str, ...]
    cuda_version: str | None
    architectures: tuple[str, ...]
    cublaslt_version: str | None
    cublaslt_reason: str | None


def build_info() -> BuildInfo:
    """What the extension contains and what it finds at run time.

    Returns:
        `built`, `reason` (None when built), `path` (of the extension, or None), `targets`, `cuda_version` ("13.0" or
        None), `architectures` (compiled for), `cublaslt_version` ("13.1.0" or None) and `cublaslt_reason` (why it
        cannot be used, or None).
    """
    info: BuildInfo = {
        "built": built(),
        "reason": missing_reason(),
        "path": getattr(_extension, "__file__", None),
        "targets": TARGETS,
        "cuda_version": None,
        "architectures": (),
        "cublaslt_version": None,
        "cublaslt_reason": missing_reason(),
    }
    if _extension is not None and built():
        version = _extension.cuda_version()
        cublaslt_version, cublaslt_reason = _extension.cublaslt_version()
        info["cuda_version"] = f"{version // 1000}.{version % 1000 // 10}"
        info["architectures"] = _architectures()
        info["cublaslt_version"] = cublaslt_version or None
        info["cublaslt_reason"] = cublaslt_reason or None
    return info
