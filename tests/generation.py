"""GPTs that generate: small models with random variables, and how their tokens compare with the full pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from jax_fp8.core.paths import map_with_names

VOCAB, WINDOW, NEW = 64, 32, 10
SHAPE = {"vocab_size": VOCAB, "num_layers": 1, "num_heads": 4, "hidden_size": 32, "max_seq_len": WINDOW}
LEARNED = fp8.GPTConfig(**SHAPE)
ROTARY = fp8.GPTConfig(
    **SHAPE,
    positions="rotary",
    num_kv_heads=2,
    norm="rmsnorm",
    activation="swiglu",
    use_bias=False,
    tie_embeddings=False,
)
QWEN = replace(
    ROTARY,
    num_layers=2,
    rotary_base=5e5,
    rotary_scaling=fp8.RotaryScaling(factor=4.0, original_length=16),
    norm_epsilon=1e-5,
    head_dim=16,
    use_qkv_bias=True,
    qk_norm=True,
)
DELAYED, FIXED = fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling(amax_epsilon=16.0)
LENGTHS = np.int32([5, 11, 16])
PROMPT = np.random.default_rng(1).integers(0, VOCAB, (3, 16), np.int32)
MODELS = {
    "learned": fp8.GPT(LEARNED, recipe=None, dtype=jnp.float32),
    "rotary": fp8.GPT(replace(ROTARY, num_layers=2), recipe=None, dtype=jnp.float32),
    "window": fp8.GPT(replace(ROTARY, num_layers=2, sliding_window=5), recipe=None, dtype=jnp.float32),
    "qwen": fp8.GPT(QWEN, recipe=None, dtype=jnp.float32),
    "qwen, delayed": fp8.GPT(replace(QWEN, num_layers=1), recipe=DELAYED, dtype=jnp.float32),
    "delayed": fp8.GPT(ROTARY, recipe=DELAYED, dtype=jnp.float32),
    "block": fp8.GPT(ROTARY, recipe=fp8.BlockScaling(), head_recipe=fp8.BlockScaling(), dtype=jnp.float32),
    "current, FP8 head": fp8.GPT(LEARNED, recipe=FIXED, head_recipe=FIXED, dtype=jnp.float32),
}


def made(model):
    """Random variables, of which nothing is compiled, with scales that suit them."""
    random, tokens = np.random.default_rng(0), jnp.zeros((1, 16), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def draw(names, leaf):
        return jnp.float32(random.normal(names[-1] == "scale", 0.2, leaf.shape))

    params = map_with_names(draw, shapes["params"])
    scales = jnp.float32([1 / 16, 1 / 256, 1])
    state = jax.tree.map(lambda leaf: scales if leaf.ndim == 1 else jnp.zeros(leaf.shape), shapes.get("fp8", {}))
    return {"params": params, **({"fp8": state} if state else {})}


def write(model, variables, prompt=PROMPT, lengths=LENGTHS, **options):
    return np.asarray(fp8.generate(model, variables, prompt, lengths=lengths, **{"max_new_tokens": NEW} | options))


def shortfall(model, variables, written):
    """How much less likely than the most likely one a written token is in the full pass, at most: logits in standard
    deviations.
    """
    text = np.zeros((len(LENGTHS), WINDOW), np.int32)
    for row, length in enumerate(LENGTHS):
        text[row, : length + NEW] = [*PROMPT[row, :length], *written[row]]
    logits = np.asarray(jax.jit(model.apply)(variables, text))
    places = LENGTHS[:, None] - 1 + np.arange(NEW)
    found = np.take_along_axis(logits, places[..., None], axis=1)  # (rows, new, vocab)
    return np.max(found.max(-1) - np.take_along_axis(found, written[..., None], -1)[..., 0]) / found.std()
