"""What must hold of a GPT's shape, of its tokens, of its loss's settings, and of what it is to write: said before
anything is computed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe, is_array
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.norm import check_norm
from jax_fp8.nn.checks import check_dtype, check_padding
from jax_fp8.nn.dropout import is_rate
from jax_fp8.ops.rotary import ROTARY_BASE, check_rotary

TOLD_OF_TOKENS = ("segment_ids", "lengths", "loss_mask", "labels")
DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate")


def check_config(config: Any) -> None:
    """Raise unless a model can be made of a `GPTConfig`."""
    for name in ("vocab_size", "num_heads", "hidden_size", "max_seq_len"):
        check_integer(name, getattr(config, name))
    check_integer("num_layers", config.num_layers, least=0)
    for name in ("num_kv_heads", "mlp_hidden_size", "head_dim", "sliding_window"):
        if getattr(config, name) is not None:
            check_integer(name, getattr(config, name))
    for name in ("use_bias", "tie_embeddings", "qk_norm", "normalize_router_weights"):
        check_bool(name, getattr(config, name))
    if config.use_qkv_bias is not None:
        check_bool("use_qkv_bias", config.use_qkv_bias)
    check_number("norm_epsilon", config.norm_epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
    for name in DROPOUT_RATES:
        check_number(name, getattr(config, name), "of at least 0 and below 1", is_rate)
    check_rotary(config.rotary_base, config.rotary_scaling)
    if config.positions not in ("learned", "rotary"):
        raise ValueError(f'positions must be "learned" or "rotary", got {config.positions!r}')
    check_norm(config.norm)
    is_gated(config.activation)
    _check_experts(config)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.hidden_size
    if config.head_dim is None and width % heads:
        raise ValueError(
            f"num_heads must divide hidden_size, got num_heads={heads} and hidden_size={width}; change one of them, or "
            "give head_dim"
        )
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}")
    if config.positions == "rotary" and config.features_of_head % 2:
        raise ValueError(
            "rotary positions turn pairs and need an even head_dim, which is hidden_size / num_heads if it is None, "
            f"got {config.features_of_head}; change one of them"
        )
    if config.positions != "rotary" and (config.rotary_scaling is not None or config.rotary_base != ROTARY_BASE):
        raise ValueError(
            f"rotary_base and rotary_scaling are for rotary positions, got them with positions={config.positions!r}; "
            "leave them out"
        )


def _check_experts(config):
    check_integer("num_experts", config.num_experts, least=0)
    check_integer("experts_per_token", config.experts_per_token)
    for name in ("router_aux_loss", "router_z_loss"):
        check_number(name, getattr(config, name), "that is not negative", lambda weight: weight >= 0)
    if config.num_experts and config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token must be at most num_experts, got {config.experts_per_token} of {config.num_experts}; "
            "change one of them"
        )


def check_call(
    model: Any, tokens: Any, labels: Any, mask: Any, z_loss: Any, segment_ids: Any = None, lengths: Any = None
) -> None:
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
    check_padding("GPT", segment_ids, lengths, tokens.shape)
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
        check_integer("ignore_label", ignore_label, least=-(2**31), most=2**31 - 1)
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


def check_batch(batch: Any) -> dict[str, Any]:
    """What a batch to train on says, by name; or raise unless it is one."""
    if not isinstance(batch, Mapping):
        check_tokens(batch, "(batch, seq + 1)", least=2)
        return {"tokens": batch}
    if "tokens" not in batch or len(batch) < 2 or not set(batch) <= {"tokens", *TOLD_OF_TOKENS}:
        raise ValueError(
            'a batch must be its tokens, or a dict of "tokens" and "segment_ids", or of "tokens" and "lengths", and '
            'with either or alone of "loss_mask" or "labels", which say what is learned, got one of '
            f"{', '.join(map(repr, batch)) or 'nothing'}; name its arrays so, and leave out the others"
        )
    tokens, mask, labels = batch["tokens"], batch.get("loss_mask"), batch.get("labels")
    check_tokens(tokens, "(batch, seq + 1)", least=2)
    check_padding("a batch", batch.get("segment_ids"), batch.get("lengths"), tokens.shape)
    if mask is not None and labels is not None:
        raise ValueError(
            "a batch: what is learned is told by loss_mask or by labels, got both; pass labels that are ignore_label "
            "where the mask is 0"
        )
    if mask is not None:
        _check_beside_tokens("loss_mask", mask, tokens.shape, "a bool or real", (jnp.bool_, jnp.integer, jnp.floating))
    if labels is not None:
        _check_beside_tokens("labels", labels, tokens.shape, "an integer", (jnp.integer,))
    return {name: array for name, array in batch.items() if array is not None}


def check_is_read_as_tokens(reading: Any) -> None:
    """Raise where a batch says which of its tokens belong together to a model that is handed tokens alone."""
    for name in ("segment_ids", "lengths"):
        if getattr(reading, name) is not None:
            raise ValueError(
                f"the {name} of a batch are for a GPT, and the model of this loss is another one, which takes tokens "
                "alone; leave them out, or write a loss of your own that hands them to it"
            )


def _check_beside_tokens(name, array, shape, wanted, kinds):
    is_of_kind = is_array(array) and any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    if not is_of_kind or array.shape != shape:
        raise ValueError(
            f"a batch: {name} must be {wanted} array {shape}, one number for each of the tokens, got "
            f"{describe(array)}; cast or reshape it"
        )


def check_is_read_alone(segment_ids: Any, lengths: Any, dropped: str) -> None:
    """Raise where a batch says more than its tokens, or layers drop, but layers run one by one."""
    if dropped:
        raise ValueError(
            f'pipelines and remat="offload:N" run layers one by one, which do not drop, got {dropped}; use '
            "another mesh or remat, or next_token_loss(model, deterministic=True)"
        )
    for name, array in (("segment_ids", segment_ids), ("lengths", lengths)):
        if array is not None:
            raise ValueError(
                f'pipelines and remat="offload:N" run layers one by one, which do not know the {name} of a batch; '
                "pass tokens alone, or use another mesh or remat"
            )


def what_drops(config: Any) -> str:
    """The first rate of a GPT that is not 0, in words; "" where nothing is dropped."""
    rates = {name: getattr(config, name) for name in DROPOUT_RATES}
    return next((f"{name}={rate}" for name, rate in rates.items() if rate), "")


def check_streams(model: Any, rngs: Any, deterministic: bool) -> None:
    """Raise unless a loss has what a GPT draws from."""
    dropped = what_drops(model.config)
    if dropped and not deterministic and rngs is None:
        raise ValueError(
            f"a GPT with {dropped} is trained with a random stream, got none; pass "
            'rngs={"dropout": jax.random.key(0)} to make_train_step or to the loss, and to evaluate take '
            "next_token_loss(model, deterministic=True)"
        )


def check_has_no_experts(config: Any) -> None:
    """Raise where layers have experts, but run one by one."""
    if config.num_experts:
        raise ValueError(
            'pipelines and remat="offload:N" run layers one by one, which lose what routers add to the loss, '
            f"got a model with num_experts={config.num_experts}; use another mesh or remat"
        )


def check_written_by(model: Any, variables: Any) -> None:
    """Raise unless `generate` can run this model."""
    if not hasattr(getattr(model, "config", None), "max_seq_len"):
        raise ValueError(f"generate needs a GPT, got {describe(model)}; pass GPT(config)")
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(f'variables must hold "params", got {describe(variables)}; pass what model.init returned')


def check_prompts(config: Any, prompt: Any, lengths: Any, max_new_tokens: Any) -> tuple[np.ndarray | jax.Array, ...]:
    """Raise unless these are prompts of which a model can read so many tokens more; they and their lengths as arrays.
    Numbers that are not known while a program is traced are not looked at.
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
            f"a model with max_seq_len={config.max_seq_len} reads so many tokens, a prompt and all but the last of "
            f"the new ones, got a prompt of {longest} and max_new_tokens={max_new_tokens}; cut the beginning of the "
            "prompt, or ask for fewer"
        )
    return prompt, lengths


