"""The benchmark of meshes with stages: benchmarks/meshes.py measures pipelines, and computes the bubble beside them.

Times mean nothing here.
"""

import re

import numpy as np
import pytest


def test_the_step_of_a_case_runs_its_schedule(benchmark):
    mesh_cases = benchmark("mesh_cases")
    sizes = {"preset": "tiny", "num_layers": 4, "seq_len": 32, "batch": 4, "microbatches": 2}

    def ticks(**how):
        case = mesh_cases.Case(recipe="bf16", **sizes, **how)
        training = mesh_cases.build(case)
        tokens = training.place(np.zeros((case.sequences, 33), np.int32))
        lengths = re.findall(r"\blength=(\d+)", str(training.step.trace(training.shapes, tokens).jaxpr))
        return None if case.pipeline is None else len(case.pipeline.table), {int(length) for length in lengths}

    of_one, found_in_one = ticks(mesh="data=1")
    of_stages, found = ticks(mesh="pipe=2", schedule="interleaved")
    assert of_one is None and of_stages in found and of_stages not in found_in_one


def names_of(benchmark, arguments):
    meshes = benchmark("meshes")
    return [f"{job.case.mesh} {job.case.name}" for job in meshes.jobs_of(meshes.parse(arguments.split()))]


def test_every_schedule_is_a_case_of_meshes_with_stages(benchmark):
    arguments = "--mesh data=2 pipe=2 pipe=2,tensor=2+sequence --schedule zero-bubble interleaved --chunks 3"
    of_stages = ["delayed, zero-bubble, 8 microbatches", "delayed, interleaved with 3 chunks, 8 microbatches"]
    assert names_of(benchmark, arguments) == [
        "data=2 delayed",
        *(f"{mesh} {name}" for mesh in ("pipe=2", "pipe=2,tensor=2+sequence") for name in of_stages),
    ]
    assert names_of(benchmark, "--mesh pipe=2 --microbatches 4") == ["pipe=2 delayed, 1f1b, 4 microbatches"]


def test_with_and_without_graphs_are_two_cases(benchmark):
    meshes = benchmark("meshes")
    jobs = meshes.jobs_of(meshes.parse("--mesh pipe=2 --schedule 1f1b gpipe --graphs default none".split()))
    found = [(job.case.schedule, job.case.graphs) for job in jobs]
    assert found == [("1f1b", "default"), ("1f1b", "none"), ("gpipe", "default"), ("gpipe", "none")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--mesh data=2 --schedule 1f1b", "a schedule and chunks are about the axis pipe, got data=2"),
        ("--mesh pipe=2 --schedule 1f1b zero-bubble --chunks 2", "1f1b has one chunk of layers on each stage"),
        ("--mesh pipe=5", "must have the same number of layers, got 24 layers for 5 stages"),
        ("--mesh pipe=2 --microbatches 1", "needs as many microbatches as stages, or more, got 1 microbatches"),
        ("--mesh pipe=2 --recipe plain", "plain has no pipeline, got pipe=2"),
        ("--mesh pipe=2 --batch 9", "as many sequences in each part of each microbatch, got 9 for 8 microbatches"),
        ("--mesh pipe=2 --costs 1 0 1", "input_gradient must take a time above 0"),
    ],
)
def test_pipelines_that_cannot_be_are_one_sentence(benchmark, arguments, sentence, capsys):
    meshes = benchmark("meshes")
    assert meshes.main([*arguments.split(), "--total", "0"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_the_bubble_is_that_of_the_schedule(benchmark):
    """As published: (P - 1) / (M + P - 1), with v chunks (P - 1) / (v M + P - 1); none without stages."""
    meshes, mesh_cases = benchmark("meshes"), benchmark("mesh_cases")

    def bubble(costs=(1.0, 1.0, 1.0), **case):
        names = ("forward", "input_gradient", "weight_gradient")
        costs = meshes.Costs(**dict(zip(names, costs, strict=True)))
        return meshes.computed_bubble(mesh_cases.Case(**case), costs).get("bubble")

    assert bubble(mesh="data=2") is None
    assert bubble(mesh="pipe=4", microbatches=16) == pytest.approx(3 / 19)
    assert bubble(mesh="pipe=4", microbatches=16, schedule="interleaved", chunks=3) == pytest.approx(3 / 51)
    zero_bubble = {"mesh": "pipe=2", "microbatches": 8, "schedule": "zero-bubble"}
    assert bubble(**zero_bubble) == pytest.approx(1 / 25)
    assert bubble((1.0, 1.2, 0.8), **zero_bubble) > bubble(**zero_bubble)
