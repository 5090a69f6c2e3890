"""Correction biases of routers in the optimizer: they follow the load of the experts, not the loss (ops/router.py)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_fp8.core.checks import check_number
from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.paths import CORRECTION_BIAS, map_with_names
from jax_fp8.core.types import PyTree
from jax_fp8.optim.hyperparameters import ScalarOrSchedule
from jax_fp8.optim.parts import update_part


class BalanceState(NamedTuple):
    """The state of `balance_experts`.

    Args:
      count: int32[], the number of updates, for a schedule.
      inner: the state of the optimizer of all other params.
    """

    count: jax.Array
    inner: PyTree


def balance_experts(
    tx: optax.GradientTransformation, update_rate: ScalarOrSchedule = 1e-3
) -> optax.GradientTransformationExtraArgs:
    """Balance the load of experts without an auxiliary loss: `tx` sees all params but the routers' correction biases.

    Once a step the bias of each expert that got more tokens than the mean of its layer is lowered by `update_rate`, and
    that of an expert with fewer is raised (https://arxiv.org/abs/2412.19437, section 2.1.2, where the rate is 0.001).
    The load is that of the whole step, over all microbatches and devices. `LayerNormMoE` hands it to the optimizer in
    the place of the gradient of the bias, which has none.

    Args:
      tx: an Optax transform, or a chain of some.
      update_rate: how far a bias moves in a step, or a function of the number of steps so far.

    Returns:
      An Optax transform.

    Raises:
      ValueError: if `update_rate` is a number below 0 or not finite. `init` and `update` raise it where no param is a
        correction bias.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer = fp8.LayerNormMoE(32, num_experts=4, router_correction_bias=True, recipe=None)
      >>> x = jax.random.normal(jax.random.key(0), (64, 16))
      >>> params = layer.init(jax.random.key(1), x)["params"]
      >>> tx = fp8.balance_experts(fp8.fused_adamw(1e-3))
      >>> grads = jax.grad(lambda params: jnp.sum(layer.apply({"params": params}, x)))(params)
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> jnp.abs(updates["router"]["correction_bias"]).max().round(4)
      Array(0.001, dtype=float32)
    """
    if not callable(update_rate) and not isinstance(update_rate, jax.Array):
        check_number("update_rate", update_rate, "that is not negative", lambda rate: rate >= 0)
    inner = optax.masked(optax.with_extra_args_support(tx), _is_other)

    def init(params: PyTree) -> BalanceState:
        return BalanceState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: PyTree) -> tuple[PyTree, BalanceState]:
        rate = jnp.asarray(update_rate(state.count) if callable(update_rate) else update_rate, jnp.float32)
        mask = _is_other(updates if params is None else params)
        moved, new = update_part(
            inner, mask, lambda load: -rate * jnp.sign(load), updates, state.inner, params, **extra
        )
        return moved, BalanceState(jnp.asarray(optax.safe_increment(state.count)), new)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_other(params: PyTree) -> PyTree:
    """Like the params: whether each is no correction bias. Raise where none is one."""
    others = map_with_names(lambda names, _: names[-1:] != (CORRECTION_BIAS,), params, is_leaf=is_fp8)
    if all(jax.tree.leaves(others)):
        raise ValueError(
            f"balance_experts needs params with a {CORRECTION_BIAS}, got none; make the layers of experts with "
            "router_correction_bias=True, or leave balance_experts out"
        )
    return others
