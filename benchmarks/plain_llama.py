"""The baseline of Llama-like shapes: the same model in plain Flax, in bfloat16 or with Flax's own FP8.

It does the same work as `jax_fp8.GPT` with RMSNorm, rotary positions, grouped queries, SwiGLU and no biases; with
experts, the same as plain_experts.py. Nothing of jax_fp8 is used here, so that a mistake of jax_fp8 cannot slow the
baseline down.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from plain_experts import PlainExperts
from plain_gpt import COMPUTE

ROTARY_BASE = 10_000.0


def rotated(x: jax.Array) -> jax.Array:
    """Heads (batch, seq, heads, head_dim) rotated by their positions; a pair of features is half a head apart."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = left * jnp.cos(angles) - right * jnp.sin(angles), left * jnp.sin(angles) + right * jnp.cos(angles)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class PlainLlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x)."""

    num_heads: int
    num_kv_heads: int
    mlp_hidden_size: int
    dot_general_cls: Callable | None = None
    experts: dict | None = None  # fields of PlainExperts

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, use_bias=False, dtype=COMPUTE, dot_general_cls=self.dot_general_cls, name=name)

    @nn.compact
    def __call__(self, x):  # (batch, seq, hidden)
        batch, seq, hidden = x.shape
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, hidden // self.num_heads
        y = nn.RMSNorm(dtype=COMPUTE, name="attention_norm")(x)
        qkv = self._dense((heads + 2 * kv_heads) * head_dim, "qkv")(y).reshape(batch, seq, -1, head_dim)
        query, key, value = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        attended = jax.nn.dot_product_attention(
            rotated(query),
            rotated(key),
            value,
            is_causal=True,
            implementation="cudnn" if jax.default_backend() == "gpu" else None,
        )
        x = x + self._dense(hidden, "attention_out")(attended.reshape(x.shape))
        y = nn.RMSNorm(dtype=COMPUTE, name="mlp_norm")(x)
        if self.experts is not None:
            return x + PlainExperts(mlp_hidden_size=self.mlp_hidden_size, **self.experts, name="experts")(y)
        gate, up = jnp.split(self._dense(2 * self.mlp_hidden_size, "gate_up")(y), 2, axis=-1)
        return x + self._dense(hidden, "down")(nn.silu(gate) * up)


class PlainLlama(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab) in bfloat16; the head is the embedding if `tied`."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    mlp_hidden_size: int
    tied: bool
    dot_general_cls: Callable | None = None
    experts: dict | None = None

    @nn.compact
    def __call__(self, tokens):
        table = (self.vocab_size, self.hidden_size), jnp.float32
        embedding = self.param("embedding", nn.initializers.normal(0.02), *table).astype(COMPUTE)
        x = embedding[tokens]
        for i in range(self.num_layers):
            sizes = self.num_heads, self.num_kv_heads, self.mlp_hidden_size
            x = PlainLlamaBlock(*sizes, self.dot_general_cls, self.experts, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=COMPUTE, name="final_norm")(x)
        head = embedding if self.tied else self.param("head", nn.initializers.normal(0.02), *table).astype(COMPUTE)
        return jnp.einsum("bsh,vh->bsv", x, head)
