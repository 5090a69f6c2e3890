"""Tables of tuned GEMMs: on disk, in the context, and in the program: the right rank for the right GEMM, else rank 0."""

import json
import pathlib
import re

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels import extension
from jax_fp8.kernels.tuned_gemms import (
    MAX_CANDIDATES,
    Choice,
    GemmProblem,
    GemmTable,
    default_path,
    table_in_use,
    this_gpu,
    tuned_gemms,
)

REASON = h200.missing_reason() or extension.missing_reason()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def problem(m=32, n=48, k=64, b="float8_e4m3fn", **others) -> GemmProblem:
    settings = {"dtype": "bfloat16", "has_bias": False, "has_c": False, "accumulation": "fast"} | others
    return GemmProblem(m, n, k, "float8_e4m3fn", b, **settings)


def table(candidates: dict[GemmProblem, int], device="NVIDIA H200") -> GemmTable:
    choices = (
        (problem, Choice(candidate, 20.0, 19.0 if candidate else 20.0)) for problem, candidate in candidates.items()
    )
    return GemmTable(device, "13.1.0", tuple(choices))


# ---- on disk ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    choice = Choice(3, 20.5, 19.25, ("rank 5: does not run", "rank 7 differs by 3 times what rounding explains"))
    written = GemmTable("NVIDIA H200", "13.1.0", ((problem(), choice),))
    path = written.save(tmp_path / "deep" / "table.json")
    assert GemmTable.load(path) == written and GemmTable.load(path) != table({problem(): 3})
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]  # and nothing temporary


def test_saving_adds_to_the_file_and_the_newer_choice_wins(tmp_path):
    path = tmp_path / "table.json"
    table({problem(16): 1, problem(32): 2}).save(path)
    table({problem(32): 5, problem(48): 0}).save(path)
    found = GemmTable.load(path)
    assert {p.m: found.candidate(p) for p, _ in found.choices} == {16: 1, 32: 5, 48: 0}


def test_tables_of_two_machines_do_not_mix(tmp_path):
    path = table({problem(16): 1}).save(tmp_path / "table.json")
    before = path.read_text()
    with pytest.raises(
        ValueError, match=r"for one GPU and cuBLASLt, got NVIDIA H200 .* and NVIDIA H100 .*; use another file"
    ):
        table({problem(16): 2}, device="NVIDIA H100").save(path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"k": 64,', ""),
        lambda text: text.replace('"candidate": 3', f'"candidate": {MAX_CANDIDATES}'),
        lambda text: text.replace('"candidate": 3', '"candidate": "3"'),
        lambda text: text.replace('"best_us": 19.0', '"best_us": 21.0'),
        lambda text: text.replace('"m": 32', '"m": 32.5'),
    ],
    ids=["half", "empty", "list", "no_k", "rank_16", "rank_text", "best_above_first", "fraction"],
)
def test_a_damaged_file_is_one_sentence_and_stays(tmp_path, damage):
    path = table({problem(): 3}).save(tmp_path / "table.json")
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    for touch in (lambda: GemmTable.load(path), lambda: table({problem(16): 1}).save(path)):
        with pytest.raises(ValueError, match=r"must be a file that jax_fp8 wrote, got .*; move it away and tune again"):
            touch()
    assert path.read_text() == damaged


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"no table of tuned GEMMs is at .*; make it with"):
        GemmTable.load(tmp_path / "table.json")


def test_the_default_path_names_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "jax_fp8" / "gemm" / "NVIDIA_H200-cublaslt-13.1.0.json"
    assert default_path("NVIDIA H200", "13.1.0") == path == table({problem(): 1}).save()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path("NVIDIA H200", "13.1.0") == pathlib.Path.home() / ".cache" / path.relative_to(tmp_path)


# ---- as a value ------------------------------------------------------------------------------------------------------


def test_every_field_of_a_problem_matters():
    found = table({problem(): 3})
    others = [problem(m=16), problem(n=16), problem(k=16), problem(b="float8_e5m2"), problem(dtype="float32")]
    others += [problem(has_bias=True), problem(has_c=True), problem(accumulation="split")]
    assert found.candidate(problem()) == 3
    assert [found.candidate(other) for other in others] == [0] * 8


def test_a_table_is_a_value():
    assert hash(table({problem(): 3})) == hash(table({problem(): 3})) != hash(table({problem(): 4}))
    assert table({problem(16): 1, problem(32): 2}).of([problem(32), problem(48)]) == table({problem(32): 2})


def test_a_printed_table_has_rates_and_gain():
    choice = Choice(3, 2e3, 1.6e3, ("rank 5: does not run",))
    text = str(GemmTable("NVIDIA H200", "13.1.0", ((problem(8192, 8192, 8192), choice),)))
    rate = 2 * 8192**3 / 2e-3 / 1e12
    for what in (
        "2000.0",
        "1600.0",
        f"{rate:.0f}",
        f"{rate / 0.8:.0f}",
        "25.0%",
        "(8192, 8192)",
        "rank 5: does not run",
    ):
        assert what in text, text


