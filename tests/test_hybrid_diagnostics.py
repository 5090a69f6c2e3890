"""Diagnostics on meshes of CPU devices: the same tensors as on one device, and on stages of a pipeline the same numbers.

Where a mesh splits the batch or the features, each device measures its part, and the worst part counts.
"""

import functools
import math

import hybrid
import jax
import numpy as np
import pytest

import jax_fp8 as fp8

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling()}
MICROBATCHES = 4


@functools.cache
def diagnosed(recipe: str, schedule: str | None = None, sequence: bool = False, **axes: int) -> dict:
    """What the second step says; the state after it has the bits of one that was not diagnosed."""
    model = hybrid.gpt(RECIPES[recipe], num_layers=4, hidden_size=64)
    options = {"mesh": hybrid.make_mesh(**axes), "sequence_parallel": sequence, "schedule": schedule} if axes else {}
    tx = fp8.fused_adamw(1e-3, skip_nonfinite=True)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPES[recipe], MICROBATCHES, **options)
    batch = hybrid.tokens()
    state = step.init_state(model.init, jax.random.key(0), batch[:, :-1])
    state, _ = step(state, batch)
    plain = jax.tree.map(lambda leaf: leaf.copy(), state)
    plain, _ = step(plain, batch)
    state, metrics = step(state, batch, diagnose=True, skip_above=math.inf)
    assert int(metrics["skipped"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state, plain)
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


@pytest.mark.parametrize(
    ("recipe", "schedule"), [("delayed", "1f1b"), ("current", "interleaved"), ("delayed", "zero-bubble")]
)
def test_stages_find_the_numbers_of_one_device(recipe, schedule):
    one, other = diagnosed(recipe), diagnosed(recipe, schedule, pipe=2)
    assert len(other["tensors"]) == 4 * 4 * 3 and all(row["error"] for row in other["tensors"])
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
    assert found["norm"] < 0.1 and found["error"] < 0.2 and found["amax"] < 0.1 and found["scale"] < 0.1
    kernels = [row for row in other["tensors"] if row["tensor"] == "kernel"]
    assert all(0.015 < row["error"] < 0.04 for row in kernels)
