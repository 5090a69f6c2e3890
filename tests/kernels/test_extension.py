"""The extension: what it says about itself, and that XLA reaches its handlers, without a GPU.

What the kernels compute is checked on a device, by tests/gpu/kernel_check.py.
"""

import importlib
import importlib.machinery
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import types

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.kernels import dispatch, extension
from jax_fp8.kernels.quantize import sums_results

needs_kernels = pytest.mark.skipif(not extension.built(), reason=str(extension.missing_reason()))
needs_compiler = pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))

E4M3 = jnp.float8_e4m3fn
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
SCALES = jax.ShapeDtypeStruct((3,), jnp.float32)
WORKSPACE = jax.ShapeDtypeStruct((2**25,), jnp.uint8)
QUANTIZE_ATTRIBUTES = {"row": np.int32(2), "from_amax": False, "margin": np.int32(0)}
QUANTIZE_ATTRIBUTES |= {"amax_epsilon": np.float32(0), "power_2_scale": False}
BY_TILE_ATTRIBUTES = {"square": False, "square_t": False, "margin": np.int32(0), "amax_epsilon": np.float32(0)}
BY_TILE_ATTRIBUTES |= {"power_2_scale": False}
GEMM_ATTRIBUTES = {"has_bias": False, "has_c": False, "fast_accumulation": True}
GEMM_ATTRIBUTES |= {"alpha": np.float32(1), "first_column": np.int64(0), "candidate": np.int32(0), "scaling": ""}


