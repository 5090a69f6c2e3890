"""Attention on shards: JAX's own fused kernel (cuDNN on a GPU) over each device's part of the batch and of the heads.

    query (batch, seq, heads, head_dim), key and value (batch, seq, kv_heads, head_dim) → like query

cuDNN's attention wants its three operands split alike, and does not say so to the compiler. So here, on each kind of
mesh: on Explicit axes it runs in a `shard_map` over those that split batch and heads; on Auto axes the three operands
first go through an operation that does nothing, whose rule ties their batches and their heads together. A group of
queries and its key stay on one device, so heads are split where an axis divides the number of key and value heads, and
computed whole on every device where it does not.
"""

from functools import partial
from typing import Any

import jax
import jax.custom_batching
from jax.experimental.custom_partitioning import custom_partitioning

from jax_fp8.kernels.dispatch import on_shards
from jax_fp8.kernels.explicit import Split, collect, divides, explicit_mesh, explicit_spec, parse_rule, whole_rows
from jax_fp8.kernels.varying import alike

RULE = "b s h d, b t h e, b t h e -> b s h d"  # the sequences and the features of a head have to be whole
SPLIT_DIMS = ("b", "h")


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, implementation: str | None
) -> jax.Array:
    """`jax.nn.dot_product_attention` of arrays that are split over a mesh, or over none."""
    attend: Any = partial(jax.nn.dot_product_attention, is_causal=causal, implementation=implementation)
    operands = query, key, value
    mesh = explicit_mesh(*operands)
    if mesh is not None:
        inputs, outputs = parse_rule(RULE)
        local = _split(mesh, inputs, operands)
        return on_shards(mesh, inputs, outputs, local, lambda *shards: (attend(*shards),), *operands)[0]
    return attend(*(_split_alike(*alike(*operands)) if implementation == "cudnn" else operands))


def as_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """(batch, seq, heads * head_dim) as (batch, seq, heads, head_dim); where an Explicit mesh cuts heads apart, whole."""
    mesh, heads = explicit_mesh(x), x.shape[-1] // head_dim
    if mesh is not None and not divides(mesh, explicit_spec(x)[-1], heads):
        x = whole_rows(x)
    return x.reshape(*x.shape[:-1], heads, head_dim)


def _split(mesh, inputs, operands) -> Split:
    """The axes that split the batch, and the heads where every device has whole groups."""
    split = collect(inputs, inputs[:1], [explicit_spec(operand) for operand in operands])
    kv_heads = operands[1].shape[2]
    return {dim: axes for dim, axes in split.items() if dim == "b" or (dim == "h" and divides(mesh, axes, kv_heads))}


@jax.custom_vjp
def _split_alike(query, key, value):
    return _tied(query, key, value)


def _forward(query, key, value):
    return _tied(query, key, value), None


def _backward(_, gradients):
    return gradients


_split_alike.defvjp(_forward, _backward)


def _partition(mesh, arg_shapes, result_shapes):
    shardings = tuple(arg.sharding for arg in arg_shapes)
    return mesh, lambda *operands: operands, shardings, shardings


def _shardy_rule(mesh, operand_types, result_types):
    """Heads are (kv_heads, queries of one): the same dim of all three, if every axis that might split them divides it."""
    (heads, kv_heads), group = (operand_types[position].shape[2] for position in (0, 1)), "g"
    queries = "h" if heads == kv_heads else f"(h {group})"
    operands = f"b s {queries} d, b t h e, b t h e"
    whole = [] if all(kv_heads % size == 0 for size in mesh.shape.values()) else ["h"]
    sizes = {} if heads == kv_heads else {"h": kv_heads, group: heads // kv_heads}
    replicated = ("s", "t", "d", "e", *whole, *([] if heads == kv_heads else [group]))
    return f"{operands} -> {operands}", {"need_replication_factors": replicated, **sizes}


_identity = custom_partitioning(lambda query, key, value: (query, key, value))
_identity.def_partition(partition=_partition, sharding_rule=_shardy_rule)
_tied = jax.custom_batching.custom_vmap(_identity)


@_tied.def_vmap
def _under_vmap(size, batched, *operands):
    """As they are: a batch of such attentions is not split alike by this."""
    del size
    return operands, tuple(batched)
