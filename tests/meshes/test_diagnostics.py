"""Diagnostics on meshes of CPU devices: the tensors of one device, and on stages of a pipeline its numbers.

Where a mesh splits the batch or the features, each device measures its part, and the worst part counts.
"""

import functools
import math

import hybrid
import jax
import pytest

import jax_fp8 as fp8

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling()}
MICROBATCHES = 2


SLOW_ONE = pytest.param("current", "zero-bubble", marks=pytest.mark.slow)


@functools.cache
def diagnosed(recipe: str, schedule: str | None = None, sequence: bool = False, **axes: int) -> dict:
    """What a second step says."""
    model = hybrid.gpt(RECIPES[recipe], num_layers=2, hidden_size=64)
    mesh = hybrid.make_mesh(**axes) if axes else None
    options = hybrid.spread(mesh, sequence_parallel=sequence, schedule=schedule)
    tx = fp8.fused_adamw(1e-3, skip_nonfinite=True)
    options |= {"warm_start": False}  # a program of its own
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPES[recipe], MICROBATCHES, **options)
    batch = hybrid.tokens()
    variables = hybrid.with_scales(jax.jit(model.init)(jax.random.key(0), batch[:, :-1]))
    state = step.place(fp8.TrainState.create(variables=variables, tx=tx), batch)
    for _ in range(2):
        state, metrics = step(state, batch, diagnose=True, skip_above=math.inf)
        assert int(metrics["skipped"]) == 0
    return metrics["diagnostics"].rows()


def differences(one: dict, other: dict) -> dict[str, float]:
    """By number, the largest relative difference; of shares, which are of few elements, the difference."""
    found: dict[str, float] = {}
    for kind in ("tensors", "gradients"):
        for row, same in zip(one[kind], other[kind], strict=True):
            assert (row["layer"], row.get("tensor")) == (same["layer"], same.get("tensor"))
            for name in row.keys() - {"layer", "tensor"}:
                size = abs(row[name]) if name in ("amax", "scale", "headroom", "error", "norm") else 1
                found[name] = max(found.get(name, 0), abs(row[name] - same[name]) / size)
    return found


@pytest.mark.parametrize(("recipe", "schedule"), [("delayed", "1f1b"), SLOW_ONE])
def test_stages_find_the_numbers_of_one_device(recipe, schedule):
    one, other = diagnosed(recipe), diagnosed(recipe, schedule, pipe=2)
    assert len(other["tensors"]) == 2 * 4 * 3 and all(row["error"] for row in other["tensors"])
    assert max(differences(one, other).values()) < 1e-4
    other["tensors"][7]["error"] *= 1.01  # which would be noticed
    assert differences(one, other)["error"] > 1e-3
    other["tensors"][7]["error"] /= 1.01


@pytest.mark.parametrize(
    ("axes", "sequence"), [({"fsdp": 2}, False), ({"data": 2, "tensor": 2}, True)], ids=["fsdp", "tensor"]
)
def test_parts_find_the_tensors_of_one_device(axes, sequence):
    one, other = diagnosed("delayed"), diagnosed("delayed", sequence=sequence, **axes)
    found = differences(one, other)
    assert found["norm"] < 0.1 and found["error"] < 0.4 and found["amax"] < 0.1 and found["scale"] < 0.1
    kernels = [row for row in other["tensors"] if row["tensor"] == "kernel"]
    assert all(0.015 < row["error"] < 0.04 for row in kernels)
