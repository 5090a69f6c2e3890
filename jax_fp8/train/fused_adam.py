"""Adam and AdamW with master weights, as an Optax transform.

Optax keeps no master weights: with bfloat16 params a small update rounds away. Here every param that is not float32 has a float32 (or
float16) master in the optimizer state, and the param is the master rounded to nearest even after every step.

    m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g²      u = m̂ / (sqrt(v̂) + eps)      p -= lr (u + weight_decay p)

with m̂, v̂ bias-corrected; all in float32 (https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101).
"""

from collections.abc import Callable
from dataclasses import dataclass
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

    rule = _Rule(b1, b2, eps, weight_decay, adam_w_mode, bias_correction, master_dtype, mu_dtype, nu_dtype)

    def init(params):
        jax.tree.map(_check_param, params)
        return FusedAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, mu_dtype), params),
            nu=jax.tree.map(lambda p: jnp.zeros_like(p, nu_dtype), params),
            master=jax.tree.map(lambda p: None if p.dtype == jnp.float32 else p.astype(master_dtype), params),
        )

    def update(updates, state, params=None, **extra):
        del extra
        tree = _checked_tree(updates, params)
        count = jnp.asarray(optax.safe_increment(state.count))
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        columns = [tree.flatten_up_to(t) for t in (updates, params, state.mu, state.nu, state.master)]
        decays = tree.flatten_up_to(_decay_mask(mask, params))
        before = [(jnp.zeros_like(p, jnp.float32), *kept) for _, p, *kept in zip(*columns, strict=True)]
        after = [rule.step(rate, count, *row) for row in zip(*columns, decays, strict=True)]
        if skip_nonfinite:
            finite = _all_finite(updates)
            after = [_choose(finite, new, old) for new, old in zip(after, before, strict=True)]
            count = jnp.where(finite, count, state.count)
        deltas, mu, nu, master = (tree.unflatten([row[i] for row in after]) for i in range(4))
        return deltas, FusedAdamState(count, mu, nu, master)

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


@dataclass(frozen=True)
class _Rule:
    """The arithmetic of one leaf."""

    b1: float
    b2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool
    bias_correction: bool
    master_dtype: np.dtype
    mu_dtype: np.dtype
    nu_dtype: np.dtype

    def step(self, rate, count, g, p, mu, nu, master, decay):
        """The float32 delta of a param, and its new moments and master (None where there is none)."""
        g, current = g.astype(jnp.float32), (p if master is None else master).astype(jnp.float32)
        decayed = jnp.where(decay, self.weight_decay, 0.0) * current
        g = g if self.adam_w_mode else g + decayed
        m = self.b1 * mu.astype(jnp.float32) + (1 - self.b1) * g
        v = self.b2 * nu.astype(jnp.float32) + (1 - self.b2) * jnp.square(g)
        u = (m / self._correction(self.b1, count)) / (jnp.sqrt(v / self._correction(self.b2, count)) + self.eps)
        u = u + decayed if self.adam_w_mode else u
        moments = m.astype(self.mu_dtype), v.astype(self.nu_dtype)
        if master is None:
            return -rate * u, *moments, None
        master = (current - rate * u).astype(self.master_dtype)
        return master.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), *moments, master

    def _correction(self, b, count):
        return 1 - jnp.float32(b) ** count if self.bias_correction else jnp.float32(1)


def _choose(condition, new, old):
    return tuple(None if a is None else jnp.where(condition, a, b) for a, b in zip(new, old, strict=True))


def _checked_tree(updates, params):
    if params is None:
        raise ValueError(
            "fused_adam needs the params to update their masters, got None; call update(grads, state, params)"
        )
    tree = jax.tree.structure(params)
    if jax.tree.structure(updates) != tree:
        raise ValueError(f"grads must have the structure of params, got {jax.tree.structure(updates)} and {tree}")
    return tree


def _decay_mask(mask, params):
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    return mask(params) if callable(mask) else mask


def _all_finite(grads):
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)], jnp.bool_))


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
