"""The parts that all attention layers share: fields, the projections before attention, and the one after it.

x ─norm─ queries, keys, values ─qk_norm→ heads ...attention... → out ─dropout, residual→
"""

import functools
import warnings
from dataclasses import KW_ONLY
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Initializer
from jax import lax

from jax_fp8.core.checks import check_number
from jax_fp8.core.shards import COLUMNS, ParamSharding, TensorParallel, current_tensor, parts_of
from jax_fp8.kernels.norm import normalize
from jax_fp8.nn.branch import check_branch, end_branch, ends_in_gemm
from jax_fp8.nn.checks import check_is_split, layer_name
from jax_fp8.nn.dense import Dense, NormVariables, norm_multiply
from jax_fp8.nn.dropout import drops
from jax_fp8.nn.gemm import Fp8Module, declare_gemm_of, shared_fields
from jax_fp8.nn.names import named
from jax_fp8.ops.attention import as_heads
from jax_fp8.ops.dropped_attention import check_caps_logits, check_drops_weights

INPUT_DIMS = (2, 3)  # (batch, seq, width), and (seq, width) of one sequence


class MultiHead(Fp8Module):
    """The fields of `SelfAttention` and `CrossAttention`; the docstring of `SelfAttention` describes them."""

    num_heads: int
    num_kv_heads: int | None = None
    norm: str | None = None
    _: KW_ONLY
    use_bias: bool = True
    epsilon: float = 1e-6
    implementation: Literal["cudnn", "xla"] | None = None
    out_init: Initializer | None = None
    residual: bool = False
    head_dim: int | None = None
    use_qkv_bias: bool | None = None
    qk_norm: bool = False
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    fp8_attention: bool = False
    deterministic: bool | None = None
    qk_norm_over: str = "head"
    attention_scale: float | None = None
    attention_logit_cap: float | None = None
    norm_placement: str = "before"
    zero_centered_scale: bool = False
    residual_multiplier: float = 1.0


class WeightDropout(NamedTuple):
    """Dropout of softmax weights, as `attention` takes it."""

    rate: float = 0.0
    key: jax.Array | None = None


def head_sizes(module: MultiHead, width: int) -> tuple[int, int]:
    """Features of a head, and the number of key and value heads. Raise where this width has no such heads."""
    layer, heads = layer_name(module), module.num_heads
    kv_heads = heads if module.num_kv_heads is None else module.num_kv_heads
    if module.head_dim is None and width % heads:
        raise ValueError(
            f"{layer}: num_heads must divide the width, got num_heads={heads} and width {width}; change one of them"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{layer}: num_kv_heads must divide num_heads, got num_kv_heads={kv_heads} and num_heads={heads}; "
            "change one of them"
        )
    return module.head_dim or width // heads, kv_heads


def project(
    module: MultiHead,
    names: tuple[str, ...],
    x: jax.Array,
    widths: tuple[int, ...],
    shardings: tuple[ParamSharding, ...],
    norm: str | None,
) -> tuple[tuple[jax.Array, ...], jax.Array, TensorParallel | None]:
    """Normalize `x` if `norm` names a norm, and multiply it by the kernels of these layers in one GEMM.

    Returns:
      Each product, (batch, seq, heads * head_dim); `x`, for the residual branch; and the axis that splits heads in a
      step on shards, or None.
    """
    width, returns_input = x.shape[-1], module.residual and norm is not None
    norms = None if norm is None else NormVariables(**shared_fields(module, NormVariables), name="norm")(width)
    use_bias = module.use_bias if module.use_qkv_bias is None else module.use_qkv_bias
    gemm = declare_gemm_of(module, names, width, widths, shardings, use_bias=use_bias)
    kernel = *module.path, names[0], "kernel"
    check_is_split("/".join(kernel), parts_of(kernel, COLUMNS), current_tensor())
    if norms is None:
        products = gemm.multiply(x, module.dtype)
    else:
        out = norm_multiply(module, x, norms, gemm, returns_input)
        products, x = out if returns_input else (out, x)
    return products if len(names) > 1 else (products,), x, gemm.tensor


