"""The processes of benchmarks/meshes.py: those that fail, and those that compile side by side and then take turns."""

import pytest

SMALL = {"preset": "tiny", "num_layers": 1, "seq_len": 32}


def test_a_case_that_hangs_is_a_row_that_says_so(benchmark, capsys):
    meshes, mesh_cases = benchmark("meshes"), benchmark("mesh_cases")
    job = meshes.Job(mesh_cases.Case(**SMALL, mesh="data=2"))
    found = benchmark("mesh_processes").CaseProcess(job, limit=0.2).result()
    assert found["failed"].startswith("no result within 0.2 s; last seen at the start")
    assert "step_ms" not in found
    assert meshes.markdown([found]).splitlines()[-1].startswith("| data=2 | delayed | default | 16 | - |")


def test_how_a_process_ended(benchmark):
    reason = benchmark("mesh_processes").reason
    said = "phase: making the state\nphase: steps\n"
    frames = ['  File "/a.py", line 5 in block_until_ready', '  File "/b.py", line 1 in f']
    stack = "\n".join(["Thread 0x1 (most recent call first):", *frames, ""])
    assert reason(said + stack, None, 90) == "no result within 90 s; last seen at steps, in block_until_ready"
    assert reason(said + "jax.errors.JaxRuntimeError: no memory\n", 1, 90) == "jax.errors.JaxRuntimeError: no memory"
    assert reason(said, -6, 90) == "exit status -6 at steps"


def test_xla_times_its_products_alone(benchmark, monkeypatch):
    """One case of each mesh without FP8 compiles before the others, one after the other; those in FP8 beside them."""
    meshes, mesh_processes = benchmark("meshes"), benchmark("mesh_processes")
    events = []

    class Process:
        def __init__(self, job, limit, cache):
            self.job = job

        def note(self, event, word):
            events.append(
                f"{event} {word} {self.job.case.mesh} {self.job.case.recipe} {self.job.case.schedule}".strip()
            )

        let = lambda self, turn: self.note("let", turn)  # noqa: E731
        wait_until = lambda self, phase: self.note("wait", phase)  # noqa: E731

    monkeypatch.setattr(mesh_processes, "CaseProcess", Process)
    arguments = "--mesh pipe=2 data=2 --schedule 1f1b gpipe --recipe delayed bf16".split()
    mesh_processes.compile_side_by_side(meshes.jobs_of(meshes.parse(arguments)), 1.0, "cache")
    in_fp8 = ["let compile pipe=2 delayed 1f1b", "let compile pipe=2 delayed gpipe", "let compile data=2 delayed"]
    firsts = [
        f"{what} {mesh}" for mesh in ("pipe=2 bf16 1f1b", "data=2 bf16") for what in ("let compile", "wait compiled")
    ]
    assert events[:7] == in_fp8 + firsts
    assert "let compile pipe=2 bf16 gpipe" in events[7:]
    assert "wait compiled pipe=2 bf16 gpipe" in events[7:]


@pytest.mark.slow
def test_a_step_compiled_ahead_is_measured_without_compiling_it_again(benchmark, tmp_path):
    """And the one of another case is another."""
    meshes, mesh_processes, cases = benchmark("meshes"), benchmark("mesh_processes"), benchmark("mesh_cases")
    jobs = [
        meshes.Job(cases.Case(**SMALL, mesh=mesh, recipe="bf16", batch=4, cold=True), steps=1)
        for mesh in ("data=2", "fsdp=2")
    ]
    processes = mesh_processes.compile_side_by_side(jobs, 200, str(tmp_path))
    steps = {file.name for file in tmp_path.glob("jit_step-*-cache")}
    assert len(steps) == 2
    assert all(process.result()["step_ms"] > 0 for process in processes)
    assert {file.name for file in tmp_path.glob("jit_step-*-cache")} == steps


def test_what_compiles_ahead_has_times_only(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark("meshes").main(["--mesh", "data=2", "--compile-ahead", "--profile", "1"])
    assert "--compile-ahead is of times of a step as a whole" in capsys.readouterr().err
