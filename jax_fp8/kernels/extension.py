"""The CUDA kernels, as XLA sees them: names of custom-call targets.

The extension `jax_fp8._kernels` is a table from target names to handlers. Importing this file hands the table to XLA,
once, for the platform CUDA; on a machine without a GPU that only queues it, so the same programs can be lowered and
compiled there. Nothing fails here when there are no kernels: `built()` says whether there are, `missing_reason()` what
to do about it.
"""

import importlib
from types import ModuleType
from typing import Any

import jax

PLATFORM = "CUDA"


def _load() -> tuple[ModuleType | None, str]:
    """The extension, or None and why."""
    try:
        return importlib.import_module("jax_fp8._kernels"), ""
    except ImportError as error:
        return None, str(error)


def _register(extension: ModuleType) -> tuple[str, ...]:
    """Types before targets: a handler is asked for its state type as soon as XLA knows it."""
    for name, registration in extension.types().items():
        jax.ffi.register_ffi_type(name, registration, platform=PLATFORM)
    targets = extension.targets()
    for name, stages in targets.items():
        jax.ffi.register_ffi_target(name, stages, platform=PLATFORM)
    return tuple(targets)


_extension, _import_error = _load()
TARGETS: tuple[str, ...] = _register(_extension) if _extension is not None else ()


def built() -> bool:
    """Whether the extension was built with CUDA kernels, and they are registered."""
    return bool(TARGETS)


def missing_reason() -> str | None:
    """Why there are no kernels and what to do, in one sentence; None when there are."""
    if built():
        return None
    if _extension is None:
        return (
            f"jax_fp8 was imported without its extension ({_import_error}); run `pip install .` in its source directory"
        )
    return (
        "jax_fp8 was built without CUDA kernels because no nvcc was found; "
        "reinstall it with `pip install . -C cmake.define.JAX_FP8_KERNELS=ON`"
    )


def build_info() -> dict[str, Any]:
    """What the extension contains and what it finds at run time.

    Returns:
        `built`, `reason` (None when built), `targets`, `cuda_version` ("13.0" or None), `architectures` (compiled for),
        `cublaslt_version` ("13.1.0" or None) and `cublaslt_reason` (why it cannot be used, or None).
    """
    info = {
        "built": built(),
        "reason": missing_reason(),
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
        info["architectures"] = tuple(name.removesuffix("-real") for name in _extension.architectures().split())
        info["cublaslt_version"] = cublaslt_version or None
        info["cublaslt_reason"] = cublaslt_reason or None
    return info
