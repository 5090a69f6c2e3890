"""benchmarks/generate.py runs as a whole, and finds the kernels that a token adds."""

import json

import pytest


@pytest.mark.slow
def test_generate_runs_whole(benchmark, tmp_path):
    generate = benchmark("generate")
    assert generate.main(["--self-test", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "generate.json").read_text())["rows"]
    found = [(row["recipe"], row["reads"]) for row in rows]
    both = [(recipe, reads) for recipe in ("bf16", "delayed") for reads in ("cache", "window")]
    assert found == [*both, ("delayed, head", "cache")]
    cached = [row for row in rows if row["reads"] == "cache"]
    assert all(row["shortfall"] < 0.1 and row["distinct"] > 1 for row in cached)
    assert "| tiny | delayed | 2 | window |" in (tmp_path / "generate.md").read_text()


def test_kernels_of_a_token_are_what_its_call_adds(benchmark, monkeypatch, capsys):
    generate = benchmark("generate")
    names = [
        {"name": f"{kind}_name", "pid": 1, "tid": 2, "args": {"name": f"/device:GPU:0 {kind} Stream"}}
        for kind in ("process", "thread")
    ]
    prompt = [{"ph": "X", "name": "prompt", "pid": 1, "tid": 2, "ts": 0, "dur": 50.0}]
    token = [
        {"ph": "X", "name": name, "pid": 1, "tid": 2, "ts": 1, "dur": dur}
        for name, dur in (("gemm", 6.0), ("norm", 2.0), ("gemm", 4.0))
    ]
    traced = []
    monkeypatch.setattr(generate.kernel_profile, "record", lambda run: run() or names + prompt + token * traced[-1])

    def write(max_new_tokens):
        traced.append(max_new_tokens)

    assert generate.kernels_of_token(write, 5) == [
        {"name": "gemm", "launches": 2.0, "us": 10.0},
        {"name": "norm", "launches": 1.0, "us": 2.0},
    ]
    with pytest.raises(SystemExit):
        generate.main(["--self-test", "--profile"])
    assert "--profile needs a GPU, got cpu" in capsys.readouterr().err
