"""Generate text with a GPT, token by token, with a cache of keys and values.

    prompts ─the model, once─→ logits of each row's last token ─choose─→ token ─the model, one row each─→ logits → ...

It is one program. It casts the weights, reads the prompts, and then runs a loop whose body reads one token of each row.
The loop casts no weights, so a token costs one read of the weights and of the cache. The program reads the FP8 state
and never writes it. After every `BLOCK` tokens the program looks whether all rows have ended: on a GPU the host waits
for the answer, which would cost time after every token.

Few programs serve many calls. Prompts are padded to a power of two (with which tokens: see ops/cached_attention.py),
and the caches have room for a rounded number of new tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Literal, NamedTuple, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.ids import as_ids
from jax_fp8.core.paths import CAST_BY, OF_CACHE, VERSION
from jax_fp8.core.recipe_rules import step_recipe
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.kernels.few_rows import device_count, for_devices
from jax_fp8.models.checks import (
    Tokens,
    check_can_generate,
    check_choice,
    check_kv_cache_dtype,
    check_prompts,
    check_stops,
    check_stream,
    is_known,
)
from jax_fp8.models.decoder import Choice, Decoder, Made, Turn
from jax_fp8.models.gpt import GPT
from jax_fp8.models.reader import CACHE, Caches
from jax_fp8.ops.weight_version import is_stale

FEWEST_SLOTS = 16  # of prompts, padding included
BLOCK = 8  # tokens of each row, between two looks at whether all rows have ended
LONG = 128  # up to so many new tokens caches have room for a power of two, above for a multiple of it
Carry = tuple[jax.Array, Turn, Caches]  # of the loop; with all new tokens


@overload
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
    kv_cache_dtype: Dtype | None = None,
    stream: Literal[False] = False,
) -> jax.Array: ...


@overload
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
    kv_cache_dtype: Dtype | None = None,
    stream: Literal[True],
) -> Iterator[np.ndarray]: ...


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
    kv_cache_dtype: Dtype | None = None,
    stream: bool = False,
) -> jax.Array | Iterator[np.ndarray]:
    """Continue each prompt with new tokens, from a cache of keys and values.

    The program is compiled once for each model, batch size, power of two that prompts fit into, rounded number of new
    tokens (a power of two up to 128, above that a multiple of 128), `top_k`, `kv_cache_dtype` and way to choose tokens
    (most likely, sampled, sampled with `top_p`). Other lengths, temperatures and stop tokens use the same program.

    Args:
      model: a `GPT`.
      variables: "params", and "fp8" where the recipe has state, as in `TrainState.variables`; may lie on a mesh.
        Weights that are in FP8 already are not cast again: frozen ones, "fp8_frozen", and outside of `jax.jit` those of
        a weight cache, "fp8_cache", that was cast from these params by the recipe of the model.
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
      kv_cache_dtype: None keeps keys and values in the model's `dtype`; `jax_fp8.E4M3` in one byte, each key and value
        of a head with a scale of its own.
      stream: return an iterator over the tokens as they come, each i32[batch] in the host's memory. It computes the
        next tokens while the caller looks at the last ones, and ends when all rows have ended.

    Returns:
      The new tokens, i32[batch, max_new_tokens]; with `stream` the iterator.

    Raises:
      ValueError: if `model` is not a GPT, a prompt does not fit it, a setting has another value, `temperature` is above
        0 without a key, or `stream` is used inside of `jax.jit`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> config = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=32)
      >>> model, prompt = fp8.GPT(config), jnp.array([[1, 2, 3], [4, 5, 6]])
      >>> variables = jax.jit(model.init)(jax.random.key(0), prompt)
      >>> fp8.generate(model, variables, prompt, max_new_tokens=4).shape
      (2, 4)
      >>> [tokens.shape for tokens in fp8.generate(model, variables, prompt, max_new_tokens=2, stream=True)]
      [(2,), (2,)]
    """
    check_can_generate(model, variables)
    prompt, lengths = check_prompts(model.config, prompt, lengths, max_new_tokens)
    batch, seq = prompt.shape
    check_choice(temperature, top_k, top_p, key, batch)
    check_kv_cache_dtype(kv_cache_dtype)
    stops = check_stops(stop_tokens, model.config.vocab_size)
    check_stream(stream, (variables, prompt, lengths))
    slots = max(FEWEST_SLOTS, 1 << (seq - 1).bit_length())
    slots = max(seq, min(slots, model.config.max_seq_len))
    is_sampled = temperature > 0
    choice = Choice(
        keys=_row_keys(key, batch) if is_sampled and key is not None else None,
        temperature=np.float32(temperature),
        top_p=np.float32(top_p) if is_sampled and top_p is not None else None,
        stops=stops,
        top_k=int(top_k) if is_sampled and top_k is not None else None,
    )
    mesh_wide = _replicated(variables)
    programs = _programs(mesh_wide, device_count(variables))
    static = model, _room(int(max_new_tokens)), None if kv_cache_dtype is None else np.dtype(kv_cache_dtype)
    own = nn.unbox({name: variables[name] for name in ("params", "fp8", FROZEN) if name in variables})
    own |= _valid_cache(model, variables)
    arrays = own, _padded(prompt, slots), as_ids(lengths), choice
    if stream:
        _check_can_stream(mesh_wide)
        return _stream(programs, static, arrays, int(max_new_tokens), stops)
    return programs.whole(*static, *arrays, np.int32(max_new_tokens))[:, :max_new_tokens]


def _check_can_stream(result: NamedSharding | None) -> None:
    if result is not None and _has_explicit_axes(result):
        raise ValueError(
            f"stream=True needs variables on a mesh with Auto axes, got {result.mesh}; make the mesh with "
            "axis_types=(jax.sharding.AxisType.Auto, ...), or pass stream=False"
        )


def _valid_cache(model: GPT, variables: Variables) -> dict[str, PyTree]:
    """The weight cache of these variables as a collection, if it can be used; else {}."""
    cache, recipe = variables.get(CACHE), step_recipe(model.recipe)
    if not cache or recipe is None or cache[CAST_BY].recipe != recipe or not is_known(cache[VERSION]):
        return {}
    if bool(_is_stale(cache, nn.unbox(variables["params"]))):
        return {}
    return {CACHE: {name: tree for name, tree in cache.items() if name not in OF_CACHE}}


@jax.jit
def _is_stale(cache: PyTree, params: PyTree) -> jax.Array:
    return is_stale(cache, params)


def _room(new_tokens: int) -> int:
    """For how many new tokens of each row a program has room: the first one and whole blocks."""
    further = new_tokens - 1
    if further == 0:
        return 1
    return 1 + (max(BLOCK, 1 << (further - 1).bit_length()) if further <= LONG else -(-further // LONG) * LONG)


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


# ---- programs --------------------------------------------------------------------------------------------------------


class _Programs(NamedTuple):
    """`whole` generates everything. `begin` reads the prompts. `advance` reads one token of each row, and writes it to
    the caches that it is given.
    """

    whole: Callable[..., jax.Array]
    begin: Callable[..., tuple[Made, Turn, Caches]]
    advance: Callable[..., tuple[Turn, Caches]]


@cache
def _programs(result: NamedSharding | None, count: int) -> _Programs:
    """The programs for variables on `count` devices of a mesh, where each is to have the whole `result`."""
    static = (0, 1, 2)
    return _Programs(
        whole=jax.jit(for_devices(count, partial(_generate_on, result)), static_argnums=static, out_shardings=result),
        begin=jax.jit(for_devices(count, _begin), static_argnums=static, out_shardings=(None, result, None)),
        advance=jax.jit(for_devices(count, Decoder.advance), donate_argnums=1, out_shardings=(result, None)),
    )


def _begin(model: GPT, room: int, kv_cache_dtype: np.dtype | None, *arrays: PyTree) -> tuple[Made, Turn, Caches]:
    decoder, turn, caches = Decoder.begin(model, room, kv_cache_dtype, *arrays)
    return Made.by_program(decoder, arrays), turn, caches


def _stream(
    programs: _Programs, static: tuple, arrays: tuple, new_tokens: int, stops: np.ndarray
) -> Iterator[np.ndarray]:
    """The tokens of each turn. The next turn is under way before the caller gets the tokens of this one."""
    made, turn, caches = programs.begin(*static, *arrays)
    decoder: Decoder = made.with_arguments(arrays)
    ended = np.zeros(turn.tokens.shape, bool)
    for step in range(new_tokens):
        tokens = turn.tokens
        if step + 1 < new_tokens:
            turn, caches = programs.advance(decoder, caches, turn)
        found = np.asarray(tokens)
        yield found
        ended |= np.isin(found, stops)
        if ended.all():
            return


def _generate_on(
    result: NamedSharding | None,
    model: GPT,
    room: int,
    kv_cache_dtype: np.dtype | None,
    *arrays: PyTree,
) -> jax.Array:
    """`_generate`; Explicit axes of the variables' mesh are made Auto, so that the compiler splits the program."""
    run = partial(_generate, model, room, kv_cache_dtype)
    if result is None or not _has_explicit_axes(result):
        return run(*arrays)
    split: Callable = jax.sharding.auto_axes(run, axes=result.mesh.axis_names, out_sharding=result)
    return split(*arrays)


