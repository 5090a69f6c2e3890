"""Training on all GPUs of a machine against one of them; `mesh_check.py --self-test` needs no GPU."""

import pytest
from gpu import mesh_check, several_gpus


@pytest.mark.gpu
@pytest.mark.parametrize("check", mesh_check.CHECKS, ids=lambda check: check.__name__)
def test_mesh(check):
    several_gpus.assert_passes(mesh_check, "--only", check.__name__)
