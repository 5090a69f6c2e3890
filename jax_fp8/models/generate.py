"""Generate text with a GPT, token by token, with a cache of keys and values.

    prompts ─the model, once─→ logits of each row's last token ─choose─→ token ─the model, one row each─→ logits → ...

It is one program. It casts the weights, reads the prompts, and then runs a loop whose body reads one token of each row.
The loop casts no weights, so a token costs one read of the weights and of the cache. The program reads the FP8 state
and never writes it. Prompts are padded to a power of two (with which tokens: see ops/cached_attention.py), so one
program serves prompts of many lengths.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.ids import as_ids
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.models.checks import Tokens, check_can_generate, check_choice, check_prompts, check_stops
from jax_fp8.models.gpt import GPT
from jax_fp8.models.reader import Caches, Reader
from jax_fp8.models.sampling import choose_tokens
from jax_fp8.ops.cached_attention import is_token

FEWEST_SLOTS = 16  # of prompts, padding included
Carry = tuple[jax.Array, Caches, jax.Array]  # of the loop: new tokens, caches, which rows have ended


def generate(
    model: GPT,
    variables: Variables,
    prompt: Tokens,
    *,
    max_new_tokens: int,
    lengths: Tokens | list[int] | tuple[int, ...] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: jax.Array | None = None,
) -> jax.Array:
    """Continue each prompt with new tokens, from a cache of keys and values.

    The program is compiled once for each model, batch size, power of two that prompts fit into, `max_new_tokens`,
    `top_k`, and way to choose tokens (most likely, sampled, sampled with `top_p`). Other lengths, temperatures and stop
    tokens use the same program.

    Args:
      model: a `GPT`.
      variables: "params", and "fp8" where the recipe has state, as in `TrainState.variables`; may lie on a mesh.
      prompt: integers (batch, seq), at least one token each. With `lengths`, rows end in padding of any value. A number
        outside of the vocabulary is refused; in a traced array it makes logits NaN instead.
      max_new_tokens: the longest prompt and all new tokens but the last must fit into the model's `max_seq_len`, also
        with rotary positions.
      lengths: integers (batch,), the number of tokens of each row that are its prompt; None: all.
      temperature: 0 takes the most likely token. Above 0, tokens are sampled; below 1 prefers likely ones.
      top_k: sample from so many most likely tokens.
      top_p: of the tokens that `top_k` leaves, sample from the fewest most likely ones that have at least this
        probability together (nucleus sampling, https://arxiv.org/abs/1904.09751).
      stop_tokens: a row ends with the first of these, and repeats it to the end. When all rows have ended, the program
        stops.
      key: needed to sample: one random key, into which the number of each row is folded, or keys (batch,).

    Returns:
      The new tokens, i32[batch, max_new_tokens].

    Raises:
      ValueError: if `model` is not a GPT, a prompt does not fit it, a setting has another value, or `temperature` is
        above 0 without a key.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=32)
      >>> model, prompt = fp8.GPT(config), jnp.array([[1, 2, 3], [4, 5, 6]])
      >>> variables = jax.jit(model.init)(jax.random.key(0), prompt)
      >>> fp8.generate(model, variables, prompt, max_new_tokens=4).shape
      (2, 4)
    """
    check_can_generate(model, variables)
    prompt, lengths = check_prompts(model.config, prompt, lengths, max_new_tokens)
    batch, seq = prompt.shape
    check_choice(temperature, top_k, top_p, key, batch)
    stops = check_stops(stop_tokens, model.config.vocab_size)
    slots = max(FEWEST_SLOTS, 1 << (seq - 1).bit_length())
    slots = max(seq, min(slots, model.config.max_seq_len))
    is_sampled = temperature > 0
    program = _program(_replicated(variables))
    return program(
        model,
        int(max_new_tokens),
        int(top_k) if is_sampled and top_k is not None else None,
        nn.unbox({name: variables[name] for name in ("params", "fp8", FROZEN) if name in variables}),
        _padded(prompt, slots),
        as_ids(lengths),
        _row_keys(key, batch) if is_sampled and key is not None else None,
        np.float32(temperature),
        np.float32(top_p) if is_sampled and top_p is not None else None,
        stops,
    )


def _padded(prompt: Tokens, slots: int) -> Tokens:
    """Tokens i32[batch, slots]. A NumPy prompt stays a NumPy array: with several processes, each needs all of it."""
    pad = jnp.pad if isinstance(prompt, jax.Array) else np.pad
    return pad(as_ids(prompt), ((0, 0), (0, slots - prompt.shape[1])))


def _row_keys(key: jax.Array, batch: int) -> jax.Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return key if key.ndim else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))


def _replicated(variables: Variables) -> NamedSharding | None:
    """The sharding of a result that each device of the variables' mesh has in full; None where there is no mesh."""
    for leaf in jax.tree.leaves(variables):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


