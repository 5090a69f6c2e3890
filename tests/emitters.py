"""What emits the code of a fusion on the CPU: XLA's older emitters in these tests (`conftest.py`),
its newer ones for users.

The older ones take half the time. They do not keep the byte of a NaN in E5M2, nor do they always sum in one order in
two programs: where tests compare such bits, they compile as for users.
"""

from functools import partial

import jax
import pytest

jit_as_for_users = partial(jax.jit, compiler_options={"xla_backend_extra_options": ""})

EAGER_AND_JITTED = pytest.mark.parametrize(
    "transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jit_as_for_users, id="jit")]
)
