"""The whole page: self-contained, escaped, small, and there even if files are missing."""

import collections
import html.parser
import re
import time

import numpy as np
import pytest
from run_logs import GEMMS, TENSORS, break_gradient, freeze, healthy, put_outliers

from jax_fp8.report.diagnosed import Diagnosed
from jax_fp8.report.page import make_page, write_report
from jax_fp8.report.run_folder import FILES, read_run

VOID = {"meta", "input", "br", "wbr", "link", "img"}


class Checked(html.parser.HTMLParser):
    """Elements that are not closed in order, and addresses that a browser would load."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.names, self.wrong, self.addresses = [], [], [], []
        self.feed(page)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "onclick")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def full(layers=2, count=40):
    log, other = healthy(layers, count), healthy(layers, count, run="bf16", seed=1)
    freeze(log, "h_1/mlp/down", "input", count // 3)
    break_gradient(log, "h_0/mlp/down", count // 2)
    for row in other.diagnostics:
        row["tensors"] = []
    log.metrics += other.metrics
    log.diagnostics += other.diagnostics
    log.events = [log.diagnostics[5] | {"step": 57, "event": "skipped", "loss": 9.0, "limit": 5.0, "fault": "odd"}]
    return log


def test_a_page_has_all_sections_and_needs_no_network(tmp_path):
    path = write_report(full().write(tmp_path / "mine"))
    assert path == tmp_path / "mine/report.html"
    page = path.read_text()
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Findings",
        "Curves",
        "FP8 health of delayed",
        "Worst-scaled tensors of delayed",
        "Gradient norms of delayed",
        "Gradient norms of bf16",
        "Events",
        "Configuration",
    ]
    found = Checked(page)
    assert found.wrong == [] and found.addresses == [] and "link" not in found.names and "img" not in found.names
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", page)
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert "The input of h_1/mlp/down saturated" in page
    assert "The gradient of h_0/mlp/down has 1 element" in page


def test_the_check_finds_what_is_wrong():
    found = Checked('<p><b>a</p><img src="x.png">')
    assert found.wrong == ["p", "p"] and found.addresses == ["x.png"]


def test_every_color_of_the_script_is_in_both_themes(tmp_path):
    page = make_page(read_run(full().write(tmp_path / "mine")))
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    light, dark = (set(re.findall(r"--(\w+):", part)) for part in style.split("@media (prefers-color-scheme: dark)"))
    asked = set(re.findall(r'colorOf\("(\w+)"\)', page)) | {"broken", "empty"}
    for colors in re.findall(r'"colors":\[(.*?)\]', page):
        asked |= set(re.findall(r'"(\w+)"', colors))
    assert len(asked) > 15 and asked <= light and asked <= dark


EVIL = "</script><script>alert(\"1\")</script><img src=x onerror='alert(2)'>&amp;\ud800"


def test_everything_that_comes_from_files_is_escaped(tmp_path):
    log = full()
    log.config = {
        "settings": {"preset": EVIL, "recipe": EVIL, "steps": EVIL},
        "model": {"num_layers": EVIL},
        EVIL: EVIL,
    }
    log.config["device"] = EVIL
    for row in (*log.metrics, *log.diagnostics, *log.events):
        row["run"] += EVIL
        for entry in (*row.get("tensors", ()), *row.get("gradients", ())):
            entry["layer"] += EVIL
    log.diagnostics[3]["tensors"][0]["tensor"] = EVIL
    log.events[0] |= {"event": EVIL, "fault": EVIL}
    log.events.append(log.events[0] | {"event": "skipped", "step": 58})
    page = write_report(log.write(tmp_path / "<b>mine")).read_text(encoding="utf-8")
    harmless = Checked(make_page(read_run(full().write(tmp_path / "mine"))))
    found = Checked(page)
    assert "alert(&quot;1&quot;)" in page and found.wrong == [] and found.addresses == []
    assert found.names.count("script") == harmless.names.count("script") == 4
    assert not re.search("<script>alert|<img|<b>mine", page)


def test_a_page_without_diagnostics_says_how_to_get_them(tmp_path):
    path = healthy().write(tmp_path / "mine")
    (path / "diagnostics.jsonl").unlink()
    page = write_report(path).read_text()
    assert "--diagnose-every 10" in page and "No findings" in page and "FP8 health" not in page


@pytest.mark.parametrize("name", FILES)
def test_any_one_file_makes_a_page(tmp_path, name):
    path = full().write(tmp_path / "mine")
    for other in FILES:
        if other != name:
            (path / other).unlink()
    assert Checked(write_report(path).read_text()).wrong == []
    (path / name).write_text("")
    assert Checked(write_report(path).read_text()).wrong == []


def test_a_model_of_one_layer_and_one_diagnosed_step(tmp_path):
    page = make_page(read_run(healthy(layers=1, count=1).write(tmp_path / "mine")))
    assert Checked(page).wrong == [] and "No findings in 1 diagnosed step" in page


def test_a_large_log_gives_a_small_page_soon(tmp_path):
    """24 layers; the time is that of a tenth of 2,000 diagnosed steps, and columns are as many as there can be."""
    path = full(layers=24, count=250).write(tmp_path / "mine")
    began = time.process_time()
    written = write_report(path)
    assert time.process_time() - began < 10
    assert written.stat().st_size < 3e6


def everything_stands_out(layers, count=12):
    """Every tensor has a finding, and every step was skipped."""
    log = healthy(layers, count)
    for layer in range(layers):
        for gemm in GEMMS:
            for tensor in TENSORS:
                put_outliers(log, f"h_{layer}/{gemm}", tensor, 0)
            break_gradient(log, f"h_{layer}/{gemm}", count // 2)
    log.events = [row | {"event": "skipped", "limit": 5.0} for row in log.diagnostics]
    return log


def test_what_is_computed_of_all_tensors_is_computed_once(tmp_path, monkeypatch):
    """And not once for each of them, which took 22 times as long for 4,000 tensors as for 500."""
    calls = collections.Counter()

    def counting(name, function):
        def counted(*arguments):
            calls[name] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(np, "median", counting("medians", np.median))
    for name in ("broken_tensors", "broken_gradients"):
        monkeypatch.setattr(Diagnosed, name, property(counting(name, vars(Diagnosed)[name].fget)))
    of_few, of_many = (
        (make_page(read_run(everything_stands_out(layers).write(tmp_path / str(layers)))), calls.copy(), calls.clear())
        for layers in (2, 20)
    )
    assert of_few[1] == of_many[1] and min(of_few[1].values()) > 0 and len(of_few[1]) == 3
    assert of_many[0].count("has outliers") + of_many[0].count("may have outliers") == 10 * (
        of_few[0].count("has outliers") + of_few[0].count("may have outliers")
    )


def test_the_time_grows_with_the_tensors(tmp_path):
    """Ten times of them, and less than thirty times the time."""
    seconds = []
    for layers in (10, 100):
        folder = read_run(everything_stands_out(layers, 4).write(tmp_path / str(layers)))
        began = time.process_time()
        make_page(folder)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 30 * seconds[0]


def test_a_link_in_place_of_the_page_is_replaced(tmp_path):
    path, precious = healthy(layers=1, count=2).write(tmp_path / "mine"), tmp_path / "precious"
    precious.write_text("precious")
    (path / "report.html").symlink_to(precious)
    assert Checked(write_report(path).read_text()).wrong == []
    assert precious.read_text() == "precious" and not (path / "report.html").is_symlink()
    (tmp_path / "device").symlink_to("/dev/null")
    with pytest.raises(ValueError, match=r"must be written to a file, got Not a regular file for .*device; choose"):
        write_report(path, tmp_path / "device")


def test_another_place_for_the_page(tmp_path):
    path = healthy(layers=1, count=2).write(tmp_path / "mine")
    assert write_report(path, tmp_path / "page.html") == tmp_path / "page.html"
    assert not (path / "report.html").exists()
    with pytest.raises(ValueError, match=r"written to a file, got No such file .*; choose another with --output"):
        write_report(path, tmp_path / "nowhere/page.html")
