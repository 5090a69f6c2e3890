"""Checks of the arguments of a GPT, of its loss and of `generate`. They run first, so that a bad value is reported by
its name.
"""

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax.core import Tracer

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe, is_array
from jax_fp8.core.formats import E4M3
from jax_fp8.core.types import Batch, PyTree
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.config_checks import DROPOUT_RATES
from jax_fp8.nn.checks import check_dtype, check_padding

BESIDE_TOKENS = ("segment_ids", "lengths", "loss_mask", "labels")  # what a batch may have beside its tokens
Tokens = jax.Array | np.ndarray


def check_config(config: GPTConfig, dtype: jax.typing.DTypeLike, param_dtype: jax.typing.DTypeLike) -> None:
    """Raise unless these are fields of a GPT."""
    if not hasattr(config, "max_seq_len"):
        raise ValueError(f"config must be a GPTConfig, got {config!r}; pass GPTConfig.preset(name) or GPTConfig(...)")
    check_dtype("dtype", dtype)
    check_dtype("param_dtype", param_dtype)


def check_call(
    config: GPTConfig,
    tokens: jax.Array,
    labels: jax.Array | None,
    mask: jax.Array | None,
    z_loss: float,
    segment_ids: jax.Array | None,
    lengths: jax.Array | None,
) -> None:
    """Raise unless a GPT can be called with these arguments."""
    check_tokens(tokens, "(batch, seq)", least=1)
    for name, array in (("labels", labels), ("mask", mask)):
        if array is not None and not is_array(array):
            raise ValueError(f"{name} must be an array like tokens, got {describe(array)}; pass jnp.asarray({name})")
    check_padding("GPT", segment_ids, lengths, tokens.shape)
    longest = config.max_seq_len
    if tokens.shape[-1] > longest:
        raise ValueError(f"a sequence must be at most max_seq_len={longest} tokens long, got {tokens.shape[-1]}")
    _check_z_loss(z_loss)
    if labels is None and (mask is not None or z_loss != 0):
        raise ValueError("mask and z_loss are for the loss, got them without labels; pass labels too")


def check_loss_settings(model: nn.Module, ignore_label: int | None, z_loss: float) -> None:
    """Raise unless these are arguments of `next_token_loss`."""
    if isinstance(model, type) or not hasattr(model, "apply"):
        arrived = f"the class {model.__name__}" if isinstance(model, type) else describe(model)
        raise ValueError(f"next_token_loss needs a model, got {arrived}; pass GPT(config)")
    if ignore_label is not None:
        check_integer("ignore_label", ignore_label, least=-(2**31), most=2**31 - 1)
    _check_z_loss(z_loss)


def check_tokens(tokens: Tokens, shape: str, least: int) -> None:
    """Raise unless these are integers of two dims, with at least one row, and at least `least` tokens in each.

    `shape` names the dims, for messages.
    """
    if not is_array(tokens) or tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be an integer array {shape}, got {describe(tokens)}; cast or reshape it")
    if not tokens.shape[0] or tokens.shape[1] < least:
        raise ValueError(
            f"tokens {shape} must have at least 1 row and {least} column{'s' * (least > 1)}, got {describe(tokens)}; "
            "leave empty batches out"
        )


def check_batch(batch: Batch) -> dict[str, jax.Array]:
    """The arrays of a training batch, by name. Raise unless it is one."""
    if not isinstance(batch, Mapping):
        check_tokens(batch, "(batch, seq + 1)", least=2)
        return {"tokens": batch}
    if "tokens" not in batch or len(batch) < 2 or not set(batch) <= {"tokens", *BESIDE_TOKENS}:
        raise ValueError(
            'a batch must be its tokens, or a dict of "tokens" with "segment_ids" or "lengths", with "loss_mask" or '
            f'"labels", or with one of each pair, got a dict of {", ".join(map(repr, batch)) or "nothing"}; name its '
            "arrays so, and leave out the others"
        )
    tokens, mask, labels = batch["tokens"], batch.get("loss_mask"), batch.get("labels")
    check_tokens(tokens, "(batch, seq + 1)", least=2)
    check_padding("a batch", batch.get("segment_ids"), batch.get("lengths"), tokens.shape)
    if mask is not None and labels is not None:
        raise ValueError(
            "a batch: learned tokens must be marked by loss_mask or by labels, got both; pass labels that are "
            "ignore_label where the mask is 0"
        )
    if mask is not None:
        _check_beside_tokens("loss_mask", mask, tokens.shape, "a bool or real", (jnp.bool_, jnp.integer, jnp.floating))
    if labels is not None:
        _check_beside_tokens("labels", labels, tokens.shape, "an integer", (jnp.integer,))
    return {name: array for name, array in batch.items() if array is not None}


