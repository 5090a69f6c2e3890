"""Meshes that can be, meshes that are worth compiling for, and changes that make a step fit."""

import re
from dataclasses import replace

import pytest

from jax_fp8.plan.arithmetic import memory_of, seconds_of
from jax_fp8.plan.rates import rates_of
from jax_fp8.plan.setting import Setting
from jax_fp8.plan.shape import Shape
from jax_fp8.plan.suggest import CLOSE, GIB, left_out, meshes_of, rank, remedies

SHAPE = Shape(layers=32, width=4096, heads=32, kv_heads=8, mlp=14_336, vocab=128_256, is_gated=True, is_tied=False)
BASE = Setting(shape=SHAPE, batch=32, sequence=4096)
RATES = rates_of("h200")


def test_all_meshes_of_so_many_devices():
    found, left = meshes_of(replace(BASE, batch=8), 4)
    assert sorted(map(str, found)) == [
        "data=2,fsdp=2",
        "data=2,tensor=2",
        "data=2,tensor=2, sequence parallel",
        "data=4",
        "fsdp=2,tensor=2",
        "fsdp=2,tensor=2, sequence parallel",
        "fsdp=4",
        "tensor=4",
        "tensor=4, sequence parallel",
    ]
    assert all(setting.devices == 4 for setting in found)
    assert {one.setting.pipe for one in left} == {2, 4}
    assert {one.reason for one in left} == {
        f"pipe={stages} needs as many microbatches, or a multiple, not 1" for stages in (2, 4)
    }


def test_pipelines_in_every_schedule_where_there_are_microbatches():
    found, left = meshes_of(replace(BASE, batch=12), 2, (1, 2, 3, 4))
    assert left == [] and all(setting.devices == 2 for setting in found)
    of_pipe = [setting for setting in found if setting.pipe == 2]
    by_name = {
        name: sorted({setting.microbatches for setting in of_pipe if setting.schedule == name})
        for name in ("1f1b", "zero-bubble", "interleaved")
    }
    assert by_name == {"1f1b": [2, 3, 4], "zero-bubble": [2, 3, 4], "interleaved": [2, 4]}
    assert {setting.chunks for setting in of_pipe if setting.schedule == "interleaved"} == {2, 4, 8}  # of 32 layers
    assert sorted(setting.microbatches for setting in found if setting.data == 2) == [1, 2, 3]
    _, impossible = meshes_of(replace(BASE, batch=4), 3, (1, 2, 4))
    reasons = {one.setting.mesh: one.reason for one in impossible}
    assert reasons["pipe=3"] == "pipe=3 does not divide 32 layers"


@pytest.mark.parametrize(
    ("devices", "change", "reason"),
    [
        (4, {"by_tile": True}, "sequence parallelism does not support BlockScaling"),
        (3, {}, "tensor=3 does not divide 32 heads"),
        (16, {}, "tensor=16 is more than the 8 GPUs of a host"),
        (4, {"batch": 2}, "4 parts do not divide a batch of 2"),
        (2, {"batch": 2, "microbatches": 2}, "4 parts do not divide a batch of 2"),
        (4, {"shape": replace(SHAPE, kv_heads=6, heads=24, width=6144)}, "tensor=4 and 6 key and value heads"),
        (8, {"shape": replace(SHAPE, mlp=14_340)}, "tensor=8 does not divide an MLP 14340 wide"),
        (4, {"shape": replace(SHAPE, vocab=50_257)}, "tensor=4 does not divide a vocabulary of 50257"),
        (3, {"shape": replace(SHAPE, heads=33, width=33 * 128, kv_heads=33), "batch": 3}, "does not divide an MLP"),
        (5, {"batch": 5}, "fsdp=5 does not divide a width of 4096"),
        (8, {"sequence": 4, "batch": 1}, "tensor=8 does not divide 4 rows"),
    ],
)
def test_meshes_that_cannot_be(devices, change, reason):
    _, left = meshes_of(replace(BASE, **change), devices)
    assert any(reason in one.reason for one in left), left


def test_of_a_mesh_the_fastest_that_fits_is_tried():
    settings, _ = meshes_of(replace(BASE, batch=64), 4, (1, 2, 4, 8, 16, 32, 64))
    found = rank(settings, 80 * GIB, RATES, tries=100)
    assert len({(setting.mesh, setting.sequence_parallel) for setting in found.best}) == len(found.best)
    best = next(setting for setting in found.best if setting.mesh == "pipe=4")
    of_mesh = [setting for setting in settings if setting.mesh == "pipe=4"]
    fastest = min(of_mesh, key=lambda setting: seconds_of(setting, RATES))
    assert memory_of(fastest).together > 84 * GIB > memory_of(best).together  # negative control: it does not fit
    fits = [setting for setting in of_mesh if memory_of(setting).together <= 84 * GIB]
    assert seconds_of(best, RATES) == min(seconds_of(setting, RATES) for setting in fits)


