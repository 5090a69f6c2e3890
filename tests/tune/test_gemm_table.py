"""Tables of tuned GEMMs: on disk, as a value, printed, and handed to the GEMMs of the machine they belong to."""

import json
import os
import pathlib

import jax
import pytest

from jax_fp8.kernels import extension
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem, ranks_in_use
from jax_fp8.tune.gemm_table import Choice, GemmTable, default_path, this_gpu, tuned_gemms


def problem(m=32, n=48, k=64, b="float8_e4m3fn", **others) -> GemmProblem:
    settings = {"dtype": "bfloat16", "has_bias": False, "has_c": False, "accumulation": "fast"} | others
    return GemmProblem(m, n, k, "float8_e4m3fn", b, **settings)


def table(candidates: dict[GemmProblem, int], device="NVIDIA H200") -> GemmTable:
    choices = (
        (problem, Choice(candidate, 20.0, 19.0 if candidate else 20.0)) for problem, candidate in candidates.items()
    )
    return GemmTable(device, "13.1.0", tuple(choices))


# ---- on disk --------------------------------------------------------------------------------------------------------


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
        lambda text: text.replace('"m": 32', '"m": -5'),
        lambda text: text.replace('"m": 32', '"m": 0'),
        lambda text: text.replace('"m": 32', '"m": true'),
        lambda text: text.replace('"m": 32', f'"m": {10**400}'),
        lambda text: text.replace('"has_bias": false', '"has_bias": "no"'),
        lambda text: text.replace('"has_bias": false', '"has_bias": 0'),
        lambda text: text.replace('"first_us": 20.0', '"first_us": Infinity'),
        lambda text: text.replace('"first_us": 20.0', '"first_us": 1e999'),
        lambda text: text.replace('"first_us": 20.0', '"first_us": "20"'),
        lambda text: text.replace('"best_us": 19.0', '"best_us": NaN'),
        lambda text: text.replace('"best_us": 19.0', '"best_us": -1'),
        lambda text: text.replace('"a": "float8_e4m3fn"', '"a": [1]'),
        lambda text: text.replace('"accumulation": "fast"', '"accumulation": null'),
        lambda text: text.replace('"skipped": []', '"skipped": "rank 5"'),
        lambda text: text.replace('"device": "NVIDIA H200"', '"device": ["NVIDIA H200"]'),
        lambda text: text.replace('"gemms": [', '"gemms": [5, '),
        lambda text: text.replace('"gemms": [', '"gemms": [], "gemms": ['),
        lambda text: "[" * 100_000,
        lambda text: "\udcff" + text,
    ],
    ids=[
        "half", "empty", "list", "no_k", "rank_16", "rank_text", "best_above_first", "fraction", "negative", "zero",
        "true", "huge", "bias_text", "bias_number", "infinite", "beyond_floats", "time_text", "nan", "negative_time",
        "dtype_list", "no_accumulation", "skipped_text", "device_list", "entry_number", "twice", "nested", "binary",
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_sentence_and_stays(tmp_path, damage):
    path = table({problem(): 3}).save(tmp_path / "table.json")
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_bytes(damaged.encode(errors="surrogateescape"))
    for touch in (lambda: GemmTable.load(path), lambda: table({problem(16): 1}).save(path)):
        with pytest.raises(
            ValueError, match=r"must be a file that jax_fp8 wrote, got .*; move it away and tune again"
        ) as raised:
            touch()
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500
    assert path.read_bytes() == damaged.encode(errors="surrogateescape")


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"no table of tuned GEMMs is at .*; make it with"):
        GemmTable.load(tmp_path / "table.json")


def test_what_is_no_place_for_a_table(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"must find room in .*, got (Not a directory|File exists); choose another"):
        table({problem(): 3}).save(tmp_path / "file/table.json")
    os.mkfifo(tmp_path / "pipe")
    for touch in (lambda: GemmTable.load(tmp_path / "pipe"), lambda: table({problem(): 3}).save(tmp_path / "pipe")):
        with pytest.raises(ValueError, match=r"must be a file that jax_fp8 wrote, got .*pipe \(a pipe\); move it away"):
            touch()


def test_the_default_path_names_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "jax_fp8" / "gemm" / "NVIDIA_H200-cublaslt-13.1.0.json"
    assert default_path("NVIDIA H200", "13.1.0") == path == table({problem(): 1}).save()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path("NVIDIA H200", "13.1.0") == pathlib.Path.home() / ".cache" / path.relative_to(tmp_path)


def test_the_file_is_plain_json(tmp_path):
    content = json.loads(table({problem(): 3}).save(tmp_path / "table.json").read_text())
    assert content["device"] == "NVIDIA H200" and content["cublaslt"] == "13.1.0"
    assert content["gemms"][0]["m"] == 32 and content["gemms"][0]["candidate"] == 3


# ---- as a value -----------------------------------------------------------------------------------------------------


def test_a_table_is_a_value():
    assert hash(table({problem(): 3})) == hash(table({problem(): 3})) != hash(table({problem(): 4}))
    assert table({problem(16): 1, problem(32): 2}).restricted_to([problem(32), problem(48)]) == table({problem(32): 2})


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


def test_what_gemms_see_of_a_table():
    found = table({problem(16): 3, problem(32): 0})
    assert [found.candidate(problem(m)) for m in (16, 32, 48)] == [3, 0, 0]
    with tuned_gemms(found):
        assert ranks_in_use() == {problem(16): 3}
        with tuned_gemms(None):
            assert ranks_in_use() == {}
    assert ranks_in_use() == {}
