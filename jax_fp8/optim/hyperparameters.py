"""The numbers of `fused_adam`: which make sense.

`optax.inject_hyperparams` makes arrays of all of them, which may be traced: only Python's and NumPy's numbers are
looked at, and the shape of arrays.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.checks import check_number, describe
from jax_fp8.optim.adam_state import FusedAdamState
from jax_fp8.optim.updates import InPlace


def check_hyperparameters(
    learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any, max_grad_norm: Any
) -> None:
    """Raise where one of them is a number that no training could mean, or no number at all."""
    if not callable(learning_rate):
        remedy = "pass a number, or a schedule of the step count"
        _check("learning_rate", learning_rate, "that is not negative", 0, remedy=remedy)
    elif isinstance(learning_rate, type):
        raise ValueError(f"learning_rate must be a number or a schedule, got {learning_rate!r}")
    for name, beta in (("b1", b1), ("b2", b2)):
        _check(name, beta, "from 0 to below 1", 0, below=1)
    _check("eps", eps, "above 0", 0, above=True, remedy="a weight without any gradient would be 0 / 0")
    _check("weight_decay", weight_decay, "that is not negative", 0)
    if max_grad_norm is not None:
        _check("max_grad_norm", max_grad_norm, "above 0", 0, above=True, remedy="None clips nothing")


def check_update(state: Any, in_place: Any, grad_scale: Any) -> None:
    """Raise unless `fused_adam` can update with these."""
    if not isinstance(state, FusedAdamState):
        raise ValueError(
            f"state must be the FusedAdamState of fused_adam, got {describe(state)}, that of another optimizer; "
            "make it with the init of this one"
        )
    if in_place is not None and not isinstance(in_place, InPlace):
        raise ValueError(f"in_place must be an InPlace or None, got {in_place!r}; pass jax_fp8.InPlace()")
    if grad_scale is not None and jnp.shape(grad_scale) != ():
        raise ValueError(f"grad_scale must be a scalar, got {describe(grad_scale)}; multiply the gradients by it")


def check_scalars(numbers: Mapping[str, Any]) -> None:
    """Raise where a number of a step is an array of several, such as what a schedule returned."""
    for name, number in numbers.items():
        if jnp.shape(number) != ():
            raise ValueError(f"the {name} of a step must be one number, got {describe(number)}; return a scalar")


def _check(name, value, wanted, least, *, below=math.inf, above=False, remedy=""):
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            raise ValueError(f"{name} must be one number, got {describe(value)}")
        if not isinstance(value, np.ndarray):
            return
        value = value.item()

    def holds(number):
        return least <= number < below and not (above and number == least)

    check_number(name, value, wanted, holds, remedy)
