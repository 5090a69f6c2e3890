"""Attention on shards: JAX's own fused kernel (cuDNN on a GPU) over each device's part of the batch and of the heads.

    query (batch, seq, heads, head_dim), key and value (batch, keys, kv_heads, head_dim) → like query

cuDNN's attention needs its three operands split alike, and does not tell the compiler so. On Explicit axes this module
runs it in a `shard_map` over the axes that split batch and heads. On Auto axes the three operands first pass an
identity operation whose partitioning rule ties their batches and their heads together. A group of queries and its key
stay on one device: an axis splits heads where it divides the number of key and value heads, and elsewhere every device
computes all heads.

`segment_ids` number the documents that are packed into one sequence. They become a mask (batch, 1, seq, keys), which
cuDNN takes in the dtype of the query; JAX's public API has no other way. All layers of a program share that array.
Where sequences end in padding, `lengths` say where it begins. cuDNN takes lengths without a mask, and skips padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from jax_fp8.core.checkpoint_names import name_residual
from jax_fp8.core.promotion import implicit_promotion
from jax_fp8.core.shards import TensorParallel
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.dispatch import on_shards
from jax_fp8.kernels.explicit import (
    AnyMesh,
    Split,
    collect,
    divides,
    explicit_mesh,
    explicit_spec,
    parse_rule,
    whole_rows,
)
from jax_fp8.kernels.vma import match_vma
from jax_fp8.ops.dropped_attention import check_caps_logits, check_drops_weights, dropped_attention

RULE = "b s h d, b t h e, b t h e -> b s h d"  # the sequences and the features of a head have to be whole
MASKS = {"segment_ids": "b u", "key_segment_ids": "b v", "lengths": "b", "key_lengths": "b"}
RANDOM_KEY = "dropout_key"  # passed like the masks, but whole on every device


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
    scale: float | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` of arrays that are split over a mesh, or over none; of one sequence without the
    batch dim.

    Args:
      window: with `causal`, how many positions a query sees, its own included; None: all up to its own.
      segment_ids: int (batch, seq): a position sees positions with the same number.
      lengths: int (batch,): positions from this one on are padding. No query sees padding; results and gradients of
        padding are zeros. A length of 0 counts as 1, so that no softmax is empty and gives NaN.
      key_segment_ids, key_lengths: int (batch, keys) and (batch,), of the keys where they are another sequence; None:
        as above. A query that sees no key has zeros as its result.
      dropout_rate, dropout_key: how likely a weight is dropped, and one random key; not by cuDNN, see
        ops/dropped_attention.py. On Explicit axes every device has masks of its own.
      scale: of the products of queries and keys; None: `head_dim ** -0.5`.
      logit_cap: the scaled products become `logit_cap * tanh(product / logit_cap)`; not by cuDNN. None leaves them.
    """
    arrays = segment_ids, key_segment_ids, lengths, key_lengths
    masks = {name: array for name, array in zip(MASKS, arrays, strict=True) if array is not None}
    if query.ndim == 3:
        query, key, value, masks = jax.tree.map(lambda x: x[None], (query, key, value, masks))
        return attention(
            query,
            key,
            value,
            causal=causal,
            implementation=implementation,
            window=window,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            scale=scale,
            logit_cap=logit_cap,
            **masks,
        )[0]
    if window is not None and not causal:
        raise ValueError(f"a window is of what comes before a position, so attention must be causal, got {window=}")
    if dropout_rate:
        check_drops_weights(implementation)
        assert dropout_key is not None, "dropout draws from a key"
        masks[RANDOM_KEY] = dropout_key
    if logit_cap is not None:
        check_caps_logits(implementation)
    attend = partial(_attend, _Static(causal, implementation, window, dropout_rate, scale, logit_cap), tuple(masks))
    operands = query, key, value, *masks.values()
    mesh = explicit_mesh(*operands)
    if mesh is not None:
        of_operands, of_result = RULE.split(" -> ")
        of_masks = [MASKS.get(name, "") for name in masks]
        inputs, outputs = parse_rule(f"{', '.join([of_operands, *of_masks])} -> {of_result}")
        local = _split(mesh, inputs, operands)
        axes = tuple(axis for of_dim in local.values() for axis in of_dim) if dropout_rate else ()
        return on_shards(mesh, inputs, outputs, local, lambda *shards: (attend(*shards, axes=axes),), *operands)[0]
    if implementation != "cudnn":
        return attend(*operands)
    kv_heads = key.shape[2]
    together: PyTree = tied(kv_heads, *match_vma(*operands))
    attended: PyTree = tied(kv_heads, attend(*together))  # where heads are whole, so are those of the result
    return attended[0]


@dataclass(frozen=True)
class _Static:
    causal: bool
    implementation: str | None
    window: int | None
    rate: float
    scale: float | None
    logit_cap: float | None


