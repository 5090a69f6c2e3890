"""What every test starts from: the CPU with eight devices, and a GPU beside it for tests marked `gpu`.

The environment must be set before jax is imported, hence at the top of this file.
"""

import gc
import hashlib
import importlib
import importlib.util
import itertools
import os
import pathlib
import shutil
import sys
import time

_SOME_GPU = pathlib.Path("/proc/driver/nvidia/version").exists() and importlib.util.find_spec("jax_plugins") is not None

os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if _SOME_GPU else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several test processes share one GPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads wait busily, which takes cores from other processes
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # h200.py compiles for a GPU that is not there


def _kept_programs() -> pathlib.Path:
    """Where programs for the CPU are kept from one process and one run to the next, so that each is compiled once.

    jax knows a program by its text, the compiler's options and the versions. Of a rule for `custom_partitioning` the
    text has only the address, which may be another rule's in the next process: hence a folder for each state of the
    rooms where such rules are. What a week has added nothing to is removed.
    """
    root = pathlib.Path(__file__).parents[1]
    kept = root / ".pytest_cache/programs"
    rules = [
        path.read_bytes() for room in ("jax_fp8", "tests") for path in sorted((root / room / "kernels").glob("*.py"))
    ]
    for old in kept.glob("*"):
        if old.stat().st_mtime < time.time() - 7 * 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)
    return kept / hashlib.sha256(b"\n".join(rules)).hexdigest()[:16]


os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_kept_programs())
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(not _SOME_GPU)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Eight devices; and the fastest way through the compiler, since compiling is what these tests spend their time on: LLVM
# without its optimizer and a module as a whole, and XLA's older emitters of fusions, which take a third of the newer
# ones' time.
_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
if _FLAGS not in os.environ.get("XLA_FLAGS", ""):  # a worker has them from the process that started it
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `import reference`, `import h200`

if not _SOME_GPU:  # nothing runs what is compiled for one: no process for each kernel to assemble it
    os.environ["PATH"] = os.pathsep.join((str(pathlib.Path(__file__).parent / "assembler"), os.environ["PATH"]))

# Tracing makes many small objects that live on: a seventh of the time went into looking for others.
gc.set_threshold(1_000_000)
# Compilers allocate much, which large pages make faster: a twentieth of the time. A process has it from the one that
# starts it.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# Programs do not say where in the source an operation was called: nobody reads it, and it takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from jax_fp8.kernels import dispatch  # noqa: E402


def pytest_collection_finish(session):
    """Modules and tests live to the end: nobody looks through them again."""
    gc.collect()
    gc.freeze()


def gpus() -> list:
    """The GPUs of this process; none where jax was told to use the CPU only."""
    return jax.devices("cuda") if "cuda" in os.environ["JAX_PLATFORMS"].split(",") else []


@pytest.fixture(autouse=True)
def _device(request):
    """Tests marked `gpu` run on the first GPU, all others on the CPU, on whichever machine."""
    if request.node.get_closest_marker("gpu") is None:
        yield
    elif not gpus():
        pytest.skip("needs an NVIDIA GPU and jax[cuda13]")
    else:
        with jax.default_device(gpus()[0]):
            yield


@pytest.fixture(autouse=True)
def _compiled_anew(request):
    """Tests that compile for an H200 keep no programs: they read what the compiler dumps, and a kept one has none."""
    if _SOME_GPU or not hasattr(request.module, "h200"):
        yield
    else:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether there is one is asked once
        yield
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def _old_objects_left_alone():
    """A test that collects garbage (a run does) looks through its own objects only: to look through those of all tests
    before it took up to 20 seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


_TRACED = jax.make_user_context(default_value=0)
_NUMBERS = itertools.count(1)


@pytest.fixture
def traced_anew():
    """Nothing that was traced before the test is taken for what it traces, nor the other way round:
    what it replaces counts."""
    with _TRACED(next(_NUMBERS)):
        yield


@pytest.fixture
def with_kernels(monkeypatch, traced_anew):
    """Trace as on a machine with kernels."""
    monkeypatch.setattr(dispatch, "kernels_run", lambda: True)


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by name, imported as the script imports it."""
    folder = pathlib.Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    path = list(sys.path)
    yield importlib.import_module
    sys.path[:] = path
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def book(tmp_path):
    """A user's own text: a few thousand words, not all of them ASCII."""
    words = np.random.default_rng(0).choice(["naïve", "model", "learns", "to", "predict", "bytes", "—", "\n"], 3000)
    path = tmp_path / "book.txt"
    path.write_text(" ".join(words))
    return path
