"""The set-up of all tests: a CPU that jax sees as eight devices, and a GPU for tests marked `gpu`.

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
    """The folder of jax's persistent compilation cache, which processes and runs share: each program compiles once.

    jax's key of a program is its text, the compiler's options and the versions. The text names a rule for
    `custom_partitioning` only by its address, which may be that of another rule in the next process. So each state of
    the rooms that have such rules has a folder of its own. Folders that were not written to for a week are removed.
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
# Eight devices, and the flags with which XLA compiles fastest, since tests spend most of their time in the compiler:
# LLVM without optimizations and with one part for each module, and XLA's older fusion emitters, which take a third of
# the time of the newer ones.
_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
if _FLAGS not in os.environ.get("XLA_FLAGS", ""):  # a pytest worker inherits them from its parent
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `import reference`, `import h200`

if not _SOME_GPU:  # programs compiled for a GPU never run here: a stand-in for ptxas saves a process for each kernel
    os.environ["PATH"] = os.pathsep.join((str(pathlib.Path(__file__).parent / "assembler"), os.environ["PATH"]))

# Tracing makes many small objects that live long. With Python's default threshold the garbage collector, which searched
# them again and again, took a seventh of the time.
gc.set_threshold(1_000_000)
# Compilers allocate much memory, which is faster with huge pages: by a twentieth of the time. The variable takes effect
# in child processes.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# Leaves source locations out of programs: no test reads them, and recording them takes time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import slow_cases  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from jax_fp8.kernels import dispatch  # noqa: E402

MOST_MAPPINGS = 20_000  # half a module may add ten thousand


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config, items):
    missing = slow_cases.mark(items)
    if missing and config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # all tests were collected
        raise pytest.UsageError(
            f"tests/slow_cases.py must name cases that there are, got {', '.join(missing)}; rename or remove them"
        )


def pytest_collection_finish(session):
    """Modules and tests live until the end, so the garbage collector need not search them again."""
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


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """Forget the compiled programs after a module where they have many memory mappings. Linux gives a process 65,530 by
    default; without another one the compiler crashes.
    """
    yield
    if _mappings() > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    mappings = pathlib.Path("/proc/self/maps")
    return mappings.read_bytes().count(b"\n") if mappings.exists() else 0


@pytest.fixture(autouse=True)
def _compiled_anew(request):
    """Tests that compile for an H200 bypass the cache: they read the compiler's dumps, which a cached program lacks."""
    if _SOME_GPU or not hasattr(request.module, "h200"):
        yield
    else:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # jax looks up only once whether there is a cache
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
    """The test shares no traces with other tests: what it replaces takes effect in this test, and only here."""
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
    """The path of a text file: a few thousand words, some of them not ASCII."""
    words = np.random.default_rng(0).choice(["naïve", "model", "learns", "to", "predict", "bytes", "—", "\n"], 3000)
    path = tmp_path / "book.txt"
    path.write_text(" ".join(words))
    return path