def _has_explicit_axes(sharding: NamedSharding) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types


def _generate(
    model: GPT,
    room: int,
    kv_cache_dtype: np.dtype | None,
    variables: Variables,
    prompt: jax.Array,
    lengths: jax.Array,
    choice: Choice,
    new_tokens: jax.Array,
) -> jax.Array:
    """The program of `generate`: tokens i32[batch, room], of which the first `new_tokens` are asked for."""
    decoder, turn, caches = Decoder.begin(model, room, kv_cache_dtype, variables, prompt, lengths, choice)
    generated = jnp.zeros((prompt.shape[0], room), jnp.int32).at[:, 0].set(turn.tokens)

    def add_token(_: int, carry: Carry) -> Carry:
        generated, turn, caches = carry
        turn, caches = decoder.advance(caches, turn)
        return lax.dynamic_update_slice_in_dim(generated, turn.tokens[:, None], turn.step, axis=1), turn, caches

    def is_wanted(carry: Carry) -> jax.Array:
        return (carry[1].step + 1 < new_tokens) & ~jnp.all(carry[1].ended)

    if room > 1:
        add_block = partial(lax.fori_loop, 0, BLOCK, add_token)
        generated, turn, _ = lax.while_loop(is_wanted, add_block, (generated, turn, caches))
    return jnp.where(jnp.arange(room)[None] <= turn.step, generated, turn.tokens[:, None])
