"""Attention on shards: JAX's own fused kernel (cuDNN on a GPU) over each device's part of the batch and of the heads.

    query (batch, seq, heads, head_dim), key and value (batch, keys, kv_heads, head_dim) → like query

cuDNN's attention wants its three operands split alike, and does not say so to the compiler. So here, on each kind of
mesh: on Explicit axes it runs in a `shard_map` over those that split batch and heads; on Auto axes the three operands
first go through an operation that does nothing, whose rule ties their batches and their heads together. A group of
queries and its key stay on one device, so heads are split where an axis divides the number of key and value heads, and
computed whole on every device where it does not.

Documents that are packed into one sequence are told apart by numbers, `segment_ids`. They become a mask (batch, 1, seq,
keys), for cuDNN in the dtype of the query: it has no other way that JAX makes public. The layers of a program share
that array. Where sequences end in padding, `lengths` say where it begins: cuDNN takes these as they are, without a
mask, and leaves out what is padding.
"""

from functools import partial
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.promotion import implicit_promotion
from jax_fp8.core.shards import TensorParallel
from jax_fp8.kernels.dispatch import on_shards
from jax_fp8.kernels.explicit import Split, collect, divides, explicit_mesh, explicit_spec, parse_rule, whole_rows
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.dropped_attention import dropped_attention

