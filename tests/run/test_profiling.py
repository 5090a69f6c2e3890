"""Profiles of chosen steps of a run: which steps are in one, whatever happens to the run."""

import contextlib
import types

import jax
import pytest

from jax_fp8.run import profiling
from jax_fp8.run.checks import parse_steps


@pytest.fixture
def steps_in_trace(tmp_path, monkeypatch):
    """Those that run from `first` to `last` while jax traces, with `--profile 3:5`; and what is said."""
    tracing = [False, 0]

    def start(folder, **_):
        assert folder == tmp_path and not tracing[0]
        tracing[:] = True, tracing[1] + 1

    def stop():
        tracing[0] = False

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)

    def run(first, last, fails_at=None):
        traced, said = [], []

        @contextlib.contextmanager
        def pause():
            was = tracing[0]
            yield
            assert tracing[0] != was  # it begins or ends while the device does nothing

        progress = types.SimpleNamespace(pause=pause, say=said.append)
        steps = parse_steps("3:5", 9)
        with profiling.Profile(tmp_path, steps, progress) as profile:
            for step in range(first, last + 1):
                with profile.around(step):
                    traced += [step] if tracing[0] else []
                if step == fails_at:
                    raise KeyboardInterrupt
                profile.end(step)
        return traced, said, tracing

    yield run
    assert not tracing[0]


def test_a_profile_has_its_steps(steps_in_trace, tmp_path):
    traced, (sentence,), (_, count) = steps_in_trace(1, 9)
    assert (traced, count) == ([3, 4, 5], 1)
    assert sentence.startswith(f"the profile of steps 3 to 5 is below {tmp_path}; open its *.trace.json.gz at https://")


def test_a_run_that_goes_on_profiles_what_is_before_it(steps_in_trace):
    assert steps_in_trace(5, 9)[0] == [5]
    assert steps_in_trace(6, 9)[:2] == ([], [])


def test_an_interruption_ends_a_profile(steps_in_trace):
    with pytest.raises(KeyboardInterrupt):
        steps_in_trace(1, 9, fails_at=4)
    assert steps_in_trace(4, 4)[2][1] == 2  # it could begin again