@cache
def _program(result: NamedSharding | None) -> Callable[..., jax.Array]:
    return jax.jit(partial(_generate_on, result), static_argnums=(0, 1, 2), out_shardings=result)


def _generate_on(
    result: NamedSharding | None, model: GPT, max_new_tokens: int, top_k: int | None, *arrays: PyTree
) -> jax.Array:
    """`_generate`; Explicit axes of the variables' mesh are made Auto, so that the compiler splits the program."""
    run = partial(_generate, model, max_new_tokens, top_k)
    if result is None or AxisType.Explicit not in result.mesh.axis_types:
        return run(*arrays)
    split: Callable = jax.sharding.auto_axes(run, axes=result.mesh.axis_names, out_sharding=result)
    return split(*arrays)


def _generate(
    model: GPT,
    max_new_tokens: int,
    top_k: int | None,
    variables: Variables,
    prompt: jax.Array,
    lengths: jax.Array,
    keys: jax.Array | None,
    temperature: jax.Array,
    top_p: jax.Array | None,
    stops: jax.Array,
) -> jax.Array:
    """The program of `generate`, for padded prompts."""
    slots = prompt.shape[1]
    prompt = jnp.where(is_token(lengths, slots), prompt, prompt[:, :1])
    reader = Reader.for_prompts(model, variables, lengths, slots)

    def choose(logits: jax.Array, step: jax.Array) -> jax.Array:
        step_keys = None if keys is None else jax.vmap(partial(jax.random.fold_in, data=step))(keys)
        return choose_tokens(logits, step_keys, temperature, top_k, top_p)

    def add_token(step: jax.Array, carry: Carry) -> Carry:
        """Read the new token before `step`, and choose the one of `step`."""
        generated, caches, ended = carry
        last = lax.dynamic_slice_in_dim(generated, step - 1, 1, axis=1)
        logits, caches = reader.read(last, caches, step - 1)
        token = jnp.where(ended, last[:, 0], choose(logits, step))
        generated = lax.dynamic_update_slice_in_dim(generated, token[:, None], step, axis=1)
        return generated, caches, ended | _is_among(token, stops)

    logits, caches = reader.read(prompt, reader.empty_caches(max_new_tokens - 1), None)
    token = choose(logits, jnp.int32(0))
    generated = jnp.zeros((prompt.shape[0], max_new_tokens), jnp.int32).at[:, 0].set(token)
    start = generated, caches, _is_among(token, stops)
    if not stops.size:  # the length of the loop is known, so the host does not wait for the device in each turn
        return lax.fori_loop(1, max_new_tokens, add_token, start)[0]
    count, (generated, _, _) = lax.while_loop(
        lambda carry: (carry[0] < max_new_tokens) & ~jnp.all(carry[1][2]),
        lambda carry: (carry[0] + 1, add_token(*carry)),
        (jnp.int32(1), start),
    )
    last = lax.dynamic_slice_in_dim(generated, count - 1, 1, axis=1)
    return jnp.where(jnp.arange(max_new_tokens)[None] < count, generated, last)


def _is_among(tokens: jax.Array, stops: jax.Array) -> jax.Array:
    return jnp.any(tokens[:, None] == stops[None], axis=1)
