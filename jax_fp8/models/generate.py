"""Text from a GPT, token by token, with a cache of keys and values.

    prompts ─the model, once─→ logits of each row's last token ─choose─→ token ─the model, one row each─→ logits → ...

It is one program. It casts the weights, reads the prompts, and then runs a loop whose body reads one token of each row:
no weight is cast in the loop, and what a token costs is reading the weights and the cache. FP8 state is read and never
written. Prompts are padded to a power of two (ops/cached_attention.py says with what), so prompts of other lengths are
the same program.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.ids import as_ids
from jax_fp8.models.checks import check_choice, check_prompts, check_stops, check_written_by
from jax_fp8.models.gpt import GPT
from jax_fp8.models.reader import Reader
from jax_fp8.models.sampling import choose_tokens
from jax_fp8.ops.cached_attention import is_token

FEWEST_SLOTS = 16  # of prompts, padding included


def generate(
    model: GPT,
    variables: Mapping,
    prompt: Any,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: jax.Array | None = None,
) -> jax.Array:
    """What a model writes after each prompt: tokens i32[batch, max_new_tokens].

    It is compiled once for each model, batch, power of two that prompts fit into, `max_new_tokens`, `top_k`, and kind
    of choice (most likely, drawn, drawn with `top_p`); not for other lengths, temperatures or stop tokens.

    Args:
      variables: "params", and "fp8" where the recipe has state, as of `TrainState.variables`; may lie on a mesh.
      prompt: integers (batch, seq), at least one token each. With `lengths`, rows end in padding of any value. While a
        program is traced, what is no token is not refused, but makes logits NaN.
      lengths: integers (batch,), how many tokens of each row are its prompt; None is all.
      max_new_tokens: the model reads all but the last of them after the longest prompt, within its `max_seq_len`;
        rotary positions, too, end there.
      temperature: 0 takes the most likely token. Above, tokens are drawn; below 1 prefers likely ones.
      top_k: draw from so many most likely tokens.
      top_p: draw from the fewest most likely tokens that have at least this probability together, of what `top_k`
        leaves.
      stop_tokens: a row ends with the first of these, and repeats it to the end; when all rows have ended, no more is
        computed.
      key: where tokens are drawn: a random key, from which each row has its own by its number, or keys (batch,).
    """
    check_written_by(model, variables)
    prompt, lengths = check_prompts(model.config, prompt, lengths, max_new_tokens)
    batch, seq = prompt.shape
    check_choice(temperature, top_k, top_p, key, batch)
    stops = check_stops(stop_tokens, model.config.vocab_size)
    slots = max(FEWEST_SLOTS, 1 << (seq - 1).bit_length())
    slots = max(seq, min(slots, model.config.max_seq_len))
    is_drawn = temperature > 0
    program = _program(_whole_where(variables))
    return program(
        model,
        int(max_new_tokens),
        int(top_k) if is_drawn and top_k is not None else None,
        nn.unbox({name: variables[name] for name in ("params", "fp8") if name in variables}),
        _padded(prompt, slots),
        as_ids(lengths),
        _row_keys(key, batch) if is_drawn else None,
        np.float32(temperature),
        np.float32(top_p) if is_drawn and top_p is not None else None,
        stops,
    )


def _padded(prompt, slots):
    """Tokens i32[batch, slots]; a prompt of NumPy's stays there, for devices of several processes to take it whole."""
    pad = jnp.pad if isinstance(prompt, jax.Array) else np.pad
    return pad(as_ids(prompt), ((0, 0), (0, slots - prompt.shape[1])))


def _row_keys(key, batch) -> jax.Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return key if key.ndim else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(batch))


def _whole_where(variables) -> NamedSharding | None:
    """The sharding of a result that every device of the variables' mesh has; None where they lie on none."""
    for leaf in jax.tree.leaves(variables):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
    return None


@cache
def _program(result: NamedSharding | None):
    return jax.jit(partial(_write_on, result), static_argnums=(0, 1, 2), out_shardings=result)


def _write_on(result, model, max_new_tokens, top_k, *arrays) -> jax.Array:
    """`_write`, where variables lie on a mesh with Explicit axes as if they were Auto: the compiler splits it."""
    write = partial(_write, model, max_new_tokens, top_k)
    if result is None or AxisType.Explicit not in result.mesh.axis_types:
        return write(*arrays)
    split: Any = jax.sharding.auto_axes(write, axes=result.mesh.axis_names, out_sharding=result)
    return split(*arrays)


def _write(model, max_new_tokens, top_k, variables, prompt, lengths, keys, temperature, top_p, stops) -> jax.Array:
    """`generate` of padded prompts: its program."""
    slots = prompt.shape[1]
    prompt = jnp.where(is_token(lengths, slots), prompt, prompt[:, :1])
    reader = Reader.of(model, variables, lengths, slots)

    def choose(logits, step):
        own = None if keys is None else jax.vmap(partial(jax.random.fold_in, data=step))(keys)
        return choose_tokens(logits, own, temperature, top_k, top_p)

    def go_on(step, carry):
        """Read the new token before this one, and choose it."""
        written, caches, ended = carry
        last = lax.dynamic_slice_in_dim(written, step - 1, 1, axis=1)
        logits, caches = reader.read(last, caches, step - 1)
        token = jnp.where(ended, last[:, 0], choose(logits, step))
        written = lax.dynamic_update_slice_in_dim(written, token[:, None], step, axis=1)
        return written, caches, ended | _is_among(token, stops)

    logits, caches = reader.read(prompt, reader.empty_caches(max_new_tokens - 1), None)
    token = choose(logits, jnp.int32(0))
    written = jnp.zeros((prompt.shape[0], max_new_tokens), jnp.int32).at[:, 0].set(token)
    start = written, caches, _is_among(token, stops)
    if not stops.size:  # a loop of known length, in which the host need not ask the device
        return lax.fori_loop(1, max_new_tokens, go_on, start)[0]
    count, (written, _, _) = lax.while_loop(
        lambda carry: (carry[0] < max_new_tokens) & ~jnp.all(carry[1][2]),
        lambda carry: (carry[0] + 1, go_on(*carry)),
        (jnp.int32(1), start),
    )
    last = lax.dynamic_slice_in_dim(written, count - 1, 1, axis=1)
    return jnp.where(jnp.arange(max_new_tokens)[None] < count, written, last)


def _is_among(tokens, stops) -> jax.Array:
    return jnp.any(tokens[:, None] == stops[None], axis=1)
