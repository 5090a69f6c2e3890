"""The baseline: the same GPT in plain Flax, in bfloat16 or with Flax's own FP8 in its dense layers.

It does the same work as `jax_fp8.GPT` in its GPT-2 form: learned positions, LayerNorm, biases, tanh GELU, causal
attention in bfloat16 (cuDNN on a GPU), tied bfloat16 head, float32 parameters. Nothing of jax_fp8 is used here, so that
a mistake of jax_fp8 cannot slow the baseline down.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

COMPUTE = jnp.bfloat16
Constrain = Callable[[jax.Array, str], jax.Array]


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    On a mesh, `constrain(x, "residual")` and `constrain(q, "heads")` say how arrays are split, and the columns of qkv
    are in the order of heads, so that splitting them splits heads.
    """

    num_heads: int
    dot_general_cls: Callable | None = None
    constrain: Constrain | None = None

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, dtype=COMPUTE, dot_general_cls=self.dot_general_cls, name=name)

    @nn.compact
    def __call__(self, x):  # (batch, seq, hidden)
        hidden = x.shape[-1]
        qkv = self._dense(3 * hidden, "qkv")(nn.LayerNorm(dtype=COMPUTE, name="attention_norm")(x))
        attended = jax.nn.dot_product_attention(
            *self._by_heads(qkv),
            is_causal=True,
            implementation="cudnn" if jax.default_backend() == "gpu" else None,
        )
        x = constrained(self, x + self._dense(hidden, "attention_out")(attended.reshape(x.shape)))
        y = self._dense(4 * hidden, "mlp_in")(nn.LayerNorm(dtype=COMPUTE, name="mlp_norm")(x))
        return constrained(self, x + self._dense(hidden, "mlp_out")(nn.gelu(y, approximate=True)))

    def _by_heads(self, qkv):
        """Query, key and value, (batch, seq, heads, head_dim) each."""
        batch, seq, columns = qkv.shape
        head_dim = columns // 3 // self.num_heads
        if self.constrain is None:
            qkv = qkv.reshape(batch, seq, 3, self.num_heads, head_dim)
            return [qkv[:, :, i] for i in range(3)]
        qkv = qkv.reshape(batch, seq, self.num_heads, 3, head_dim)
        return [self.constrain(qkv[:, :, :, i], "heads") for i in range(3)]


def constrained(module: nn.Module, x: jax.Array) -> jax.Array:
    """The residual stream with the sharding constraint of the model, if it has one."""
    return x if module.constrain is None else module.constrain(x, "residual")


class PlainGPT(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab) in bfloat16."""

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_seq_len: int
    dot_general_cls: Callable | None = None
    constrain: Constrain | None = None

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.02)
        embedding = self.param("embedding", init, (self.vocab_size, self.hidden_size), jnp.float32).astype(COMPUTE)
        positions = self.param("positions", init, (self.max_seq_len, self.hidden_size), jnp.float32).astype(COMPUTE)
        x = constrained(self, embedding[tokens] + positions[: tokens.shape[1]])
        for i in range(self.num_layers):
            x = PlainBlock(self.num_heads, self.dot_general_cls, self.constrain, name=f"block_{i}")(x)
        return jnp.einsum("bsh,vh->bsv", nn.LayerNorm(dtype=COMPUTE, name="final_norm")(x), embedding)


def plain_loss(model: nn.Module) -> Callable:
    """`loss(variables, tokens)` with tokens (batch, seq + 1): mean cross entropy of the next token, float32."""

    def loss(variables, tokens):
        logits = model.apply(variables, tokens[:, :-1]).astype(jnp.float32)
        with jax.named_scope("loss"):
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def make_plain_step(loss: Callable, tx: optax.GradientTransformation, microbatches: int, **options) -> Callable:
    """`step((variables, opt_state), tokens) -> (state, {"loss"})`, jitted, its state donated.

    Flax's FP8 scales arrive as "gradients" of their own collection and replace it; only `params` meets the optimizer.
    Microbatches are scanned with float32 gradients summed in the carry, each using the scales the one before it left.
    `options` are those of `jax.jit`.
    """

    def forward_backward(variables, tokens):
        value, gradients = jax.value_and_grad(loss)(variables, tokens)
        scales = {OVERWRITE_WITH_GRADIENT: gradients[OVERWRITE_WITH_GRADIENT]} if len(gradients) > 1 else {}
        return value, gradients["params"], scales

    def scanned(variables, tokens):
        def body(carry, microbatch):
            loss_sum, gradient_sum, scales = carry
            value, gradients, scales = forward_backward({"params": variables["params"], **scales}, microbatch)
            return (loss_sum + value, jax.tree.map(jnp.add, gradient_sum, gradients), scales), None

        scales = {name: leaves for name, leaves in variables.items() if name != "params"}
        start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, variables["params"]), scales)
        shape = (microbatches, tokens.shape[0] // microbatches, tokens.shape[1])
        (value, gradients, scales), _ = jax.lax.scan(body, start, tokens.reshape(shape))
        return value / microbatches, jax.tree.map(lambda g: g / microbatches, gradients), scales

    def step(state, tokens):
        variables, opt_state = state
        value, gradients, scales = (scanned if microbatches > 1 else forward_backward)(variables, tokens)
        with jax.named_scope("optimizer"):
            updates, opt_state = tx.update(gradients, opt_state, variables["params"])
            params = optax.apply_updates(variables["params"], updates)
        return ({"params": params, **scales}, opt_state), {"loss": value}

    return jax.jit(step, donate_argnums=0, **options)