RULE = "b s h d, b t h e, b t h e -> b s h d"  # the sequences and the features of a head have to be whole
TOLD = {"segment_ids": "b u", "key_segment_ids": "b v", "lengths": "b", "key_lengths": "b"}
RANDOM_KEY = "dropout_key"  # told like these, but whole on every device


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    implementation: str | None,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` of arrays that are split over a mesh, or over none; of one sequence without the
    batch dim.

    Args:
      window: with `causal`, how many positions a query sees, the last of which is its own; None: all before it.
      segment_ids: int (batch, seq): a position sees those with the same number.
      lengths: int (batch,): what comes after so many positions is padding. None sees it, its own result is zeros, and
        its gradients are, too. A length of 0 counts as 1: so no softmax is over nothing, and there is no NaN.
      key_segment_ids, key_lengths: those of the keys, int (batch, keys) and (batch,), where they are of another
        sequence; None: those above. A query that sees no key has zeros as its result.
      dropout_rate, dropout_key: how likely a weight is dropped, and one random key; not by cuDNN, see
        ops/dropped_attention.py. On Explicit axes every device has masks of its own.
    """
    given = segment_ids, key_segment_ids, lengths, key_lengths
    told = {name: array for name, array in zip(TOLD, given, strict=True) if array is not None}
    if query.ndim == 3:
        query, key, value, told = jax.tree.map(lambda x: x[None], (query, key, value, told))
        options: Any = {"causal": causal, "implementation": implementation, "window": window}
        return attention(query, key, value, **options, **told, dropout_rate=dropout_rate, dropout_key=dropout_key)[0]
    if window is not None and not causal:
        raise ValueError(f"a window is of what comes before a position, so attention must be causal, got {window=}")
    if dropout_rate:
        check_drops_weights(implementation)
        assert dropout_key is not None, "dropout draws from a key"
        told[RANDOM_KEY] = dropout_key
    attend = partial(_attend, causal, implementation, window, dropout_rate, tuple(told))
    operands = query, key, value, *told.values()
    mesh = explicit_mesh(*operands)
    if mesh is not None:
        of_operands, of_result = RULE.split(" -> ")
        of_told = [TOLD.get(name, "") for name in told]
        inputs, outputs = parse_rule(f"{', '.join([of_operands, *of_told])} -> {of_result}")
        local = _split(mesh, inputs, operands)
        axes = tuple(axis for of_dim in local.values() for axis in of_dim) if dropout_rate else ()
        return on_shards(mesh, inputs, outputs, local, lambda *shards: (attend(*shards, axes=axes),), *operands)[0]
    if implementation != "cudnn":
        return attend(*operands)
    kv_heads = key.shape[2]
    together: Any = tied(kv_heads, *match_vma(*operands))
    attended: Any = tied(kv_heads, attend(*together))  # where heads are whole, they are on both sides
    return attended[0]


def check_drops_weights(implementation: str | None, of: str = "attention") -> None:
    """Raise where weights would be dropped by cuDNN; `of` says whose they are."""
    if implementation == "cudnn":
        raise ValueError(
            f"{of}: cuDNN's attention cannot drop its weights with other masks in every step, so "
            'attention_dropout_rate needs implementation="xla" (attention_implementation="xla" of a GPT or a '
            "TransformerBlock), got cuDNN; pass that, or attention_dropout_rate=0"
        )


def _attend(causal, implementation, window, rate, names, query, key, value, *told, axes=()) -> jax.Array:
    """Attention on one device, which is told so much by these names; one of several along these mesh axes.

    XLA's works in float32 where a user asks for strict promotion, and rounds in the end: no program can be made of
    its gradient in 16 bits there, a product of bfloat16 by float32.
    """
    query, key, value = name_residual("attention_operands", (query, key, value))
    dtype = query.dtype
    if implementation != "cudnn" and jax.config.jax_numpy_dtype_promotion == "strict":
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    with implicit_promotion():
        options: Any = {"is_causal": causal, "implementation": implementation}
        if window is not None and window < key.shape[1]:  # how many before a position, and after it
            options["local_window_size"] = window - 1, 0
        known = dict(zip(names, told, strict=True))
        random_key = known.pop(RANDOM_KEY, None)
        options |= _what_is_seen(**known)
        if random_key is not None:
            random_key = jax.random.fold_in(random_key, lax.axis_index(axes)) if axes else random_key
            del options["implementation"]
            return dropped_attention(query, key, value, rate, random_key, **options).astype(dtype)
        attended = jax.nn.dot_product_attention(query, key, value, **options).astype(dtype)
        if "key_segment_ids" not in names:
            return attended
        return jnp.where(options["mask"].any(-1).swapaxes(1, 2)[..., None], attended, 0)


def _what_is_seen(segment_ids=None, key_segment_ids=None, lengths=None, key_lengths=None) -> dict[str, jax.Array]:
    """As `jax.nn.dot_product_attention` takes it."""
    seen = {}
    if segment_ids is not None:
        of_keys = segment_ids if key_segment_ids is None else key_segment_ids
        seen["mask"] = segment_ids[:, None, :, None] == of_keys[:, None, None, :]
    of_keys = lengths if key_lengths is None else key_lengths
    for name, found in (("query_seq_lengths", lengths), ("key_value_seq_lengths", of_keys)):
        if found is not None:
            seen[name] = jnp.maximum(found.astype(jnp.int32), 1)
    return seen


def positions_in(segment_ids: jax.Array) -> jax.Array:
    """The position of each token in its document, i32[..., seq]: 0 where a number differs from the one before it."""
    axis = segment_ids.ndim - 1
    numbers = lax.broadcasted_iota(jnp.int32, segment_ids.shape, axis)
    before = jnp.concatenate([segment_ids[..., :1], segment_ids[..., :-1]], axis=axis)
    return numbers - lax.cummax(jnp.where(segment_ids != before, numbers, 0), axis=axis)


def as_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """(batch, seq, heads * head_dim) as (batch, seq, heads, head_dim); whole where an Explicit mesh would cut heads."""
    mesh, heads = explicit_mesh(x), x.shape[-1] // head_dim
    if mesh is not None and not divides(mesh, explicit_spec(x)[-1], heads):
        x = whole_rows(x)
    return x.reshape(*x.shape[:-1], heads, head_dim)


def own_heads(x: jax.Array, heads: int, tensor: TensorParallel | None) -> jax.Array:
    """The keys or values (..., heads, head_dim) that this device's queries attend to, where it has those of all:
    with fewer of them than devices, each device computes all, and uses one.
    """
    own = max(heads, 1)
    if tensor is None or x.shape[-2] == own:
        return x
    first = lax.axis_index(tensor.axis) * x.shape[-2] // tensor.size
    return lax.dynamic_slice_in_dim(x, first, own, axis=-2)


def _split(mesh, inputs, operands) -> Split:
    """The axes that split the batch, and the heads where every device has whole groups."""
    split = collect(inputs, inputs[:1], [explicit_spec(operand) for operand in operands])
    kv_heads = operands[1].shape[2]
    return {dim: axes for dim, axes in split.items() if dim == "b" or (dim == "h" and divides(mesh, axes, kv_heads))}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tied(kv_heads, *operands) -> Any:
    """The same arrays, whose batches and heads a compiler has to split alike, as cuDNN's attention wants them."""
    return _tie(kv_heads, *operands)


def _forward(kv_heads, *operands):
    return _tie(kv_heads, *operands), None


def _backward(kv_heads, _, gradients):
    del kv_heads
    return gradients


tied.defvjp(_forward, _backward)


def _tie(kv_heads, *operands):
    """The same arrays (batch, seq, heads, head_dim), whose batches and heads are split alike, and (batch, seq) or
    (batch,). Under `vmap` they are left alone.
    """
    same = jax.custom_batching.custom_vmap(partial(_identity, kv_heads))
    same.def_vmap(lambda _, batched, *operands: (operands, tuple(batched)))
    return same(*operands)


def _partition(kv_heads, mesh, arg_shapes, result_shapes):
    del kv_heads, arg_shapes
    shardings = tuple(result.sharding for result in result_shapes)
    return mesh, lambda *operands: operands, shardings, shardings


def _shardy_rule(kv_heads, mesh, operand_types, result_types):
    """Batches are one dim of all arrays. Heads are (kv_heads, queries of each): one dim too, if every axis that might
    split it divides the number of kv_heads; else they are whole. Dims that nothing else is tied to are nowhere split.
    """
    del result_types
    operands, results, whole = [], [], []
    sizes: dict[str, Any] = {}
    can_be_split = all(kv_heads % size == 0 for size in mesh.shape.values())
    for number, operand in enumerate(operand_types):
        if len(operand.shape) < 4:  # numbers of tokens, or of sequences
            of_tokens = len(operand.shape) == 2
            operands.append(f"b s{number}" if of_tokens else "b")
            results.append(f"b t{number}" if of_tokens else "b")
            continue
        group = operand.shape[2] // kv_heads
        heads = "h" if group == 1 else f"(h g{number})"
        operands.append(f"b s{number} {heads if can_be_split else f'o{number}'} d{number}")
        results.append(f"b t{number} {heads if can_be_split else f'r{number}'} e{number}")
        if not can_be_split:
            whole.append(number)
        elif group > 1:
            sizes[f"g{number}"] = group
    if sizes and not any(" h " in operand for operand in operands):  # a factor that is nowhere a dim of its own
        sizes["h"] = kv_heads
    if whole:  # or a part of an axis might split what is made of heads
        sizes["need_replication_factors"] = tuple(f"{side}{number}" for side in "or" for number in whole)
    return f"{', '.join(operands)} -> {', '.join(results)}", sizes


_identity = custom_partitioning(lambda kv_heads, *operands: operands, static_argnums=(0,))
_identity.def_partition(partition=_partition, sharding_rule=_shardy_rule)
