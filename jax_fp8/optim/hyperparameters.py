"""Checks of the arguments of `fused_adam` and of its `update`.

`optax.inject_hyperparams` makes arrays of all numbers, and they may be traced. So the checks read the values of Python
and NumPy numbers, but only the shapes of jax arrays.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fp8.core.checks import check_number, describe, flatten_like, structure_error
from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.paths import CORRECTION_BIAS, names_of
from jax_fp8.core.types import PyTree, TreeDef
from jax_fp8.optim.adam_state import FusedAdamState
from jax_fp8.optim.updates import InPlace

ScalarOrSchedule = float | jax.Array | Callable[[jax.Array], ArrayLike]  # optax.Schedule, among others
GRADIENT_DTYPES = tuple(map(np.dtype, ("float32", "bfloat16", "float16")))


def check_hyperparameters(
    learning_rate: object, b1: object, b2: object, eps: object, weight_decay: object, max_grad_norm: object
) -> None:
    """Raise if one of them is no number, or a number that makes no sense."""
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


def checked_params(params: PyTree) -> TreeDef:
    """The structure of params that Adam can train."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8):
        if names_of(path)[-1:] == (CORRECTION_BIAS,):
            raise ValueError(
                f"fused_adam must not train the correction bias of a router, which has no gradient, got "
                f"{'/'.join(map(str, names_of(path)))}; wrap the optimizer, as in balance_experts(fused_adamw(1e-3))"
            )
    return jax.tree.structure(params, is_leaf=is_fp8)


def check_update(state: object, in_place: object, grad_scale: ArrayLike | None) -> None:
    """Raise unless these are arguments for `update` of `fused_adam`."""
    if not isinstance(state, FusedAdamState):
        raise ValueError(
            f"state must be the FusedAdamState of fused_adam, got {describe(state)}, that of another optimizer; "
            "make it with the init of this one"
        )
    if in_place is not None and not isinstance(in_place, InPlace):
        raise ValueError(f"in_place must be an InPlace or None, got {in_place!r}; pass jax_fp8.InPlace()")
    if grad_scale is not None and jnp.shape(grad_scale) != ():
        raise ValueError(f"grad_scale must be a scalar, got {describe(grad_scale)}; multiply the gradients by it")


def checked_tree(updates: PyTree, params: PyTree) -> TreeDef:
    """The structure of the params; raise unless the gradients are arrays that fit it."""
    if params is None:
        raise ValueError(
            "fused_adam needs the params to update their masters, got None; call update(grads, state, params)"
        )
    tree = jax.tree.structure(params, is_leaf=is_fp8)
    if jax.tree.structure(updates) != tree:
        remedy = "pass the gradients of these params, one array for each (for an Fp8Array too)"
        raise structure_error("grads", tree, updates, remedy)
    for gradient, param in zip(jax.tree.leaves(updates), tree.flatten_up_to(params), strict=True):
        arrived = f"{getattr(gradient, 'dtype', type(gradient).__name__)} of shape {jnp.shape(gradient)}"
        if jnp.shape(gradient) != param.shape or getattr(gradient, "dtype", None) not in GRADIENT_DTYPES:
            raise ValueError(
                "grads must be float32, bfloat16 or float16 arrays of the shapes of params, "
                f"got {arrived} for a param of shape {param.shape}; "
                "pass the gradients of these params"
            )
    return tree


def decay_mask(mask: PyTree, params: PyTree, tree: TreeDef) -> list:
    if mask is None:
        return [True] * tree.num_leaves
    decays = flatten_like(
        "mask", tree, mask(params) if callable(mask) else mask, "make it with jax.tree.map over params"
    )
    for decay in decays:
        if not isinstance(decay, int) and jnp.shape(decay) != ():
            raise ValueError(
                f"mask must have one bool for each param, got {describe(decay)}; say of whole params whether they decay"
            )
    return decays


def check_scalars(numbers: Mapping[str, ArrayLike]) -> None:
    """Raise where a number of a step is an array of several, as a schedule may return."""
    for name, number in numbers.items():
        if jnp.shape(number) != ():
            raise ValueError(f"the {name} of a step must be one number, got {describe(number)}; return a scalar")


def _check(
    name: str,
    value: object,
    wanted: str,
    least: float,
    *,
    below: float = math.inf,
    above: bool = False,
    remedy: str = "",
) -> None:
    """Raise unless a number is at least `least`, or with `above` larger than it, and less than `below`."""
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            raise ValueError(f"{name} must be one number, got {describe(value)}")
        if not isinstance(value, np.ndarray):
            return
        value = value.item()

    def holds(number: float) -> bool:
        return least <= number < below and not (above and number == least)

    check_number(name, value, wanted, holds, remedy)