def check_is_tokens_alone(segment_ids: jax.Array | None, lengths: jax.Array | None) -> None:
    """Raise where a batch has documents or lengths, and the model of its loss takes tokens alone."""
    for name, array in (("segment_ids", segment_ids), ("lengths", lengths)):
        if array is not None:
            raise ValueError(
                f"the {name} of a batch are for a GPT, and this loss has another model, which takes tokens alone; "
                "leave them out, or write a loss of your own that passes them to it"
            )


def _check_beside_tokens(
    name: str, array: jax.Array, shape: tuple[int, ...], wanted: str, kinds: tuple[type, ...]
) -> None:
    is_of_kind = is_array(array) and any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    if not is_of_kind or array.shape != shape:
        raise ValueError(
            f"a batch: {name} must be {wanted} array {shape}, one number for each token, got "
            f"{describe(array)}; cast or reshape it"
        )


def check_runs_by_layers(
    config: GPTConfig, segment_ids: jax.Array | None, lengths: jax.Array | None, deterministic: bool
) -> None:
    """Raise where a loss by its layers cannot do what the batch or the config asks for: dropout, documents, lengths,
    experts.
    """
    dropped = "" if deterministic else active_dropout(config)
    if dropped:
        raise ValueError(
            f'pipelines and remat="offload:N" run layers one by one, without dropout, got {dropped}; use another mesh '
            "or remat, or next_token_loss(model, deterministic=True)"
        )
    for name, array in (("segment_ids", segment_ids), ("lengths", lengths)):
        if array is not None:
            raise ValueError(
                f'pipelines and remat="offload:N" run layers one by one, without the {name} of a batch, got '
                f"{describe(array)}; pass tokens alone, or use another mesh or remat"
            )
    if config.num_experts:
        raise ValueError(
            'pipelines and remat="offload:N" run layers one by one, without the losses of routers, got a model with '
            f"num_experts={config.num_experts}; use another mesh or remat"
        )


def active_dropout(config: GPTConfig) -> str:
    """The first dropout rate of a GPT that is not 0, in words; "" where all are 0."""
    rates = {name: getattr(config, name) for name in DROPOUT_RATES}
    return next((f"{name}={rate}" for name, rate in rates.items() if rate), "")


def check_streams(config: GPTConfig, rngs: Mapping[str, jax.Array] | None, deterministic: bool) -> None:
    """Raise unless a loss gets the random keys that the dropout of a GPT needs."""
    dropped = active_dropout(config)
    if dropped and not deterministic and rngs is None:
        raise ValueError(
            f"a GPT with {dropped} needs a random stream in training, got none; pass "
            'rngs={"dropout": jax.random.key(0)} to make_train_step or to the loss, and evaluate with '
            "next_token_loss(model, deterministic=True)"
        )


def check_can_generate(model: object, variables: object) -> None:
    """Raise unless `generate` can run this model."""
    if not hasattr(getattr(model, "config", None), "max_seq_len"):
        raise ValueError(f"generate needs a GPT, got {describe(model)}; pass GPT(config)")
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(f'variables must hold "params", got {describe(variables)}; pass what model.init returned')


