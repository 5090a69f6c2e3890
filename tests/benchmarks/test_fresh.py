"""Measurements in processes of their own (benchmarks/fresh.py): whose memory they take, and what is compiled before."""

import pytest


@pytest.mark.parametrize("own", [None, "0.5"])
def test_memory_is_what_the_caller_says_or_most_of_it(benchmark, tmp_path, monkeypatch, own):
    fresh, name = benchmark("fresh"), "XLA_PYTHON_CLIENT_MEM_FRACTION"
    script = tmp_path / "script.py"
    script.write_text(f"import json, os, sys; json.dump(os.environ[{name!r}], open(sys.argv[-1], 'w'))")
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    job = benchmark("gpt_step").Job("bf16", benchmark("gpt_step").SHAPES["tiny"], 1, 1, False)
    assert fresh.measure_in_fresh_process(script, job)[0] == (own or "0.92")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["delayed", "block_head_cached"])
def test_what_was_compiled_ahead_is_not_compiled_again(benchmark, tmp_path, variant):
    gpt_step = benchmark("gpt_step")
    job = gpt_step.Job(variant, gpt_step.SHAPES["tiny"], microbatches=2, steps=1, profile=False)
    environment = gpt_step.compile_side_by_side(gpt_step.HERE, [job], str(tmp_path))
    steps = {file.name for file in tmp_path.glob("jit_step-*-cache")}
    assert len(steps) == 1
    found, _ = gpt_step.measure_in_fresh_process(gpt_step.HERE, job, **environment)
    assert found["step_ms"] > 0 and {file.name for file in tmp_path.glob("jit_step-*-cache")} == steps
