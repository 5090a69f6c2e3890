"""Steps of the example that are not taken: the limit of a loss, what is said of a step that was skipped, when a run
ends; and the same as curves.
"""

import json
import math
import statistics

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.run import batches as batching
from jax_fp8.run import spikes, train
from jax_fp8.run.folder import Folder
from jax_fp8.run.logs import Logbook
from jax_fp8.run.settings import Settings


def noisy(steps, seed=0):
    """Losses that fall from 8 to 3, with noise of 2 %."""
    noise = np.random.default_rng(seed).normal(1, 0.02, steps)
    return [float(loss) for loss in (3 + 5 * np.exp(-np.arange(steps) / 60)) * noise]


def test_a_spike_is_above_the_limit_and_noise_is_not():
    found, limits, losses = spikes.Spikes(True), {}, noisy(1000)
    for step, loss in enumerate(losses, 1):
        limits[step] = found.limit(step)
        found.take(step, loss, False)
    assert all(limits[step] == spikes.NO_LIMIT for step in range(1, 51))  # 48 losses, of which two are not read yet
    assert limits[51] < spikes.NO_LIMIT
    assert all(loss < limits[step] for step, loss in enumerate(losses, 1))
    assert 1.1 * losses[-1] < limits[1000] < 1.3 * losses[-1]
    known = losses[1000 - 3 - 64 : 1000 - 3]
    median = statistics.median(known)
    deviation = 1.4826 * statistics.median(abs(loss - median) for loss in known)
    assert limits[1000] == median + 6 * deviation


def test_spikes_hardly_move_the_limit():
    """Those that came before there was a limit, or are not far above."""
    clean, spiky = spikes.Spikes(True), spikes.Spikes(True)
    for step, loss in enumerate(noisy(300), 1):
        clean.take(step, loss, False)
        spiky.take(step, 50.0 if step % 16 == 0 else loss, False)
    assert spiky.limit(301) == pytest.approx(clean.limit(301), rel=0.05)


def test_losses_that_do_not_move_at_all_have_a_limit_beside_them():
    found = spikes.Spikes(True)
    for step in range(1, 100):
        found.take(step, 2.0, False)
    assert found.limit(100) == pytest.approx(2.12)


def test_a_limit_is_that_of_its_step_whatever_is_read_already():
    """So a run that was interrupted, and has read all losses then, has the limits of one that was not."""
    found, losses = spikes.Spikes(True), noisy(200)
    for step, loss in enumerate(losses, 1):
        late = spikes.Spikes(True, json.loads(json.dumps(found.notes())))  # knows the losses up to step - 1
        found.take(step, loss, step == 150)
        if step + 2 <= 200:
            assert late.limit(step + 2) == found.limit(step + 2)
            late.take(step, loss, step == 150)
            assert late.limit(step + 3) == found.limit(step + 3)
    assert found.notes()["losses"][-1] == (200, losses[-1])
    assert 150 not in dict(found.notes()["losses"]) and 149 in dict(found.notes()["losses"])


def test_without_limits_only_what_is_no_number_is_skipped():
    found = spikes.Spikes(False)
    for step, loss in enumerate(noisy(100), 1):
        found.take(step, loss, False)
    assert found.limit(101) == spikes.NO_LIMIT


# --- what is said of it -----------------------------------------------------------------------------------------------

TENSOR = {"layer": "layer_0/mlp/down", "tensor": "input", "amax": 1.23456789, "scale": 2.0, "headroom": 0.5,
          "saturated": 0.125, "underflowed": 0.0, "nonfinite": 0.0, "error": None}  # fmt: skip
ROWS = {"tensors": [TENSOR, TENSOR | {"saturated": 0.25}], "gradients": [{"layer": "a", "norm": 3.0, "nonfinite": 0}]}


class Rows:
    """Diagnostics of a step."""

    def rows(self):
        return ROWS


@pytest.fixture
def make(tmp_path):
    """A watch, with a function that reads a step and returns what is said; and one that reads a log."""

    def make(diagnose=None, **options):
        folder = Folder(tmp_path, "mine", 10)
        log = Logbook(folder, "delayed")
        watch, said = spikes.Watch(log, Settings(**options), diagnose), []

        def read(step, loss, skipped, **others):
            watch.options(step)
            watch.read(step, {"loss": np.float32(loss), "skipped": np.int32(skipped)} | others, said.append)
            return said

        def rows(name):
            path = folder.path / f"{name}.jsonl"
            return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

        return watch, read, rows

    return make


