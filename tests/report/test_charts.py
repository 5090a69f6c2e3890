"""Curves: ticks, what is kept of a long one, and letters that do not stretch."""

import html
import json
import re

import numpy as np
import pytest

from jax_fp8.report.charts import POINTS, Chart, Curve, draw, thin, ticks_of


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 5, 10]),
        (2.9, 9.2, [2, 4, 6, 8, 10]),
        (0, 92_200, [0, 50_000, 100_000]),
        (3, 3, [3, 4, 5, 6]),
        (0, 5e-324, [0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_hold_all(low, high, ticks):
    assert ticks_of(low, high, 4) == pytest.approx(ticks)


@pytest.mark.parametrize("seed", range(20))
def test_ticks_hold_all(seed):
    low, high = np.sort(np.random.default_rng(seed).normal(size=2) * 10.0 ** np.arange(seed, seed + 2))
    ticks = ticks_of(low, high, 4)
    assert ticks[0] <= low + 1e-6 * (high - low) and ticks[-1] >= high - 1e-6 * (high - low) and 2 <= len(ticks) <= 8


def test_ticks_of_what_is_nearly_the_same():
    ticks = ticks_of(3.0, np.nextafter(3.0, 4.0), 4)
    assert ticks == ticks_of(3.0, 3.0, 4)


def test_a_long_curve_keeps_its_spike_and_its_ends():
    values = np.full(100_000, 3.0)
    values[54_321], values[70_000] = 9.0, 1.0
    kept = thin(Curve("a", np.arange(100_000), values))
    assert len(kept.steps) <= POINTS + 1 and kept.steps[-1] == 99_999
    assert kept.steps[np.argmax(kept.values)] == 54_321 and kept.values.min() == 1.0
    short = Curve("a", np.arange(10), values[:10])
    assert thin(short) is short


def test_a_curve_lies_where_its_numbers_are():
    curve = Curve("delayed", np.array([0, 50, 100]), np.array([0.0, np.nan, 10.0]))
    drawn = draw(Chart("Loss", "nats", [curve], marks=(25,)), 100)
    assert 'd="M0.0 1000.0L1000.0 0.0"' in drawn  # from the lower left to the upper right; no NaN
    assert 'class="mark" d="M250.0 0V1000"' in drawn
    for place, text in (("top:0.00%", "10"), ("top:100.00%", "0"), ("left:100.00%", "100")):
        assert f'style="{place}">{text}</span>' in drawn
    assert "<text" not in drawn and "nan" not in drawn
    points = json.loads(html.unescape(re.search('data-curves="(.*?)"', drawn)[1]))
    assert points == {"last": 100, "curves": [[[0, 100], [0.0, 10.0]]]}


def test_few_validations_are_dots():
    curve = Curve("a", np.array([0, 100]), np.array([1.0, 2.0]))
    assert 'class="dot' not in draw(Chart("Loss", "nats", [curve]), 100)
    assert draw(Chart("Loss", "nats", [curve._replace(dotted=True)]), 100).count("h0") == 2


def test_nothing_known_is_no_chart():
    unknown = Curve("a", np.array([0, 100]), np.full(2, np.nan))
    assert draw(Chart("Memory", "GiB", [unknown]), 100) == ""


def test_labels_are_escaped():
    curve = Curve('<script>"', np.array([0, 100]), np.array([1.0, 2.0]))
    drawn = draw(Chart("<u>", "<q>", [curve]), 100)
    assert not re.search("<script|<u>|<q>", drawn) and "&lt;script&gt;&quot;" in drawn
