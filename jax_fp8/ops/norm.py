"""LayerNorm and RMSNorm over the last dim, with a forward that keeps its statistics and the backward that uses them.

    layernorm: y = (x - mean) * rstd * scale + bias,  rstd = 1 / sqrt(var + epsilon)     https://arxiv.org/abs/1607.06450
    rmsnorm:   y = x * rstd * scale,                  rstd = 1 / sqrt(mean(x²) + epsilon)  https://arxiv.org/abs/1910.07467

Everything is computed in float32 and rounded once.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

NORMS = ("layernorm", "rmsnorm")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormParameters:
    """`scale` (n,), and `bias` (n,) for LayerNorm or None for RMSNorm."""

    scale: jax.Array
    bias: jax.Array | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormStatistics:
    """What the backward needs of the forward: f32[..., 1] each; `mean` is None for RMSNorm."""

    mean: jax.Array | None
    rstd: jax.Array


def normalize(x: jax.Array, parameters: NormParameters, epsilon: float, dtype) -> tuple[jax.Array, NormStatistics]:
    """Normalize `x` (..., n): the result in `dtype`, and its statistics."""
    x = x.astype(jnp.float32)
    mean = None if parameters.bias is None else jnp.mean(x, axis=-1, keepdims=True)
    centered = x if mean is None else x - mean
    rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + epsilon)
    y = centered * rstd * parameters.scale.astype(jnp.float32)
    if parameters.bias is not None:
        y = y + parameters.bias.astype(jnp.float32)
    return y.astype(dtype), NormStatistics(mean, rstd)


def normalize_backward(
    dy: jax.Array, x: jax.Array, parameters: NormParameters, statistics: NormStatistics
) -> tuple[jax.Array, NormParameters]:
    """The gradient of `x` (..., n), in its dtype, and of the parameters, in theirs."""
    dy, rstd = dy.astype(jnp.float32), statistics.rstd
    centered = x.astype(jnp.float32) if statistics.mean is None else x.astype(jnp.float32) - statistics.mean
    normalized = centered * rstd
    leading = tuple(range(dy.ndim - 1))
    dscale = jnp.sum(dy * normalized, axis=leading).astype(parameters.scale.dtype)
    dnormalized = dy * parameters.scale.astype(jnp.float32)
    dx = dnormalized - normalized * jnp.mean(dnormalized * normalized, axis=-1, keepdims=True)
    dbias = None
    if parameters.bias is not None:
        dbias = jnp.sum(dy, axis=leading).astype(parameters.bias.dtype)
        dx = dx - jnp.mean(dnormalized, axis=-1, keepdims=True)
    return (dx * rstd).astype(x.dtype), NormParameters(dscale, dbias)


def check_norm(norm: str) -> None:
    """Raise unless `norm` names a norm."""
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
