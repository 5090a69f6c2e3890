"""What a run shows while it trains: the line, in a hundred columns, and figures of speed in rows of the log."""

import itertools
import json
import math
import types

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.plan.peaks import peak_of
from jax_fp8.run import progress
from jax_fp8.run.devices import make_mesh
from jax_fp8.run.folder import Folder
from jax_fp8.run.logs import Logbook
from jax_fp8.run.settings import Settings
from jax_fp8.run.spikes import Watch

CPU = jax.devices("cpu")[0]
H200 = types.SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 137.26 * 2**30})
SECONDS = 0.25  # of a step


class Loss(float):
    """One that is there when the device has finished its step."""

    def __new__(cls, value, step, clock):
        made = super().__new__(cls, value)
        made.step, made.clock = step, clock
        return made

    def __float__(self):
        self.clock[0] = max(self.clock[0], self.step * SECONDS)
        return float.__float__(self)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Progress on a GPU that is not there, by a clock on which each step takes `SECONDS`."""
    numbers = itertools.count()
    monkeypatch.setenv("COLUMNS", "100")

    def make(steps, is_on_gpu=True, tokens=16_384, notes=None):
        monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
        clock = [0.0]
        folder = Folder(tmp_path, f"run{next(numbers)}", 10)
        log = Logbook(folder, "delayed")
        device, peak = (H200, peak_of("NVIDIA H200")) if is_on_gpu else (CPU, None)
        looks = Watch(log, Settings())
        shown = progress.Progress(log, steps, tokens, progress.Speed(40e9, 1, peak, device), looks, notes)

        def take(step, loss, val_loss=None, skipped=0):
            looks.options(step)
            metrics = {"loss": Loss(loss, step, clock), "skipped": skipped}
            shown.add(step, metrics, None if val_loss is None else np.float32(val_loss))

        shown.path, shown.clock = folder.path, clock
        return shown, take

    return make


def line(shown):
    return shown.bar.format_meter(**shown.bar.format_dict)


def rows(shown):
    return [json.loads(text) for text in (shown.path / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_everything_and_fits(make):
    shown, take = make(1000)
    shown.start(np.float32(10.9))
    assert "loss - val 10.900 " in line(shown)
    take(1, 10.8)
    assert "loss 10.800 val 10.900 137.3 GiB" in line(shown)  # from the first step on
    for step in range(2, 24):
        take(step, 2.0, 2.5 if step == 20 else None)
    text = line(shown)
    assert text.startswith("delayed 21/1000 |")  # two steps behind
    # 16,384 tokens in 0.25 s, of 40 GFLOP each: 2,621 TFLOP/s of a peak of 989 and 1,979.
    for part in ("loss 2.000 val 2.500", "65.5k tok/s", "265% bf16 132% fp8", "137.3 GiB", "04:04 left"):
        assert part in text
    assert len(text) <= 100 and "TF/s" not in text
    assert "2621 TF/s" in shown._parts()["tflops"]  # it is what there was no room for


@pytest.mark.parametrize("step", [7, 70_000_007])
def test_a_line_fits_whatever_it_has(step, make, monkeypatch):
    """Down to narrow terminals, where it has loss and validation."""
    notes = {"step": step, "losses": [], "val_loss": 10.123}
    for columns, part in ((100, "% bf16 "), (60, "val")):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown, take = make(99_999_999, notes=notes)
        for number in range(1, 5):
            take(step + number, 10.8)
        assert "loss 10.800 val 10.123" in line(shown) and part in line(shown) and len(line(shown)) <= columns
    assert len(line(shown)) > 40  # negative control: it is a line


def test_rows_have_the_figures_of_one_device(make):
    shown, take = make(20)
    for step in range(1, 21):
        take(step, 2.0)
    first, last = rows(shown)
    assert (first["step"], last["step"]) == (10, 20)
    assert first["tokens_per_second"] == last["tokens_per_second"] == 16_384 / SECONDS
    assert last["model_tflops"] == pytest.approx(last["tokens_per_second"] * 40e9 / 1e12, rel=1e-3)
    assert last["bf16_utilization"] == pytest.approx(last["model_tflops"] / 989, rel=1e-3)
    assert last["fp8_utilization"] == pytest.approx(last["model_tflops"] / 1979, rel=1e-3)
    assert last["peak_memory_gib"] == 137.26


def test_on_a_cpu_nothing_is_said_of_peaks(make):
    shown, take = make(10, is_on_gpu=False)
    for step in range(1, 11):
        take(step, 2.0)
    (row,) = rows(shown)
    assert row["model_tflops"] > 0 and row["tokens_per_second"] > 0
    assert row["bf16_utilization"] is row["fp8_utilization"] is row["peak_memory_gib"] is None
    assert "tok/s" in line(shown)
    assert not any(word in line(shown) for word in ("fp8", "bf16", "TF/s", "GiB"))


def test_what_is_left_has_everything_between_steps(make, monkeypatch):
    """A validation of a minute counts for the time that is left, and not for tokens/s."""
    shown, take = make(100)
    for step in range(1, 11):
        take(step, 2.0)
    before, speed = shown._seconds_left(), shown.tokens_per_second
    assert before == SECONDS * 92
    monkeypatch.setattr(shown, "_began", shown._began - 60)
    assert shown._seconds_left() > before + 60 * 9
    assert shown.tokens_per_second == speed


def test_a_program_that_is_compiled_counts_for_nothing(make):
    shown, take = make(100)
    for step in range(1, 11):
        take(step, 2.0)
    with shown.calling("step"):
        assert shown.last_step == 10  # the steps before it are read
        shown.clock[0] += 60
    assert shown._seconds_left() == SECONDS * 90
    take(11, 2.0)
    assert shown.last_step == 11 and shown.tokens_per_second == 16_384 / SECONDS
    with shown.calling("step"):  # it is not compiled again
        shown.clock[0] += 60
    assert shown._seconds_left() > 60 * 9
    assert shown.tokens_per_second == 16_384 / SECONDS


def test_a_pause_counts_for_no_speed(make):
    """The steps before it are read first; a profile and a checkpoint are such pauses."""
    shown, take = make(100)
    for step in range(1, 11):
        take(step, 2.0)
    with shown.pause():
        assert shown.last_step == 10 and shown.tokens_per_second == 16_384 / SECONDS
        shown.clock[0] += 60
    assert (shown.started, shown.counted) == (shown.clock[0], 0)
    assert shown._seconds_left() > 60 * 9  # negative control: it is part of what the rest will take


def test_a_loss_that_was_skipped_counts_for_nothing(make):
    shown, take = make(20)
    for step in range(1, 21):
        take(step, math.nan if step == 5 else float(step), skipped=step == 5)
    first, last = rows(shown)
    assert first["loss"] == (55 - 5) / 9 and last["loss"] == 15.5
    assert [json.loads(line)["step"] for line in (shown.path / "events.jsonl").read_text().splitlines()] == [5]


def test_a_run_that_goes_on_counts_its_own_steps(make):
    shown, take = make(100, notes={"step": 90, "losses": [2.0], "val_loss": math.nan})
    assert shown._seconds_left() is None
    for step in range(91, 96):
        take(step, 2.0)
    assert "delayed 93/100 |" in line(shown) and "val -" in line(shown)
    assert shown._seconds_left() == 7 * SECONDS


def test_figures_are_those_of_a_device():
    model = fp8.GPTConfig.preset("gpt2-124m")
    one, eight = (progress.Speed.for_model(model, make_mesh(f"data={count}")) for count in (1, 8))
    assert one.figures(8e4)["model_tflops"] == pytest.approx(8 * eight.figures(8e4)["model_tflops"], rel=1e-3)
    assert one.figures(None) == dict.fromkeys(one.figures(1.0))


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (999, "999"), (999.7, "1k"), (12_345, "12.3k"), (1.234e6, "1.23M")]
)
def test_numbers_are_short(value, text):
    assert progress._short(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.0, "2.000"), (math.nan, "-"), (7.2288e17, "7.23e+17")])
def test_losses_are_short(value, text):
    assert progress._number(value) == text
