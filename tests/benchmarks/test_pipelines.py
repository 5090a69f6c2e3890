"""Table and picture of schedules, benchmarks/pipelines.py: docs/explanation/pipelines.md shows what is computed."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs/explanation/pipelines.md"


def test_the_page_shows_what_is_computed(benchmark, capsys):
    """The table, the bubbles in the words under the picture, and the timeline that its code prints."""
    pipelines = benchmark("pipelines")
    assert pipelines.main([]) == 0
    table, page = capsys.readouterr().out.strip(), PAGE.read_text()
    assert table.count("\n") == 5 and table in page
    assert pipelines.main(["--microbatches", "8"]) == 0
    assert capsys.readouterr().out.strip() not in page  # negative control
    words = " ".join(re.findall(r"!\[(.*?)\]", page, re.DOTALL))
    bubbles = re.findall(r"\| ([\d.]+%) \|", table)
    assert sorted(set(bubbles)) == sorted(re.findall(r"[\d.]+%", words))
    timeline = str(pipelines.make_timeline(pipelines.make_schedule("zero-bubble", 2, 3)))
    assert "".join(f"    {line}\n" for line in timeline.splitlines()) in page


def test_bars_of_the_picture_are_the_units(benchmark, tmp_path):
    pipelines = benchmark("pipelines")
    schedules = pipelines.make_all(2, 4, 2)
    timelines = {name: pipelines.make_timeline(schedule) for name, schedule in schedules.items()}
    figure = pipelines.draw(timelines)
    for axes, schedule, timeline in zip(figure.axes, schedules.values(), timelines.values(), strict=True):
        assert len(axes.patches) == sum(map(len, schedule.orders)) == len(axes.texts)
        assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(2 * 4 * 3)
        assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(timeline.time)
    assert pipelines.main(["--output", str(tmp_path / "a.png"), "--costs", "1", "1.5", "0.5"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--microbatches", "6"], "error: interleaved needs as many microbatches as stages, or a multiple, got 6"),
        (["--costs", "1", "0", "1"], "error: input_gradient must take a time above 0, got 0.0"),
    ],
)
def test_what_cannot_be_is_one_sentence(benchmark, capsys, arguments, sentence):
    assert benchmark("pipelines").main(arguments) == 2
    assert sentence in capsys.readouterr().err