def check_choice(temperature: Any, top_k: Any, top_p: Any, key: Any, batch: int) -> None:
    """Raise unless tokens can be chosen in this way."""
    check_number("temperature", temperature, "that is not negative", lambda temperature: temperature >= 0)
    if top_k is not None:
        check_integer("top_k", top_k)
    if top_p is not None:
        check_number("top_p", top_p, "above 0 and at most 1", lambda top_p: 0 < top_p <= 1)
    if temperature == 0:
        return
    if key is None:
        raise ValueError(
            f"tokens are drawn with a key at temperature {temperature}, got None; pass jax.random.key(seed), or "
            "temperature=0 for the most likely ones"
        )
    shape = getattr(key, "shape", None)
    if shape is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        shape = shape[:-1]  # the words of a raw key
    if shape not in ((), (batch,)):
        arrived = describe(key) if shape is None else f"keys of shape {shape}"
        raise ValueError(f"key must be one random key, or one for each of the {batch} prompts, got {arrived}")


def check_stops(stop_tokens: Any, vocab: int) -> np.ndarray:
    """Stop tokens i32[n], or raise unless they are tokens."""
    stops = np.asarray(stop_tokens, None if len(stop_tokens) else np.int32)
    if stops.ndim != 1 or not jnp.issubdtype(stops.dtype, jnp.integer):
        raise ValueError(f"stop_tokens must be integers, got {stop_tokens!r}; pass a list of tokens, such as [0]")
    _check_vocabulary("stop_tokens", stops, vocab)
    return stops.astype(np.int32)


def is_known(array: Any) -> bool:
    """Whether its numbers can be read here: not while a program is traced, nor of another process."""
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)


def _check_vocabulary(name, tokens, vocab):
    outside = tokens[(tokens < 0) | (tokens >= vocab)]
    if outside.size:
        raise ValueError(f"{name} must be tokens of the vocabulary, from 0 to {vocab - 1}, got {outside[0]}")


def _check_z_loss(z_loss):
    check_number("z_loss", z_loss, "that is not negative", lambda z_loss: z_loss >= 0)
