"""What Orbax says beside the one sentence of a checkpoint that failed."""

import sys
from types import SimpleNamespace

import pytest

from jax_fp8.run import orbax_errors


def test_what_threads_of_others_tell_later_is_not_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with pytest.raises(OSError), orbax_errors.quietly():
        raise OSError
    for error in (RuntimeError("Event loop is closed"), ValueError("ours")):
        sys.unraisablehook(SimpleNamespace(exc_value=error))  # type: ignore[arg-type]
    assert [str(unraisable.exc_value) for unraisable in told] == ["ours"]
