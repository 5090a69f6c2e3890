"""What a loss function must return. `value_and_grad` and the step say it: tests/state/test_checks.py."""

import jax.numpy as jnp
import pytest

from jax_fp8.grads.checks import ALONE, check_loss

LOSS = jnp.float32(1)


@pytest.mark.parametrize(
    ("loss", "has_aux"), [(LOSS, False), (0.5, False), (jnp.bfloat16(1), False), ((LOSS, {}), True)]
)
def test_a_scalar_or_a_pair_is_taken(loss, has_aux):
    check_loss(loss, has_aux)


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (LOSS, True, r"must return \(loss, aux\) with has_aux=True, got float32\[\]; return a pair"),
        ((LOSS, {}), False, "must return a scalar, got a tuple; return the loss alone$"),
        (jnp.ones(2), False, r"must return a floating point scalar, got float32\[2\]; return its mean"),
        (jnp.int32(1), False, r"must return a floating point scalar, got int32\[\]"),
        (jnp.float8_e4m3fn(1), False, "must return a floating point scalar, got float8_e4m3fn"),
    ],
)
def test_anything_else_is_refused(loss, has_aux, message):
    with pytest.raises(ValueError, match=message):
        check_loss(loss, has_aux, ALONE)
