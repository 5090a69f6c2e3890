"""Attention whose products are in FP8: cuDNN's fused kernels on CUDA, through the custom calls that XLA has for them.

    weights = softmax(query · keyᵀ / sqrt(head_dim))      float32; exp(scores - their maximum), at most 1, cast to E4M3
    output  = weights · value                               added in float32, then cast to E4M3

    dvalue   = weightsᵀ · doutput
    dscores  = weights * (doutput · valueᵀ - Σ doutput * output) / sqrt(head_dim)           float32, cast to E4M3
    dquery   = dscores · key          dkey = dscoresᵀ · query

Everything that enters and leaves is E4M3 with one scale a tensor. What is cast inside a kernel needs its scale before
it is known. Weights have a constant one: none is above 1, and at 2**-8 the largest is 256 of E4M3's 448. The output is
a mean of values, so its scale follows from theirs; twice as large, for the weights of a mean are rounded. Gradients are
bounded by nothing useful: the caller gives their scales, and the kernel tells their amaxes, measured before they are
cast.

The custom calls know no window, no padding and no documents in FP8, and on Hopper their backward takes heads of 128 and
whole blocks of 128 tokens alone. XLA reads what they do from JSON, a `GpuBackendConfig` with a `CudnnfMHABackendConfig`
(xla/service/gpu/backend_configs.proto).
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.amax import amax_reference
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.kernels.dispatch import Split, dispatch, gathered, pmax
from jax_fp8.kernels.explicit import divides, explicit_mesh, explicit_spec, place

HEAD_DIM = 128
BLOCK = 128  # tokens
WEIGHTS_SCALE = np.float32(2.0**-8)
OUTPUT_RANGE = np.float32(2)  # the output's scale, in scales of the values
GRADIENTS = ("dscores", "dquery", "dkey", "dvalue")  # in the order of their scales and amaxes

# Of queries (batch, seq, key heads, queries of each, features), and of keys and values. Dims that a result has alone
# are whole on every device: attention is split by batches and by key heads, and what is split otherwise is gathered.
QUERIES, KEYS, RESULT, STATISTICS = "b s k g d", "b t k d", "b u k h e", "b k h u"


def attend(query: Fp8Array, key: Fp8Array, value: Fp8Array, *, causal: bool) -> tuple[Fp8Array, jax.Array]:
    """Attention of values in E4M3 with one scale a tensor.

    Args:
      query: (batch, seq, heads, 128).
      key, value: (batch, keys, kv_heads, 128), each head shared by `heads / kv_heads` queries.
      causal: a query sees itself and what came before.

    Returns:
      The output like `query`; and log Σ exp(scores) of each query, f32[batch, kv_heads, heads / kv_heads, seq], for the
      backward.
    """
    rule = f"{QUERIES}, {KEYS}, {KEYS}, , , -> {RESULT}, {STATISTICS}"
    operands = _grouped(query.values, key.shape[2]), key.values, value.values
    kernel, reference = partial(_forward_kernel, causal), partial(_forward_reference, causal)
    values, statistics = dispatch(rule, kernel, reference, *operands, query.scale, key.scale, value.scale)
    return Fp8Array(_heads(values), _output_scale(value.scale)), statistics


def attend_backward(
    query: Fp8Array,
    key: Fp8Array,
    value: Fp8Array,
    output: Fp8Array,
    statistics: jax.Array,
    doutput: Fp8Array,
    scales: tuple[jax.Array, ...],
    *,
    causal: bool,
) -> tuple[tuple[Fp8Array, Fp8Array, Fp8Array], tuple[jax.Array, ...]]:
    """The gradients of `attend`.

    Args:
      query, key, value, output, statistics: of the forward.
      doutput: the gradient of the output, in E4M3.
      scales: f32[] of each of GRADIENTS.

    Returns:
      The gradients of query, key and value, in E4M3 with these scales; and f32[] amaxes of GRADIENTS.
    """
    assert len(scales) == len(GRADIENTS), "one scale for each gradient"
    known = ", " * (5 + len(scales))
    rule = f"{QUERIES}, {KEYS}, {KEYS}, {QUERIES}, {QUERIES}, b k g s{known} -> {RESULT}, b v k e, b v k e, , , , "
    kv_heads = key.shape[2]
    queries, outputs, doutputs = (_grouped(of.values, kv_heads) for of in (query, output, doutput))
    operands = queries, key.values, value.values, outputs, doutputs, statistics
    kernel, reference = partial(_backward_kernel, causal), partial(_backward_reference, causal)
    own = (of.scale for of in (query, key, value, output, doutput))
    dquery, dkey, dvalue, *amaxes = dispatch(rule, kernel, reference, *operands, *own, *scales)
    values = _heads(dquery), dkey, dvalue
    of_query, of_key, of_value = (Fp8Array(*of) for of in zip(values, scales[1:], strict=True))
    return (of_query, of_key, of_value), tuple(amaxes)


def check_head_dim(of: str, head_dim: int) -> None:
    """Raise unless cuDNN can attend in FP8 with such heads; `of` says whose they are."""
    if head_dim != HEAD_DIM:
        raise ValueError(
            f"{of}: FP8 attention needs a head_dim of {HEAD_DIM}, which is all that cuDNN's backward takes on Hopper, "
            f"got {head_dim}; change the heads, or use fp8_attention=False"
        )


def check_tokens(of: str, seq: int, keys: int) -> None:
    """Raise unless cuDNN can attend in FP8 from so many positions to so many; `of` says whose they are."""
    if seq % BLOCK or keys % BLOCK:
        got = f"{seq} tokens" + ("" if seq == keys else f" that attend to {keys}")
        raise ValueError(
            f"{of}: FP8 attention needs sequences of whole blocks of {BLOCK} tokens, got {got}; "
            "change the length, or use fp8_attention=False"
        )


def _grouped(queries: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, seq, heads, features) as (batch, seq, key heads, queries of each, features)."""
    mesh, spec = explicit_mesh(queries), explicit_spec(queries)
    if mesh is not None and not divides(mesh, spec[2], kv_heads):
        queries = place(mesh, queries, PartitionSpec(*spec[:2], None, *spec[3:]))
    batch, seq, heads, features = queries.shape
    return queries.reshape(batch, seq, kv_heads, heads // kv_heads, features)


def _heads(queries: jax.Array) -> jax.Array:
    """The inverse of `_grouped`."""
    return queries.reshape(*queries.shape[:2], -1, queries.shape[-1])


def _output_scale(value_scale: jax.Array) -> jax.Array:
    return value_scale * OUTPUT_RANGE


def _whole(split: Split, dims: str, array: jax.Array) -> jax.Array:
    """An array that is split by batches and key heads at most."""
    return gathered(array, split, *("" if dim in "bk" else dim for dim in dims.split()))


def _scores(causal: bool, query: jax.Array, key: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """(batch, key heads, queries of each, seq, keys) float32, -inf where a query does not see a key."""
    scores = jnp.einsum("bskgd,btkd->bkgst", query, key) * factor
    if not causal:
        return scores
    own, other = (lax.broadcasted_iota(jnp.int32, scores.shape, dim) for dim in (3, 4))
    return jnp.where(other <= own, scores, -jnp.inf)


def _cast(x: jax.Array, scale: PyTree) -> jax.Array:
    """What is left of `x` in E4M3, still without its scale, as float32."""
    return quantize_reference(x, E4M3, scale).astype(jnp.float32)


def _forward_reference(
    causal: bool, query: jax.Array, key: jax.Array, value: jax.Array, *scales: jax.Array, split: Split
):
    dims = QUERIES, KEYS, KEYS
    query, key, value = (
        _whole(split, of, x).astype(jnp.float32) for of, x in zip(dims, (query, key, value), strict=True)
    )
    of_query, of_key, of_value = scales
    scores = _scores(causal, query, key, query.shape[-1] ** -0.5 * (of_query * of_key))
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    output = jnp.einsum("bkgst,btkd->bkgsd", _cast(weights, WEIGHTS_SCALE), value) * (WEIGHTS_SCALE * of_value) / total
    values = quantize_reference(jnp.moveaxis(output, 3, 1), E4M3, _output_scale(of_value))
    return values, (largest + jnp.log(total))[..., 0]


def _backward_reference(causal: bool, *arrays: jax.Array, split: Split):
    dims = QUERIES, KEYS, KEYS, QUERIES, QUERIES
    query, key, value, output, doutput = (
        _whole(split, of, x).astype(jnp.float32) for of, x in zip(dims, arrays, strict=False)
    )
    statistics, of_query, of_key, of_value, of_output, of_doutput, *of_gradients = arrays[len(dims) :]
    of_dscores, *of_results = of_gradients
    statistics, root = _whole(split, "b k g s", statistics), query.shape[-1] ** -0.5
    weights = jnp.exp(_scores(causal, query, key, root * (of_query * of_key)) - statistics[..., None])
    means = jnp.moveaxis(jnp.sum(doutput * output, axis=-1), 1, 3) * (of_doutput * of_output)
    dweights = jnp.einsum("bskgd,btkd->bkgst", doutput, value) * (of_doutput * of_value)
    dscores = weights * (dweights - means[..., None]) * root
    cast = _cast(dscores, of_dscores)
    dquery = jnp.einsum("bkgst,btkd->bskgd", cast, key) * (of_dscores * of_key)
    dkey = jnp.einsum("bkgst,bskgd->btkd", cast, query) * (of_dscores * of_query)
    dvalue = jnp.einsum("bkgst,bskgd->btkd", _cast(weights, WEIGHTS_SCALE), doutput) * (WEIGHTS_SCALE * of_doutput)
    found = dquery, dkey, dvalue
    values = (quantize_reference(of, E4M3, scale) for of, scale in zip(found, of_results, strict=True))
    return *values, *(pmax(amax_reference(of), split, "b", "k") for of in (dscores, *found))


AMAX = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)  # and each scale
WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA asks cuDNN how much it needs
BY_TOKENS = (0, 2, 1, 3)  # in memory a token's heads are beside each other

# The order in which the backward's custom call takes scales, and their inverses for what it casts: XLA tells by its
# place alone what an operand is for (GetCudnnFlashAttentionBackwardF8OperationGraph in
# xla/stream_executor/cuda/cuda_dnn.cc). JAX's own lowering hands them over in another one.
BACKWARD_SCALES = ("query", "key", "value", "weights", "output", "doutput", "dscores")
BACKWARD_MULTIPLIERS = ("weights", "dscores", "dquery", "dkey", "dvalue")

# Tokens from which on the backward is a call for each sequence. cuDNN's takes longer for several at a time: on an H200,
# with 32 heads and 8 of keys, both passes take 5.4 ms for four of 4,096 tokens, and 3.9 ms where it is called for each.
SEQUENCES_APART = 2048


def _forward_kernel(causal: bool, query: jax.Array, key: jax.Array, value: jax.Array, *scales: jax.Array, split: Split):
    query, key, value = (
        _whole(split, dims, x) for dims, x in zip((QUERIES, KEYS, KEYS), (query, key, value), strict=True)
    )
    queries = _heads(query)
    batch, seq, heads, features = queries.shape
    results = (
        jax.ShapeDtypeStruct((batch, heads, seq, features), E4M3),
        *(AMAX, AMAX),  # of weights and output, whose scales do without
        jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
        WORKSPACE,
    )
    of_value = scales[-1]
    inside = WEIGHTS_SCALE, 1 / WEIGHTS_SCALE, 1 / _output_scale(of_value)
    config = _config(causal, queries.shape, key.shape[1], FORWARD_PRODUCTS)
    call = _call("__cudnn$fmhaSoftmaxF8", results, 1, config)
    output, _, _, statistics, _ = call(queries, key, value, *map(_operand, (*scales, *inside)))
    return output.swapaxes(1, 2).reshape(query.shape), statistics.reshape(batch, *query.shape[2:4], seq)


def _backward_kernel(causal: bool, *arrays: jax.Array, split: Split):
    dims = QUERIES, KEYS, KEYS, QUERIES, QUERIES
    query, key, value, output, doutput = (_whole(split, of, x) for of, x in zip(dims, arrays, strict=False))
    statistics, *scales = arrays[len(dims) :]
    statistics = _whole(split, "b k g s", statistics)
    own, (of_dscores, *of_results) = scales[:5], scales[5:]
    cast = dict(zip(GRADIENTS, (of_dscores, *of_results), strict=True)) | {"weights": WEIGHTS_SCALE}
    known = cast | dict(zip(("query", "key", "value", "output", "doutput"), own, strict=True))
    inside = *(known[name] for name in BACKWARD_SCALES), *(1 / cast[name] for name in BACKWARD_MULTIPLIERS)
    queries, outputs, doutputs = (_heads(of) for of in (query, output, doutput))
    batch, seq, heads, _ = queries.shape
    arrays = queries, key, value, outputs, doutputs, statistics.reshape(batch, heads, seq)
    at_a_time = 1 if seq >= SEQUENCES_APART else batch
    parts = [
        _backward_call(causal, *(of[first : first + at_a_time] for of in arrays), *map(_operand, inside))
        for first in range(0, batch, at_a_time)
    ]
    dquery, dkey, dvalue, *amaxes = zip(*parts, strict=True)
    dquery, dkey, dvalue = (jnp.concatenate(of).swapaxes(1, 2) for of in (dquery, dkey, dvalue))
    of_query, of_key, of_value, of_scores = (pmax(jnp.max(jnp.stack(of)), split, "b", "k") for of in amaxes)
    return dquery.reshape(query.shape), dkey, dvalue, of_scores, of_query, of_key, of_value


def _backward_call(causal: bool, queries: jax.Array, key: jax.Array, *others: jax.Array):
    """The gradients, (batch, heads, seq, features), and the amaxes of those of queries, keys, values and scores."""
    (batch, seq, heads, features), (_, keys, kv_heads, _) = queries.shape, key.shape
    shapes = (batch, heads, seq, features), *[(batch, kv_heads, keys, features)] * 2
    results = *(jax.ShapeDtypeStruct(shape, E4M3) for shape in shapes), *[AMAX] * 4, WORKSPACE
    call = _call("__cudnn$fmhaSoftmaxBackwardF8", results, 3, _config(causal, queries.shape, keys, BACKWARD_PRODUCTS))
    *found, _ = call(queries, key, *others)
    return found


def _operand(scale: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(scale, jnp.float32).reshape(AMAX.shape)


def _call(target: str, results: Sequence[jax.ShapeDtypeStruct], by_tokens: int, config: Mapping[str, object]):
    """The custom call, of whose results the first few are (batch, heads, seq, features)."""
    layouts: PyTree = [BY_TOKENS] * by_tokens + [None] * (len(results) - by_tokens)
    return jax.ffi.ffi_call(
        target, results, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=json.dumps(config)
    )


Product = tuple[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]
# Each product as XLA names it: the dims that are added over, of both operands, and those of batches. Queries and keys
# are (batch, seq, heads, features), scores (batch, heads, seq, keys).
FORWARD_PRODUCTS = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),  # query · keyᵀ
    "bmm2": ((3, 1), ((0, 1), (0, 2))),  # weights · value
}
BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # dscoresᵀ · query
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),  # dscores · key
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # weightsᵀ · doutput
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),  # doutput · valueᵀ
}


def _config(causal: bool, queries: tuple[int, ...], keys: int, products: Mapping[str, Product]) -> dict[str, object]:
    """The configuration of a custom call; 64-bit integers are strings in the JSON of protocol buffers."""
    batch, seq, heads, features = queries
    scores = {
        "element_type": "BF16",  # of which XLA makes no use in FP8, and which has to be a type that it knows
        "dimensions": _integers(batch, heads, seq, keys),
        "layout": {"minor_to_major": _integers(3, 2, 1, 0)},
        "is_dynamic_dimension": [False] * 4,
    }
    fused = {
        "algorithm": {
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": features**-0.5,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
    }
    for name, ((left, right), (left_batch, right_batch)) in products.items():
        fused[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": _integers(left),
            "rhs_contracting_dimensions": _integers(right),
            "lhs_batch_dimensions": _integers(*left_batch),
            "rhs_batch_dimensions": _integers(*right_batch),
        }
    return {"cudnn_fmha_backend_config": fused}


def _integers(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]