def test_the_best_are_those_that_fit_and_are_fast():
    settings, _ = meshes_of(BASE, 8)
    usable = sorted(memory_of(setting).together for setting in settings)[6]
    found = rank(settings, usable, RATES, tries=3)
    seconds = [seconds_of(setting, RATES) for setting in [*found.best, *found.slower]]
    assert len(found.best) == 3 and seconds == sorted(seconds)
    assert all(memory_of(setting).together > usable for setting in found.too_large) and found.too_large
    assert sorted(map(str, [*found.best, *found.slower, *found.too_large])) == sorted(map(str, settings))
    assert rank(settings, GIB, RATES, tries=3).best == []
    faster = min(found.too_large, key=lambda setting: seconds_of(setting, RATES))
    assert seconds_of(faster, RATES) < seconds[2]  # negative control: by time alone it would be among the best


def test_what_was_left_out_is_said():
    settings, impossible = meshes_of(BASE, 16)
    ranking = rank(settings, 100 * GIB, RATES, tries=2)
    lines = left_out(ranking, impossible, RATES)
    text = " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 120
    assert ranking.slower and ranking.too_large
    for setting in ranking.slower[:8]:
        assert f"{setting} {1e3 * seconds_of(setting, RATES):.0f}" in text
    assert f"and {len(ranking.slower) - 8} more." in text
    for setting in sorted(ranking.too_large, key=lambda setting: memory_of(setting).together)[:8]:
        assert f"{setting} {memory_of(setting).together / GIB:.0f}" in text
    assert "Not tried: " in text and "tensor=16 is more than the 8 GPUs of a host (2 times)" in text
    assert left_out(rank(settings[:1], 1e15, RATES, tries=2), [], RATES) == []


def test_each_change_that_is_enough_is_a_remedy():
    setting = replace(BASE, data=4)
    needed = memory_of(setting).together
    found = {line.split(":")[0]: line for line in remedies(setting, needed, CLOSE * 0.97 * needed)}
    assert {
        "--recompute",
        "--microbatches 2",
        "--mesh fsdp=4",
        "--bf16-moments",
    } <= set(found)
    recomputed = memory_of(replace(setting, recompute=True)).together
    assert found["--recompute"] == f"--recompute: about {recomputed / GIB:.0f} GiB"
    higher = {
        line.split(":")[0]: line for line in remedies(setting, needed + 10 * GIB, CLOSE * (0.97 * needed + 10 * GIB))
    }
    assert higher["--recompute"] == f"--recompute: about {(recomputed + 10 * GIB) / GIB:.0f} GiB"


def test_a_change_that_is_not_enough_is_no_remedy():
    setting = replace(BASE, data=4)
    needed = memory_of(setting).together
    assert not any(line.startswith("--recompute") for line in remedies(setting, needed, 0.5 * needed))


def test_a_change_that_is_just_enough_by_arithmetic_is_no_remedy():
    setting = replace(BASE, data=4)
    needed = memory_of(setting).together
    usable = memory_of(replace(setting, recompute=True)).together
    assert not any(line.startswith("--recompute") for line in remedies(setting, needed, 1.01 * usable))
    assert any(line.startswith("--recompute") for line in remedies(setting, needed, 1.06 * usable))


def test_where_no_change_is_enough_several_are_or_more_gpus():
    setting = replace(BASE, data=4)
    needed = memory_of(setting).together
    together, more = remedies(setting, needed, 0.2 * needed)
    assert together.count(",") >= 2 and "all together: about" in together
    assert together.count("--microbatches") == 1  # the last of a kind counts
    assert re.match(r"(8|16|32) GPUs by --mesh fsdp=", more)
    assert remedies(setting, needed, 1e6) == []


def test_what_layers_keep_is_a_remedy_and_the_last_resort_of_several():
    setting = replace(BASE, data=4)
    needed = memory_of(setting).together
    enough = memory_of(replace(setting, offloaded=8)).together
    (found,) = (line for line in remedies(setting, needed, 1.06 * enough) if line.startswith("--remat"))
    assert found == f"--remat offload:8: about {enough / GIB:.0f} GiB"
    together, *_ = remedies(setting, needed, 0.3 * needed)
    assert "--remat" not in together
    alone = replace(BASE, batch=1)  # one sequence on one GPU: neither a mesh nor microbatches
    least = memory_of(replace(alone, full=True, bf16_moments=True, bf16_params=True)).together
    together, *_ = remedies(alone, memory_of(alone).together, 1.051 * least)
    assert "--remat " in together and "--bf16-moments" in together
    staged = replace(setting, data=1, pipe=4, microbatches=16)
    assert not any("offload" in line for line in remedies(staged, 1e12, 0.9e12))