def import_again(monkeypatch, found):
    """A second copy of kernels/extension.py that finds this extension; None means that there is none beside it."""
    monkeypatch.setitem(sys.modules, extension.NAME, found)
    spec = importlib.util.spec_from_file_location("kernels_again", extension.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def without_kernels(**functions):
    """An extension as a build without nvcc leaves it."""
    module = types.ModuleType(extension.NAME)
    module.__dict__.update({"targets": dict, "types": dict, **functions})
    return module


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ({"why_no_kernels": lambda: "JAX_FP8_KERNELS=OFF"}, "(JAX_FP8_KERNELS=OFF)"),
        ({"why_no_kernels": lambda: "no nvcc was found"}, "(no nvcc was found)"),
        ({}, "(with JAX_FP8_KERNELS=OFF, or where no nvcc was found)"),
    ],
    ids=["off", "no nvcc", "does not tell"],
)
def test_a_build_without_kernels_says_why(functions, why, monkeypatch):
    copy = import_again(monkeypatch, without_kernels(**functions))
    assert not copy.built()
    assert why in copy.missing_reason() and "JAX_FP8_KERNELS=ON" in copy.missing_reason()
    info = copy.build_info()
    assert info["targets"] == () and info["architectures"] == () and info["cuda_version"] is None
    assert info["cublaslt_reason"] == copy.missing_reason()


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, on the path of a Python that has no other jax_fp8 but the source folder."""
    monkeypatch.setattr(sys, "path", [str(extension.PACKAGE.parent), str(tmp_path)])
    return tmp_path


def install(site, name=f"_kernels{SUFFIX}", content=None):
    """What pip leaves: the Python sources, the extension (the real one, or one of this content), the list of files."""
    package = site / "jax_fp8"
    for room in ("core", "kernels"):
        shutil.copytree(extension.PACKAGE / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    if content is None:
        (package / name).symlink_to(importlib.util.find_spec(extension.NAME).origin)
    else:
        (package / name).write_bytes(content)
    metadata = site / "jax_fp8-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jax_fp8\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text(f"jax_fp8/kernels/extension.py,,\njax_fp8/{name},,\n")
    return package


def test_a_source_folder_uses_the_extension_that_is_installed(site, monkeypatch):
    install(site)
    copy = import_again(monkeypatch, None)
    assert copy.TARGETS == extension.TARGETS
    assert copy.build_info()["path"].endswith(f"_kernels{SUFFIX}")  # of one library, Python says where it was first


@pytest.mark.parametrize("room", ["core", "kernels"])
def test_an_extension_that_came_with_other_sources_is_refused(room, site, monkeypatch):
    package = install(site)
    with next((package / room).glob("f*.py" if room == "core" else "g*.py")).open("a") as file:
        file.write("# changed\n")
    copy = import_again(monkeypatch, None)
    assert not copy.built() and copy.build_info()["cublaslt_version"] is None
    source = extension.PACKAGE.parent
    for part in (f"from its source folder {source}", f"installed in {package} came with other", "pip install"):
        assert part in copy.missing_reason()


def test_a_source_folder_without_an_installed_package_says_where_it_stands(site, monkeypatch):
    copy = import_again(monkeypatch, None)
    assert not copy.built() and copy.build_info()["path"] is None
    assert not copy.is_broken()  # nobody has installed one
    for part in (f"from its source folder {extension.PACKAGE.parent}", f"{sys.executable} has no", "pip install"):
        assert part in copy.missing_reason()


def test_an_extension_for_another_python_is_not_taken(site, monkeypatch):
    install(site, name="_kernels.cpython-27-x86_64-linux-gnu.so", content=b"")
    assert f"{sys.executable} has no" in import_again(monkeypatch, None).missing_reason()


def test_an_installed_package_that_lost_its_extension_says_so(site, monkeypatch):
    package = install(site, name="_kernels.cpython-27-x86_64-linux-gnu.so", content=b"")
    shutil.copy(extension.__file__, package / "kernels/extension.py")
    monkeypatch.setattr(extension, "__file__", str(package / "kernels/extension.py"))
    reason = import_again(monkeypatch, None).missing_reason()
    assert f"jax_fp8 in {package} lacks its extension" in reason
    assert "only _kernels.cpython-27-x86_64-linux-gnu.so" in reason


def test_a_library_that_does_not_load_is_quoted(site, monkeypatch):
    install(site, content=b"not a library")
    copy = import_again(monkeypatch, None)
    assert copy.is_broken() and not extension.is_broken()
    assert re.search(f"cannot be loaded .*_kernels{re.escape(SUFFIX)}.* install jax_fp8 again", copy.missing_reason())


def test_what_the_extension_itself_lacks_is_quoted(monkeypatch):
    def find(name):
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.40' not found")

    monkeypatch.setattr(importlib, "import_module", find)
    reason = import_again(monkeypatch, None).missing_reason()
    assert "cannot be loaded (libstdc++.so.6: version `GLIBCXX_3.4.40' not found)" in reason


def test_kernels_that_cannot_be_loaded_are_an_error_on_a_gpu(monkeypatch):
    monkeypatch.setattr(extension, "missing_reason", lambda: "it cannot be loaded")
    monkeypatch.setattr(extension, "is_broken", lambda: True)
    assert not dispatch.kernels_run.__wrapped__()  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="needs the CUDA kernels: it cannot be loaded"):
        dispatch.kernels_run.__wrapped__()


def test_the_module_has_handlers_exactly_when_it_is_built():
    info = extension.build_info()
    assert info["built"] is extension.built() is (extension.missing_reason() is None) is bool(info["targets"])


@needs_kernels
def test_build_info_is_what_was_built():
    info = extension.build_info()
    names = """
        quantize quantize_transpose quantize_transpose_sums quantize_by_tile quantize_by_tile_sums uninitialized
        transpose take_rows activation_quantize activation_quantize_by_tile activation_amax activation_backward_quantize
        activation_backward_quantize_by_tile activation_backward_amax amax adam update_state norm_quantize
        norm_quantize_by_tile norm_amax norm_backward cached_attention chain cross_entropy few_rows_gemm grouped_gemm
        grouped_gemm_weight_gradient gemm weight_gradient
    """.split()
    assert info["targets"] == tuple(f"jax_fp8_{name}" for name in names)
    assert re.fullmatch(r"1[2-9]\.\d+", info["cuda_version"])
    assert (info["cublaslt_version"] is None) != (info["cublaslt_reason"] is None)
    if info["cublaslt_version"]:
        assert info["cublaslt_version"].split(".")[0] == info["cuda_version"].split(".")[0]
    else:
        assert "libcublasLt.so" in info["cublaslt_reason"]


@needs_kernels
@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="needs cuobjdump of the CUDA toolkit")
def test_the_library_has_code_for_the_architectures_it_names():
    command = ["cuobjdump", "-lelf", extension._extension.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    compiled = set(re.findall(r"\.sm_(\w+)\.cubin", listing.stdout))
    assert compiled == set(extension.build_info()["architectures"])


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_importing_opens_no_gpu_library():
    """The extension alone, in a process without jax, which looks for a GPU by itself."""
    folder = str(pathlib.Path(extension._extension.__file__).parent)
    program = f"""
import sys
sys.path.insert(0, {folder!r})
import _kernels
assert _kernels.targets() and _kernels.types()
print([line for line in open("/proc/self/maps") if "libcublas" in line or "libcuda" in line])
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def compile_call(target, results, arguments, **attributes):
    """Compile one custom call for an H200: XLA looks the target up and runs its instantiate stage."""

    def call(*arrays):
        return jax.ffi.ffi_call(target, results)(*arrays, **attributes)

    placed = h200.shapes(arguments, h200.on_one_device())
    return h200.compile(jax.jit(call), *placed, xla_gpu_graph_min_graph_size=1)


