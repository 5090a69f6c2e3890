"""What Python and C++ each write down for themselves, since each must work without the other, and must write alike.

Adam's table of arrays is compared in kernels/test_adam.py.
"""

import pathlib
import re

import cpp
import jax
import pytest

from jax_fp8.core.cast import CastRule
from jax_fp8.core.formats import E4M3, INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.kernels.activation_functions import GATED, PLAIN
from jax_fp8.kernels.casting import attributes
from jax_fp8.kernels.chain import DTYPES, LINKS
from jax_fp8.kernels.gemm import WORKSPACE_BYTES
from jax_fp8.kernels.quantize import MAX_MATRICES, ROWS_PER_PARTIAL_SUM
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES

CONSTANTS = [
    ("column_sums.h", "kRowsPerPartialSum", ROWS_PER_PARTIAL_SUM),
    ("gemm_plan.h", "kMaxCandidates", MAX_CANDIDATES),
    ("gemm_plan.h", "kWorkspaceBytes", WORKSPACE_BYTES),
    ("quantize.h", "kMaxMatrices", MAX_MATRICES),
    ("update_state.h", "kGemmRows", len({INPUT, KERNEL, OUTPUT_GRADIENT})),
]


@pytest.mark.parametrize(("file", "name", "value"), CONSTANTS, ids=lambda value: str(value))
def test_constants(file, name, value):
    assert cpp.constant(file, name) == value


def test_names_of_activations():
    found = re.findall(r'{"(\w+)", Activation::\w+, (true|false)}', cpp.source("activation.h"))
    assert {name: gated == "true" for name, gated in found} == dict.fromkeys(PLAIN, False) | dict.fromkeys(GATED, True)


def test_links_and_dtypes_of_chains():
    assert sorted(set(re.findall(r'target == "(\w+)"', cpp.source("chain.cc")))) == sorted(LINKS)
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"XLA_FFI_DataType_(\w+) = (\d+)", header)}
    short = {"bool": "PRED", "bfloat16": "BF16", "float8_e5m2": "F8E5M2", "float8_e4m3fn": "F8E4M3FN"}
    short |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "uint") for bits in (8, 16, 32)}
    short |= {"int8": "S8", "int32": "S32"}
    assert {name: numbers[short[name]] for name in DTYPES} == DTYPES


def test_attributes_of_a_scale():
    found = re.findall(r'StructMember<\w+>\("(\w+)"\)', cpp.source("scale_source_ffi.h"))
    assert found == list(attributes(CastRule(E4M3)))


@pytest.mark.parametrize(("text", "value"), [("16", 16), ("32 << 20", 2**25), ("2 * 8 + 1 - 3", 14), ("1'000", 1000)])
def test_numbers_are_read_as_cpp_means_them(tmp_path, monkeypatch, text, value):
    (tmp_path / "a.h").write_text(f"// constexpr int kA = 7;\nconstexpr int64_t kA = {text};  // bytes\n")
    (tmp_path / "b.h").write_text(f"enum class E : int {{ kOne, kAndThen = {text}, kLast }};")
    monkeypatch.setattr(cpp, "CSRC", tmp_path)
    assert cpp.constant("a.h", "kA") == value
    assert cpp.enum("b.h", "E") == {"ONE": 0, "AND_THEN": value, "LAST": value + 1}