def test_a_step_that_was_skipped_is_told_with_its_fault(make):
    asked = []
    _, read, rows = make(lambda step: asked.append(step) or Rows())
    assert read(1, 2.0, 0) == [] and rows("events") == []
    said = read(2, math.nan, 1)
    fault = fp8.find_fault(ROWS)
    assert asked == [2] and fault is not None
    assert said == [f"step 2 of delayed was skipped: its loss is nan; {fault}"]
    (row,) = rows("events")
    assert row["tensors"][0]["amax"] == 1.2346 and row["tensors"][0]["error"] is None
    row.pop("tensors")
    expected = {"run": "delayed", "step": 2, "event": "skipped", "loss": None, "limit": None, "fault": fault}
    assert row == expected | {"gradients": ROWS["gradients"]}


def test_a_step_above_the_limit_is_told_with_the_limit(make):
    watch, read, rows = make(skip_spikes=True, stop_after_skips=2)
    for step in range(1, 61):
        read(step, 2.0, 0)
    assert watch.options(61) == {"skip_above": pytest.approx(2.12), "diagnose": False}
    assert read(61, 5.0, 1) == ["step 61 of delayed was skipped: its loss is 5, above 2.12"]
    assert rows("events")[0]["limit"] == pytest.approx(2.12) and "tensors" not in rows("events")[0]


def test_a_run_ends_when_nothing_is_learnt(make):
    watch, read, rows = make(stop_after_skips=3)
    for step, skipped in enumerate((1, 1, 0, 1, 1), 1):
        read(step, math.nan, skipped)
    assert watch.notes()["spikes"]["skipped"] == 2
    sentence = (
        r"^3 steps of delayed in a row were skipped, the last of them is 6: its loss is inf; lower --learning-rate"
    )
    with pytest.raises(FloatingPointError, match=sentence):
        read(6, math.inf, 1)
    events = [(row["step"], row["event"]) for row in rows("events")]
    assert events == [(step, "skipped") for step in (1, 2, 4, 5, 6)] + [(6, "stopped")]


def test_every_few_steps_are_diagnosed(make):
    watch, read, rows = make(lambda step: pytest.fail("it is diagnosed already"), diagnose_every=3)
    assert [watch.options(step)["diagnose"] for step in range(1, 8)] == [False, False, True] * 2 + [False]
    read(3, 2.0, 0, diagnostics=Rows())
    read(6, math.nan, 1, diagnostics=Rows())
    assert [(row["step"], row["loss"]) for row in rows("diagnostics")] == [(3, 2.0), (6, None)]
    assert rows("diagnostics")[0]["tensors"] == rows("events")[0]["tensors"]


def test_a_diagnosis_that_has_no_memory_ends_no_run(make):
    asked = []

    def diagnose(step):
        asked.append(step)
        raise jax.errors.JaxRuntimeError(f"{message}: 8 GiB")

    _, read, rows = make(diagnose, stop_after_skips=9)
    message = "RESOURCE_EXHAUSTED"
    read(1, math.nan, 1)
    said = read(2, math.nan, 1)
    assert asked == [1] and said[0].startswith("there is not enough device memory to diagnose skipped steps")
    assert said[1:] == [f"step {step} of delayed was skipped: its loss is nan" for step in (1, 2)]
    assert [row["fault"] for row in rows("events")] == [None, None]
    _, read, _ = make(diagnose)
    message = "INTERNAL"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        read(1, math.nan, 1)


# --- in a run ---------------------------------------------------------------------------------------------------------


def test_a_batch_of_noise_is_skipped(book, tmp_path, monkeypatch, capsys):
    """Once there is a limit: the same batch before it is a step like others."""
    options = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16"
    make, noise = batching.training_batch, np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)
    monkeypatch.setattr(batching, "training_batch", lambda *all: noise if all[1] in (20, 57) else make(*all))
    options += " --recipe bf16 --steps 60 --sample-tokens 0 --learning-rate 1e-2 --skip-spikes --diagnose-every 1"
    assert train.main([*options.split(), "--data", str(book), "--output", str(tmp_path), "--name", "mine"]) == 0
    diagnosed, events, rows = (
        [json.loads(line) for line in (tmp_path / f"mine/{name}.jsonl").read_text().splitlines()]
        for name in ("diagnostics", "events", "metrics")
    )
    (event,), losses = events, {row["step"]: row["loss"] for row in diagnosed}
    assert (event["step"], event["event"], event["tensors"], event["fault"]) == (57, "skipped", [], None)
    assert event["loss"] == losses[57] > event["limit"] > losses[58] and losses[20] > 1.2 * losses[19]
    assert f"step 57 of bf16 was skipped: its loss is {losses[57]:.4g}, above" in capsys.readouterr().out
    assert rows[-1]["step"] == 60
    assert rows[-1]["loss"] == pytest.approx(sum(losses[step] for step in range(51, 61) if step != 57) / 9)