def _attend(
    static: _Static,
    names: tuple[str, ...],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *masks: jax.Array,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """Attention on one device: `masks` are the arrays with these `names`, and `axes` the mesh axes along which the
    device is one of several.

    XLA's attention computes in float32 under strict dtype promotion, and rounds at the end. Its gradient in 16 bits
    multiplies bfloat16 by float32, which strict promotion refuses.
    """
    query, key, value = name_residual("attention_operands", (query, key, value))
    dtype, window, implementation = query.dtype, static.window, static.implementation
    if implementation != "cudnn" and jax.config.jax_numpy_dtype_promotion == "strict":
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    with implicit_promotion():
        # How many positions before a query's own it sees, and how many after it.
        local_window = (window - 1, 0) if window is not None and window < key.shape[1] else None
        by_name = dict(zip(names, masks, strict=True))
        random_key = by_name.pop(RANDOM_KEY, None)
        seen = _mask_and_lengths(**by_name)
        if random_key is not None or static.logit_cap is not None:
            if random_key is not None and axes:
                random_key = jax.random.fold_in(random_key, lax.axis_index(axes))
            return dropped_attention(
                query,
                key,
                value,
                static.rate,
                random_key,
                is_causal=static.causal,
                local_window_size=local_window,
                scale=static.scale,
                logit_cap=static.logit_cap,
                **seen,
            ).astype(dtype)
        attended = jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=static.causal,
            implementation=implementation,  # type: ignore[arg-type]
            scale=static.scale,
            local_window_size=local_window,
            **seen,
        ).astype(dtype)
        mask = seen.get("mask")
        if mask is None or "key_segment_ids" not in names:
            return attended
        return jnp.where(mask.any(-1).swapaxes(1, 2)[..., None], attended, 0)


class _Seen(TypedDict, total=False):
    """Arguments of `jax.nn.dot_product_attention`."""

    mask: jax.Array
    query_seq_lengths: jax.Array
    key_value_seq_lengths: jax.Array


def _mask_and_lengths(
    segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
) -> _Seen:
    """How `jax.nn.dot_product_attention` takes segment ids and lengths."""
    seen: _Seen = {}
    if segment_ids is not None:
        of_keys = segment_ids if key_segment_ids is None else key_segment_ids
        seen["mask"] = segment_ids[:, None, :, None] == of_keys[:, None, None, :]
    of_keys = lengths if key_lengths is None else key_lengths
    if lengths is not None:
        seen["query_seq_lengths"] = jnp.maximum(lengths.astype(jnp.int32), 1)
    if of_keys is not None:
        seen["key_value_seq_lengths"] = jnp.maximum(of_keys.astype(jnp.int32), 1)
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


def _split(mesh: AnyMesh, inputs: list[list[str]], operands: Sequence[jax.Array]) -> Split:
    """The axes that split the batch, and those that split the heads so that every device has whole groups."""
    split = collect(inputs, inputs[:1], [explicit_spec(operand) for operand in operands])
    kv_heads = operands[1].shape[2]
    return {dim: axes for dim, axes in split.items() if dim == "b" or (dim == "h" and divides(mesh, axes, kv_heads))}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tied(kv_heads: int, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays. The compiler has to split their batches and their heads alike, as cuDNN's attention needs."""
    return _tie(kv_heads, *operands)


def _forward(kv_heads: int, *operands: jax.Array):
    return _tie(kv_heads, *operands), None


def _backward(kv_heads: int, _: object, gradients: tuple[jax.Array, ...]):
    del kv_heads
    return gradients


tied.defvjp(_forward, _backward)


def _tie(kv_heads: int, *operands: jax.Array):
    """The same arrays (batch, seq, heads, head_dim), (batch, seq) or (batch,), tied by `_shardy_rule`. Under `vmap`,
    whose batch dim the rule does not know, they are returned as they are.
    """
    same = jax.custom_batching.custom_vmap(partial(_identity, kv_heads))
    same.def_vmap(lambda _, batched, *operands: (operands, tuple(batched)))
    return same(*operands)


def _partition(
    kv_heads: int,
    mesh: jax.sharding.Mesh,
    arg_shapes: Sequence[jax.ShapeDtypeStruct],
    result_shapes: Sequence[jax.ShapeDtypeStruct],
):
    del kv_heads, arg_shapes
    shardings = tuple(result.sharding for result in result_shapes)
    return mesh, lambda *operands: operands, shardings, shardings


def _shardy_rule(
    kv_heads: int, mesh: jax.sharding.Mesh, operand_types: Sequence[jax.ShapeDtypeStruct], result_types: object
):
    """The batch is one dim, shared by all arrays. Heads are (kv_heads, queries of each): also one shared dim if every
    mesh axis divides the number of kv_heads, else whole on every device. Other dims have names of their own, so that
    no axis splits them.
    """
    del result_types
    operands, results, whole = [], [], []
    sizes: dict[str, int | tuple[str, ...]] = {}
    can_be_split = all(kv_heads % size == 0 for size in mesh.shape.values())
    for number, operand in enumerate(operand_types):
        if len(operand.shape) < 4:  # segment ids of tokens, or lengths of sequences
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
    if sizes and not any(
        " h " in operand for operand in operands
    ):  # Shardy needs the size of a factor that is no dim by itself
        sizes["h"] = kv_heads
    if whole:  # else Shardy may split heads by a part of an axis
        sizes["need_replication_factors"] = tuple(f"{side}{number}" for side in "or" for number in whole)
    return f"{', '.join(operands)} -> {', '.join(results)}", sizes


_identity = custom_partitioning(lambda kv_heads, *operands: operands, static_argnums=(0,))
_identity.def_partition(partition=_partition, sharding_rule=_shardy_rule)