def check_prompts(
    config: GPTConfig, prompt: Tokens, lengths: Tokens | list[int] | tuple[int, ...] | None, max_new_tokens: int
) -> tuple[Tokens, Tokens]:
    """The prompts and their lengths as arrays. Raise unless a model can read the prompts and so many new tokens.

    Values of arrays that are only traced cannot be checked.
    """
    check_integer("max_new_tokens", max_new_tokens)
    check_tokens(prompt, "(batch, seq)", least=1)
    batch, seq = prompt.shape
    lengths = np.full(batch, seq) if lengths is None else lengths
    lengths = np.asarray(lengths) if isinstance(lengths, list | tuple) else lengths
    if not is_array(lengths) or lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be integers, one for each of the {batch} prompts, got {describe(lengths)}")
    longest = seq
    if is_known(lengths):
        shortest, longest = int(np.min(lengths)), int(np.max(lengths))
        if shortest < 1 or longest > seq:
            wrong = shortest if shortest < 1 else longest
            raise ValueError(f"lengths must be from 1 to {seq}, the tokens of a row, got {wrong}; leave empty rows out")
        if is_known(prompt):
            is_own = np.arange(seq)[None] < np.asarray(lengths)[:, None]
            _check_vocabulary("prompt", np.asarray(prompt)[is_own], config.vocab_size)
    if longest + max_new_tokens - 1 > config.max_seq_len:
        raise ValueError(
            f"a model with max_seq_len={config.max_seq_len} must read a prompt and all new tokens but the last in so "
            f"many tokens, got a prompt of {longest} and max_new_tokens={max_new_tokens}; cut the beginning of the "
            "prompt, or ask for fewer"
        )
    return prompt, lengths


def check_choice(temperature: float, top_k: int | None, top_p: float | None, key: jax.Array | None, batch: int) -> None:
    """Raise unless `generate` can choose tokens with these arguments."""
    check_number("temperature", temperature, "that is not negative", lambda temperature: temperature >= 0)
    if top_k is not None:
        check_integer("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p, "above 0 and at most 1", lambda top_p: 0 < top_p <= 1)
    if temperature == 0:
        return
    if key is None:
        raise ValueError(
            f"sampling at temperature {temperature} needs a key, got None; pass jax.random.key(seed), or temperature=0 "
            "for the most likely tokens"
        )
    shape = getattr(key, "shape", None)
    if shape is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        shape = shape[:-1]  # the words of a raw key
    if shape not in ((), (batch,)):
        arrived = describe(key) if shape is None else f"keys of shape {shape}"
        raise ValueError(f"key must be one random key, or one for each of the {batch} prompts, got {arrived}")


def check_stops(stop_tokens: Sequence[int], vocab: int) -> np.ndarray:
    """Stop tokens as i32[n]. Raise unless they are tokens."""
    stops = np.asarray(stop_tokens, None if len(stop_tokens) else np.int32)
    if stops.ndim != 1 or not jnp.issubdtype(stops.dtype, jnp.integer):
        raise ValueError(f"stop_tokens must be integers, got {stop_tokens!r}; pass a list of tokens, such as [0]")
    _check_vocabulary("stop_tokens", stops, vocab)
    return stops.astype(np.int32)


def check_kv_cache_dtype(dtype: Dtype | None) -> None:
    """Raise unless keys and values can be cached in this dtype."""
    if dtype is not None and dtype != E4M3:
        raise ValueError(
            f"kv_cache_dtype must be None, for the model's dtype, or jax_fp8.E4M3, got {dtype!r}; pass one of these"
        )


def check_stream(stream: bool, arrays: PyTree) -> None:
    """Raise unless tokens of these arrays can be handed to the caller as they come."""
    check_bool("stream", stream)
    if stream and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
        raise ValueError(
            "stream=True hands tokens to the host, which a traced function cannot do, got traced arrays; call generate "
            "outside of jax.jit, or with stream=False"
        )


def is_known(array: Tokens) -> bool:
    """Whether this process can read the numbers of an array: it is not traced, and no part lies on another host."""
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)


def _check_vocabulary(name: str, tokens: np.ndarray, vocab: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocab)]
    if outside.size:
        raise ValueError(f"{name} must be tokens of the vocabulary, from 0 to {vocab - 1}, got {outside[0]}")


def _check_z_loss(z_loss: float) -> None:
    check_number("z_loss", z_loss, "that is not negative", lambda z_loss: z_loss >= 0)
