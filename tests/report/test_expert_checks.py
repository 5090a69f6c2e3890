"""Findings about experts: those that no token goes to, and nothing where experts are used."""

import pytest
from run_logs import healthy, with_experts

from jax_fp8.report.diagnosed import gather, sample_of
from jax_fp8.report.expert_checks import LASTING, check_experts
from jax_fp8.report.page import write_report


def starve(log, column, layer=1, share=0.0):
    log.diagnostics[column]["experts"][layer]["fractions"] = [0.5, 0.25, 0.25 - share, share]


def found_in(log):
    return check_experts(gather(map(sample_of, log.diagnostics)))


def test_an_expert_without_tokens_in_the_last_steps_is_found():
    log = with_experts(healthy())
    assert not found_in(log)
    for column in range(-LASTING, 0):
        starve(log, column)
    (finding,) = found_in(log)
    assert "In 1 layer, experts get less than a sixteenth" in finding.sentence and "h_1/mlp, 25 %" in finding.sentence
    assert "balance_experts" in finding.remedy and finding.level == "warning"
    starve(log, -2, share=0.1)
    assert not found_in(log)


@pytest.mark.parametrize("columns", [range(3, 12), range(-LASTING + 1, 0)])
def test_at_first_or_for_a_moment_it_is_not(columns):
    log = with_experts(healthy())
    for column in columns:
        starve(log, column)
    assert not found_in(log)


def test_without_experts_or_steps_there_is_nothing():
    assert not found_in(healthy())
    short = with_experts(healthy(count=LASTING - 1))
    for column in range(LASTING - 1):
        starve(short, column)
    assert not found_in(short)


def test_the_page_has_the_map_and_the_finding(tmp_path):
    log = with_experts(healthy())
    for column in range(-LASTING, 0):
        starve(log, column)
    page = write_report(log.write(tmp_path / "run")).read_text()
    assert "Load of experts" in page and "a sixteenth of the mean number of tokens" in page
    assert "Load of experts" not in write_report(healthy().write(tmp_path / "other")).read_text()
