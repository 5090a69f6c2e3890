"""What must hold of a GPT's shape, of its tokens and of its loss's settings, said before anything is computed."""

from typing import Any

import jax.numpy as jnp

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe, is_array
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.norm import check_norm
from jax_fp8.nn.checks import check_dtype


def check_config(config: Any) -> None:
    """Raise unless a model can be made of a `GPTConfig`."""
    for name in ("vocab_size", "num_heads", "hidden_size", "max_seq_len"):
        check_integer(name, getattr(config, name))
    check_integer("num_layers", config.num_layers, least=0)
    for name in ("num_kv_heads", "mlp_hidden_size"):
        if getattr(config, name) is not None:
            check_integer(name, getattr(config, name))
    for name in ("use_bias", "tie_embeddings"):
        check_bool(name, getattr(config, name))
    if config.positions not in ("learned", "rotary"):
        raise ValueError(f'positions must be "learned" or "rotary", got {config.positions!r}')
    check_norm(config.norm)
    is_gated(config.activation)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.hidden_size
    if width % heads:
        raise ValueError(f"num_heads must divide hidden_size, got num_heads={heads} and hidden_size={width}")
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}")
    if config.positions == "rotary" and width // heads % 2:
        raise ValueError(
            f"rotary positions turn pairs and need an even hidden_size / num_heads, got {width // heads}; "
            "change one of them"
        )


def check_call(model: Any, tokens: Any, labels: Any, mask: Any, z_loss: Any) -> None:
    """Raise unless a GPT can be called with these."""
    config = model.config
    if not hasattr(config, "max_seq_len"):
        raise ValueError(f"config must be a GPTConfig, got {config!r}; pass GPTConfig.preset(name) or GPTConfig(...)")
    for name in ("dtype", "param_dtype"):
        check_dtype(name, getattr(model, name))
    check_tokens(tokens, "(batch, seq)", least=1)
    for name, array in (("labels", labels), ("mask", mask)):
        if array is not None and not is_array(array):
            raise ValueError(f"{name} must be an array like tokens, got {describe(array)}; pass jnp.asarray({name})")
    longest = config.max_seq_len
    if tokens.shape[-1] > longest:
        raise ValueError(f"a sequence must be at most max_seq_len={longest} tokens long, got {tokens.shape[-1]}")
    _check_z_loss(z_loss)
    if labels is None and (mask is not None or z_loss != 0):
        raise ValueError("mask and z_loss are for the loss, got them without labels; pass labels too")


def check_loss_settings(model: Any, ignore_label: Any, z_loss: Any) -> None:
    """Raise unless `next_token_loss` can be made of these."""
    if isinstance(model, type) or not hasattr(model, "apply"):
        arrived = f"the class {model.__name__}" if isinstance(model, type) else describe(model)
        raise ValueError(f"next_token_loss needs a model, got {arrived}; pass GPT(config)")
    if ignore_label is not None:
        check_integer("ignore_label", ignore_label, least=-(2**31))
    _check_z_loss(z_loss)


def check_tokens(tokens: Any, shape: str, least: int) -> None:
    """Raise unless these are token numbers of this shape, at least one row of at least so many."""
    if not is_array(tokens) or tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be an integer array {shape}, got {describe(tokens)}; cast or reshape it")
    if not tokens.shape[0] or tokens.shape[1] < least:
        raise ValueError(
            f"tokens {shape} must have at least 1 row and {least} column{'s' * (least > 1)}, got {describe(tokens)}; "
            "leave empty batches out"
        )


def _check_z_loss(z_loss):
    check_number("z_loss", z_loss, "that is not negative", lambda z_loss: z_loss >= 0)
