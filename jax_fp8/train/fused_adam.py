"""Adam and AdamW with master weights, as an Optax transform.

Optax keeps no master weights: with bfloat16 params a small update rounds away. Here every param that is not float32 has a float32 (or
float16) master in the optimizer state, and the param is the master rounded to nearest even after every step.

    m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g²      u = m̂ / (sqrt(v̂) + eps)      p -= lr (u + weight_decay p)

with m̂, v̂ bias-corrected; all in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

FLOAT32 = np.dtype("float32")  # not jnp.float32: `optax.inject_hyperparams` takes anything callable for a schedule
ScalarOrSchedule = float | jax.Array | Callable[[jax.Array], jax.Array]
MOMENT_DTYPES = ("float32", "bfloat16", "float16")
MASTER_DTYPES = ("float32", "float16")


class FusedAdamState(NamedTuple):
    """`count` int32[]; `mu`, `nu` and `master` match the params, with None in `master` for leaves that are float32 already."""

    count: jax.Array
    mu: Any
    nu: Any
    master: Any


def fused_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    master_dtype: Any = FLOAT32,
    mu_dtype: Any = FLOAT32,
    nu_dtype: Any = FLOAT32,
    mask: Any = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adam with master weights.

    Args:
      learning_rate: a number, or a schedule of the step count.
      b1, b2, eps: as in `optax.adam`; `eps` is added outside the root, after bias correction.
      weight_decay: decoupled (AdamW) with `adam_w_mode`, else an L2 term added to the gradient.
      bias_correction: divide the moments by `1 - b**count`.
      master_dtype: float32 or float16, for params that are not float32.
      mu_dtype, nu_dtype: float32, bfloat16 or float16 storage of the moments.
      mask: a tree of bools like the params, or a function of the params that returns one: which leaves decay.
      skip_nonfinite: a step with an infinite or NaN gradient changes nothing, `count` included.

    Returns:
      A transform whose `update(grads, state, params)` returns float32 deltas: `optax.apply_updates` lands on the rounded master.
    """
    mu_dtype, nu_dtype = _dtype("mu_dtype", mu_dtype, MOMENT_DTYPES), _dtype("nu_dtype", nu_dtype, MOMENT_DTYPES)
    master_dtype = _dtype("master_dtype", master_dtype, MASTER_DTYPES)

    def init(params):
        jax.tree.map(_check_param, params)
        return FusedAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(p, nu_dtype), params),
            master=jax.tree.map(lambda p: None if p.dtype == jnp.float32 else p.astype(master_dtype), params),
        )

    def update(grads, state, params=None, **extra):
        del extra
        if params is None:
            raise ValueError(
                "fused_adam needs the params to update their masters, got None; call update(grads, state, params)"
            )
        tree = jax.tree.structure(params)
        if jax.tree.structure(grads) != tree:
            raise ValueError(f"grads must have the structure of params, got {jax.tree.structure(grads)} and {tree}")
        count = optax.safe_increment(state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        correction = [1 - jnp.float32(b) ** count if bias_correction else jnp.float32(1) for b in (b1, b2)]
        decays = tree.flatten_up_to(_decay_mask(mask, params))
        finite = _all_finite(grads) if skip_nonfinite else None

        def leaf(g, p, mu, nu, master, decay):
            g, p32 = g.astype(jnp.float32), (p if master is None else master).astype(jnp.float32)
            if not adam_w_mode:
                g = g + jnp.where(decay, weight_decay, 0.0) * p32
            m = b1 * mu.astype(jnp.float32) + (1 - b1) * g
            v = b2 * nu.astype(jnp.float32) + (1 - b2) * jnp.square(g)
            u = (m / correction[0]) / (jnp.sqrt(v / correction[1]) + eps)
            if adam_w_mode:
                u = u + jnp.where(decay, weight_decay, 0.0) * p32
            delta, new = -rate * u, p32 - rate * u
            if master is not None:
                delta = new.astype(master_dtype).astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32)
            after = delta, m.astype(mu_dtype), v.astype(nu_dtype), None if master is None else new.astype(master_dtype)
            if finite is None:
                return after
            before = jnp.zeros_like(delta), mu, nu, master
            return tuple(None if a is None else jnp.where(finite, a, b) for a, b in zip(after, before, strict=True))

        columns = [tree.flatten_up_to(t) for t in (grads, params, state.mu, state.nu, state.master)]
        rows = [leaf(*row) for row in zip(*columns, decays, strict=True)]
        updates, mu, nu, master = ([row[i] for row in rows] for i in range(4))
        if finite is not None:
            count = jnp.where(finite, count, state.count)
        return tree.unflatten(updates), FusedAdamState(
            count, tree.unflatten(mu), tree.unflatten(nu), tree.unflatten(master)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    bias_correction: bool = True,
    master_dtype: Any = FLOAT32,
    mu_dtype: Any = FLOAT32,
    nu_dtype: Any = FLOAT32,
    mask: Any = None,
    skip_nonfinite: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`fused_adam` with decoupled weight decay and `optax.adamw`'s default for it."""
    return fused_adam(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay,
        adam_w_mode=True,
        bias_correction=bias_correction,
        master_dtype=master_dtype,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        mask=mask,
        skip_nonfinite=skip_nonfinite,
    )


def apply_updates(params: Any, updates: Any) -> Any:
    """Add the deltas in float32 and round once to each param's dtype."""
    return jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u.astype(jnp.float32)).astype(p.dtype), params, updates)


def _decay_mask(mask, params):
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return mask(params) if callable(mask) else mask


def _all_finite(grads):
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))


def _check_param(param):
    if not jnp.issubdtype(param.dtype, jnp.floating):
        raise ValueError(
            f"fused_adam needs floating point params, got {param.dtype} of shape {param.shape}; mask it with optax.masked"
        )


def _dtype(name, dtype, allowed):
    found = "remainder" if isinstance(dtype, str) and dtype == "remainder" else np.dtype(dtype).name
    if found not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {found}")
    return np.dtype(dtype)
