"""The folder of a run: one process writes to it, and no link leads out of it."""

import pytest

from jax_fp8.report.run_format import CannotResume
from jax_fp8.run.folder import Existing, Folder


def test_a_run_is_alone_in_its_folder(tmp_path):
    """Of two processes that continue one, as a cluster may start them, the second is refused."""
    path = tmp_path / "mine"
    path.mkdir()
    first, second = (Folder(tmp_path, "mine", 4, existing=Existing(path, {})) for _ in range(2))
    with first.alone():
        with pytest.raises(CannotResume) as raised, second.alone():
            pass
    assert str(raised.value) == (
        f"only one process may write to {path}, but another one is writing to it; wait until it has ended, or "
        "choose another --name"
    )
    with second.alone():  # the first has ended
        pass


def test_the_trial_of_a_folder_follows_no_link(tmp_path):
    path, precious = tmp_path / "mine", tmp_path / "precious"
    path.mkdir()
    precious.write_text("precious")
    (path / "trial").symlink_to(precious)
    Folder(tmp_path, "mine", 4, existing=Existing(path, {}))
    assert precious.read_text() == "precious" and [each.name for each in path.iterdir()] == ["trial"]
