"""The command line that checks share, with checks that are made up: what runs, what is written, and how it ends."""

import json

import pytest
from gpu.report import Report, Script, on_gpu, run_script


def check_good(report: Report):
    report.bits("bytes", b"ab", b"ab", "two bytes")


def check_bad(report: Report):
    report.bits("bytes", b"ab", b"ac", "two bytes")


def time_something(report: Report):
    report.timings.append({"what": "nothing", "us": 1.5})


def run(tmp_path, checks, *arguments, **how):
    output = tmp_path / "report.json"
    script = Script("some_check.py", "A check.\n\nMore.", checks, [time_something], **how)
    code = run_script(script, [*arguments, "--output", str(output)])
    return code, json.loads(output.read_text()) if output.exists() else None


def test_a_self_test_checks_and_does_not_time(tmp_path, capsys):
    code, written = run(tmp_path, [check_good], "--self-test", self_test=True)
    assert code == 0
    assert (written["passed"], written["failures"], written["timings"]) == ({"bytes": 1}, [], [])
    assert list(written["seconds"]) == ["check_good"]
    assert "0 failures" in capsys.readouterr().out


def test_one_failure_fails_the_script(tmp_path, capsys):
    code, written = run(tmp_path, [check_good, check_bad], "--self-test", self_test=True)
    assert code == 1
    assert written["failures"] == ["bytes: two bytes: 1 of 2 bytes differ, byte 1 is 98 instead of 99"]
    assert "FAILED bytes" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    if on_gpu():
        pytest.skip("there is one")
    assert run(tmp_path, [check_good]) == (2, None)
    assert "some_check needs a GPU and the kernels" in capsys.readouterr().out


def test_what_a_script_has_not_cannot_be_asked_for(tmp_path):
    with pytest.raises(SystemExit):
        run(tmp_path, [check_good], "--self-test")
    with pytest.raises(SystemExit):
        run(tmp_path, [check_good], "--only-timing", "--skip-timing")
    with pytest.raises(SystemExit):
        run(tmp_path, [check_good], "--only", "check_bad")


@pytest.mark.parametrize(
    ("options", "ran"),
    [
        (["--only-timing"], ["time_something"]),
        (["--skip-timing"], ["check_bad"]),
        (["--only", "time_something"], ["time_something"]),
        (["--only", "check_bad", "time_something"], ["check_bad", "time_something"]),
        ([], ["check_bad", "time_something"]),
    ],
)
def test_checks_and_timings_can_run_alone(tmp_path, monkeypatch, capsys, options, ran):
    monkeypatch.setattr("gpu.report.on_gpu", lambda: True)
    monkeypatch.setattr("gpu.report.extension.TARGETS", ("jax_fp8_quantize",))
    code, written = run(tmp_path, [check_bad], *options)
    assert list(written["seconds"]) == ran
    assert code == (1 if "check_bad" in ran else 0)
    assert ("1.50 us" in capsys.readouterr().out) == ("time_something" in ran)
