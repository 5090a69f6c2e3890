"""XLA's fusion emitters on the CPU: tests compile with the older ones (`conftest.py`), users with the newer ones.

The older emitters take half the time to compile. They change the byte of a NaN in E5M2, and may sum in another order in
another program. Tests that compare such bits compile with the newer ones.
"""

from functools import partial

import jax
import pytest

jit_as_for_users = partial(jax.jit, compiler_options={"xla_backend_extra_options": ""})

EAGER_AND_JITTED = pytest.mark.parametrize(
    "transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jit_as_for_users, id="jit")]
)
