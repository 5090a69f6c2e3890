"""The list of cases that only `make test-all` runs: it marks those and no others, and tells names that no test has."""

from types import SimpleNamespace

import pytest
import slow_cases


def item(nodeid):
    marks = []
    return SimpleNamespace(nodeid=nodeid, add_marker=marks.append, marks=marks)


def test_listed_cases_are_marked(monkeypatch):
    cases = {"nn/test_a.py::test_b": ("data 2, tensor 2", "x[0]", "gone")}
    cases |= {"nn/test_a.py::test_whole": slow_cases.WHOLE, "nn/test_a.py::test_lost": slow_cases.WHOLE}
    monkeypatch.setattr(slow_cases, "SLOW_CASES", cases)
    names = ["[data 2, tensor 2]", "[x[0]]", "[data 2]", "[]", ""]
    items = [item(f"tests/nn/test_a.py::test_b{name}") for name in names]
    items += [item("tests/nn/test_a.py::test_c[x[0]]"), item("tests/nn/test_a.py::test_gone")]
    items += [item("tests/nn/test_a.py::test_whole"), item("tests/nn/test_a.py::test_whole[x]")]
    assert slow_cases.mark(items) == ["nn/test_a.py::test_b[gone]", "nn/test_a.py::test_lost"]
    assert [each.marks for each in items] == [[pytest.mark.slow]] * 2 + [[]] * 5 + [[pytest.mark.slow]] * 2