def test_a_table_of_another_machine_is_refused_on_a_gpu(monkeypatch):
    info = {"cublaslt_version": "13.1.0", "cublaslt_reason": None}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(extension, "build_info", lambda: info)
    kind = jax.devices()[0].device_kind
    with tuned_gemms(table({}, device=kind)):
        pass
    with pytest.raises(ValueError, match=r"must be of this GPU and cuBLASLt, .* got one of NVIDIA H200 .*; tune again"):
        tuned_gemms(table({}))
    info["cublaslt_version"] = "13.2.0"
    with pytest.raises(ValueError, match=r"and 13\.2\.0, got one of .* with cuBLASLt 13\.1\.0; tune again here"):
        tuned_gemms(table({}, device=kind))


def test_no_gpu_no_table_of_this_machine():
    with pytest.raises(ValueError, match="on the GPU that will run them, got platform 'cpu'; run this on the machine"):
        this_gpu()


# ---- in the program --------------------------------------------------------------------------------------------------


def lowered_candidates(function, *args) -> list[int]:
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return candidates_of(text)


def candidates_of(text: str) -> list[int]:
    calls = [line for line in text.splitlines() if "jax_fp8_gemm" in line]
    return [int(re.search(r"candidate = (-?\d+) : i32", line)[1]) for line in calls]


def product(m, n, k, b_dtype=E4M3, **settings):
    a, b = jnp.zeros((m, k), E4M3), jnp.zeros((n, k), b_dtype)
    return fp8.matmul(fp8.Fp8Array(a, jnp.float32(1)), fp8.Fp8Array(b, jnp.float32(1)), **settings)


def test_the_rank_reaches_its_gemm_only(with_kernels):
    def products():
        addend = jnp.zeros((32, 48), jnp.float32)
        gradient = product(32, 48, 64, E5M2, dtype=jnp.float32, c=addend, accumulation="split")
        return gradient, product(32, 48, 64), product(16, 48, 64), product(32, 48, 64, bias=jnp.zeros(48))

    gradient = problem(b="float8_e5m2", dtype="float32", has_c=True, accumulation="split")
    assert lowered_candidates(products) == [0, 0, 0, 0]
    with tuned_gemms(table({problem(): 3, gradient: 15, problem(has_bias=True): 0})):
        assert lowered_candidates(products) == [15, 3, 0, 0]
        with tuned_gemms(None):
            assert lowered_candidates(products) == [0, 0, 0, 0]
    assert lowered_candidates(products) == [0, 0, 0, 0] and table_in_use() is None


def test_a_jitted_function_is_traced_once_a_table():
    traced = []

    @jax.jit
    def function(x):
        traced.append(table_in_use())
        return x + 1

    first, second = table({problem(): 3}), table({problem(): 4})
    for used in (None, first, second, table({problem(): 3}), None):
        with tuned_gemms(used):
            function(1.0)
    assert traced == [None, first, second]


def test_a_backward_pass_uses_the_table_too(with_kernels):
    layer = fp8.Dense(48, recipe=fp8.CurrentScaling())
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def gradient(variables, x):
        return jax.value_and_grad(lambda v, x: layer.apply(v, x).astype(jnp.float32).sum(), (0, 1))(variables, x)

    wgrad = problem(64, 48, 32, b="float8_e5m2", dtype="float32", accumulation="split")
    with tuned_gemms(table({wgrad: 7, problem(has_bias=True): 2})):
        assert sorted(lowered_candidates(gradient, variables, x)) == [0, 2, 7]
    assert lowered_candidates(gradient, variables, x) == [0, 0, 0]


@compiled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_gemm_is_looked_up_by_the_shapes_of_one_device(axis_type):
    mesh = h200.mesh(axis_type, data=2)
    a = jax.ShapeDtypeStruct((32, 64), E4M3, sharding=h200.on_mesh(mesh, "data"))
    b = jax.ShapeDtypeStruct((48, 64), E4M3, sharding=h200.on_mesh(mesh))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=h200.on_mesh(mesh))

    @jax.jit
    def function(a, b, scale):
        return fp8.matmul(fp8.Fp8Array(a, scale), fp8.Fp8Array(b, scale))

    with tuned_gemms(table({problem(16): 7, problem(32): 5})):
        lowered = function.lower(a, b, scale)
    # Auto axes are partitioned now, when the context is over.
    assert candidates_of(lowered.compile().as_text()) == [7]
    assert candidates_of(function.lower(a, b, scale).compile().as_text()) == [0]


@compiled
def test_a_rank_that_no_list_has_does_not_compile():
    function = jax.jit(lambda: product(32, 48, 64), out_shardings=h200.on_one_device())
    for rank in (MAX_CANDIDATES, -1):
        with tuned_gemms(table({problem(): rank})):
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"candidate must be from 0 to 15, got {rank}"):
                function.lower().compile()
    with tuned_gemms(table({problem(): MAX_CANDIDATES - 1})):
        assert candidates_of(function.lower().compile().as_text()) == [15]


def test_both_languages_know_the_same_number_of_candidates():
    header = pathlib.Path(__file__).parents[2] / "csrc/gemm_plan.h"
    assert int(re.search(r"kMaxCandidates = (\d+);", header.read_text())[1]) == MAX_CANDIDATES


def test_the_file_is_plain_json(tmp_path):
    content = json.loads(table({problem(): 3}).save(tmp_path / "table.json").read_text())
    assert content["device"] == "NVIDIA H200" and content["cublaslt"] == "13.1.0"
    assert content["gemms"][0]["m"] == 32 and content["gemms"][0]["candidate"] == 3