def calls():
    matrix, transpose = jax.ShapeDtypeStruct((64, 32), E4M3), jax.ShapeDtypeStruct((32, 64), E4M3)
    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    product = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    gated = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    gradient = tuple(jax.ShapeDtypeStruct((64, 64), E4M3) for _ in range(2))
    swiglu = {"activation": "swiglu"}
    labels, row = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.float32)
    of_weight = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    by_tile = (matrix, transpose, SCALAR, row.update(shape=(1, 64)), row.update(shape=(1, 32)))
    gradient_by_tile = (*gradient, SCALAR, row.update(shape=(1, 64)), row.update(shape=(1, 64)))
    column, parameter = row.update(shape=(64, 1)), row.update(shape=(32,))
    return {
        "jax_fp8_quantize": ((matrix, SCALAR, SCALAR), (x, SCALES), QUANTIZE_ATTRIBUTES),
        "jax_fp8_quantize_transpose": ((matrix, transpose, SCALAR, SCALAR), (x, SCALES), QUANTIZE_ATTRIBUTES),
        "jax_fp8_quantize_transpose_sums": (
            (matrix, transpose, SCALAR, SCALAR, *sums_results((64, 32))),
            (x, SCALES),
            QUANTIZE_ATTRIBUTES,
        ),
        "jax_fp8_quantize_by_tile": (by_tile, (x,), BY_TILE_ATTRIBUTES),
        "jax_fp8_quantize_by_tile_sums": ((*by_tile, *sums_results((64, 32))), (x,), BY_TILE_ATTRIBUTES),
        "jax_fp8_activation_quantize_by_tile": (by_tile, (gated,), BY_TILE_ATTRIBUTES | swiglu),
        "jax_fp8_activation_backward_quantize_by_tile": (
            (*gradient_by_tile, transpose, row.update(shape=(1, 32)), *sums_results((64, 64))),
            (x, gated),
            BY_TILE_ATTRIBUTES | swiglu,
        ),
        "jax_fp8_norm_quantize_by_tile": (
            (*by_tile, column, column),
            (x, parameter, parameter),
            BY_TILE_ATTRIBUTES | {"epsilon": np.float32(1e-5)},
        ),
        "jax_fp8_transpose": ((transpose,), (matrix,), {}),
        "jax_fp8_take_rows": ((matrix, transpose), (matrix, jax.ShapeDtypeStruct((64,), jnp.int32)), {}),
        "jax_fp8_activation_quantize": (
            (matrix, transpose, SCALAR, SCALAR),
            (gated, SCALES),
            QUANTIZE_ATTRIBUTES | swiglu,
        ),
        "jax_fp8_activation_backward_quantize": (
            (*gradient, transpose, SCALAR, SCALAR, *sums_results((64, 64))),
            (x, gated, SCALES, SCALAR),
            QUANTIZE_ATTRIBUTES | swiglu,
        ),
        "jax_fp8_activation_amax": ((SCALAR,), (gated,), swiglu),
        "jax_fp8_activation_backward_amax": ((SCALAR,), (x, gated), swiglu),
        "jax_fp8_amax": ((SCALAR,), (x,), {}),
        "jax_fp8_cross_entropy": ((x, row, row), (x, labels, row), {"z_loss": np.float32(0.1)}),
        "jax_fp8_few_rows_gemm": (
            (product,),
            (matrix, matrix, SCALAR, SCALAR),
            {name: value for name, value in GEMM_ATTRIBUTES.items() if name not in ("fast_accumulation", "candidate")}
            | {"config": np.int32(0)},
        ),
        "jax_fp8_gemm": ((product, WORKSPACE), (matrix, matrix, SCALAR, SCALAR), GEMM_ATTRIBUTES),
        "jax_fp8_weight_gradient": ((of_weight, WORKSPACE), (x, product), {}),
    }


@needs_kernels
@needs_compiler
@pytest.mark.parametrize("target", calls())
def test_the_gpu_compiler_finds_every_handler_and_puts_it_into_a_graph(target):
    results, arguments, attributes = calls()[target]
    program = compile_call(target, results, arguments, **attributes)
    assert program.custom_calls[target] == 1
    assert program.graphs == 1  # handlers are declared safe to capture
    assert not program.outside_graphs


@needs_kernels
@needs_compiler
def test_an_unknown_target_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_fp8_unknown"):
        compile_call("jax_fp8_unknown", (SCALAR,), (SCALAR,))


@needs_kernels
@needs_compiler
@pytest.mark.parametrize(
    "attributes",
    [
        {"has_bias": False, "has_c": False},
        {**GEMM_ATTRIBUTES, "has_bias": 1.0},
        {**GEMM_ATTRIBUTES, "accumulate": True},
    ],
    ids=["missing", "wrong type", "one too many"],
)
def test_the_gemm_refuses_attributes_it_does_not_know_when_compiling(attributes):
    results, arguments, _ = calls()["jax_fp8_gemm"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"\[instantiate\]|attribute"):
        compile_call("jax_fp8_gemm", results, arguments, **attributes)