def as_normalized_heads(
    module: MultiHead, query: jax.Array, key: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys (batch, seq, heads * head_dim) as heads (batch, seq, heads, head_dim), with `qk_norm` after
    RMSNorm: of each head, with one scale for all heads, or of all heads of a token together.
    """
    by_head = module.qk_norm_over == "head"
    if module.qk_norm and not by_head and current_tensor() is not None:
        raise ValueError(
            f'{layer_name(module)}: qk_norm_over="all" needs all heads of a token on one device, and the mesh axis '
            "tensor splits them; use another mesh"
        )
    parts = tuple(as_heads(part, head_dim) for part in (query, key)) if by_head else (query, key)
    if module.qk_norm:
        fields = shared_fields(module, NormVariables) | {"norm": "rmsnorm", "of_heads": by_head}
        scales = [
            NormVariables(**fields, name=name)(part.shape[-1])
            for name, part in zip(("query_norm", "key_norm"), parts, strict=True)
        ]
        parts = tuple(
            normalize(part, scale, module.epsilon, module.dtype)[0] for part, scale in zip(parts, scales, strict=True)
        )
    query, key = parts if by_head else (as_heads(part, head_dim) for part in parts)
    return query, key


def check_multi_head(module: MultiHead) -> None:
    """Raise unless the fields of attention that are neither sizes nor flags are valid."""
    layer = layer_name(module)
    check_branch(module)
    if module.qk_norm_over not in ("head", "all"):
        raise ValueError(f'{layer}: qk_norm_over must be "head" or "all", got {module.qk_norm_over!r}')
    for name in ("attention_scale", "attention_logit_cap"):
        if getattr(module, name) is not None:
            check_number(f"{layer}: {name}", getattr(module, name), "above 0", lambda value: value > 0)


def choose_implementation(module: MultiHead) -> Literal["cudnn", "xla"]:
    """The library that computes attention. Raise where the field asks for one that cannot."""
    layer, wanted = layer_name(module), module.implementation
    has_16_bits = jnp.dtype(module.dtype).itemsize == 2
    if wanted not in (None, "cudnn", "xla"):
        raise ValueError(f'{layer}: implementation must be "cudnn", "xla" or None, got {wanted!r}')
    if wanted == "cudnn" and not has_16_bits:
        raise ValueError(
            f"{layer}: cuDNN's attention needs a dtype of 16 bits, got {jnp.dtype(module.dtype)}; "
            'use bfloat16, or implementation="xla"'
        )
    if module.attention_logit_cap is not None:
        check_caps_logits(wanted, layer)
        if wanted is None and jax.default_backend() == "gpu":
            _warn_of_caps()
        return "xla"
    return wanted or ("cudnn" if jax.default_backend() == "gpu" and has_16_bits else "xla")


@functools.cache
def _warn_of_caps() -> None:
    warnings.warn(
        "attention with attention_logit_cap is computed by XLA, because cuDNN's has no cap: it is slower, and holds "
        'the weights of all pairs of tokens in memory; with attention_implementation="xla" there is no such warning',
        stacklevel=2,
    )


def weight_dropout(module: MultiHead, deterministic: bool | None, tensor: TensorParallel | None) -> WeightDropout:
    """The dropout of softmax weights in this call. Over `tensor` each device has heads of its own, and so masks of its
    own.
    """
    if not drops(module, deterministic, "attention_dropout_rate"):
        return WeightDropout()
    check_drops_weights(choose_implementation(module), layer_name(module))
    key = module.make_rng("dropout")
    key = key if tensor is None else jax.random.fold_in(key, lax.axis_index(tensor.axis))
    return WeightDropout(module.attention_dropout_rate, key)


def multiply_out(
    module: MultiHead, attended: jax.Array, width: int, x: jax.Array, deterministic: bool | None = None
) -> jax.Array:
    """Project attention's result (batch, seq, heads, head_dim) to (batch, seq, width), and add the residual `x`."""
    residual, is_last = x if module.residual else None, ends_in_gemm(module, deterministic)
    fields = shared_fields(module, Dense) | {
        "kernel_init": named(module.out_init or module.kernel_init, ("heads", "residual"), module.logical_axes),
        # cuDNN's backward keeps its result in `dtype`; XLA's does not, nor does attention in FP8.
        "recompute": module.recompute and choose_implementation(module) == "cudnn" and not module.fp8_attention,
    }
    out = Dense(width, **fields, tensor_split="rows", name="out")
    attended = attended.reshape(*attended.shape[:-2], -1)
    if is_last:
        return out(attended, residual)
    return end_branch(module, out(attended), residual, deterministic)
