"""A GPT that reads: tokens and the caches of what was read before → logits after the last token, and the caches.

Weights are cast when a `Reader` is made, and never when it reads: kernels to FP8, as `model.apply` would, or to
`dtype`, and biases; those that stand side by side are put together. So a loop around `read` casts activations alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.formats import INPUT, KERNEL
from jax_fp8.core.paths import LayerPath, at_path, experts_name, joined_name, kernel_paths, map_with_names
from jax_fp8.kernels.activation import is_gated
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.models.gpt import GPT
from jax_fp8.nn.attention import KV_CACHE, PROJECTIONS
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.ops.cached_attention import KeyValueCache, positions_of
from jax_fp8.ops.head import Fp8Head, Fp8Operand, PlainHead
from jax_fp8.ops.parameters import joined, split_columns
from jax_fp8.ops.passes import CAST_SCOPE, cast_weight
from jax_fp8.ops.weights import cast_gemms, kernels_of, ready_for_loop

Caches = dict[str, tuple[jax.Array, jax.Array]]  # keys and values of each layer: see KeyValueCache


class _Body(GPT):
    """A GPT without its head."""

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, last: jax.Array) -> jax.Array:
        """What the head reads of tokens (batch, seq) at `positions`: of each row the one with the number `last`
        (batch,), as (batch, 1, hidden).
        """
        x = self._embed(self._table("embedding"), tokens, positions)
        for index in range(self.config.num_layers):
            x = self._layer(index)(x)
        return self._normalize(jnp.take_along_axis(x, last[:, None, None], axis=1))


@dataclass(frozen=True)
class Reader:
    """A model that goes on from prompts of these lengths i32[batch], which are padded to `prompt_slots`."""

    body: _Body
    weights: "_Weights"
    head: Callable[[jax.Array], jax.Array]
    lengths: jax.Array
    prompt_slots: int

    @classmethod
    def of(cls, model: GPT, variables: Mapping, lengths: jax.Array, prompt_slots: int) -> "Reader":
        body, weights = _Body(**shared_fields(model, GPT)), _Weights.of(model, variables)
        return cls(body, weights, _make_head(model, variables["params"]), lengths, prompt_slots)

    def empty_caches(self, new_slots: int) -> Caches:
        """With room for prompts, and for so many new tokens of each row."""
        config, batch = self.body.config, self.lengths.shape[0]
        slots = self.prompt_slots + new_slots
        empty = jnp.zeros((batch, config.kv_heads, slots, config.features_of_head), self.body.dtype)
        return {f"layer_{index}": (empty, empty) for index in range(config.num_layers)}

    def read(self, tokens: jax.Array, caches: Caches, step: jax.Array | None) -> tuple[jax.Array, Caches]:
        """Logits f32[batch, vocab] after prompts i32[batch, prompt_slots], with `step` None, or after the new tokens
        i32[batch, 1] of this number, from 0; and the caches with what was read.
        """
        lengths, slots = self.lengths, self.prompt_slots
        kept = {
            name: {"attention": {"slots": KeyValueCache(*pair, lengths, step, slots)}} for name, pair in caches.items()
        }
        last = lengths - 1 if step is None else jnp.zeros_like(lengths)
        positions = positions_of(lengths, slots, step)
        # Behind a barrier: the compiler would otherwise cut before a loop around this, and put together in it.
        side_by_side, tokens = lax.optimization_barrier((self.weights.joined, tokens))
        variables = {**replace(self.weights, joined=side_by_side).variables(), KV_CACHE: kept}
        x, left = self.body.apply(variables, tokens, positions, last, mutable=[KV_CACHE])  # type: ignore[misc]
        found: Any = {name: left[KV_CACHE][name]["attention"]["slots"] for name in caches}
        logits = self.head(x)[:, 0].astype(jnp.float32)
        return logits, {name: (cache.key, cache.value) for name, cache in found.items()}


@dataclass(frozen=True)
class _Weights:
    """What the layers read.

    Args:
      params: of the model; read as they are, but for what `joined` has.
      joined: of each GEMM biases, and where there is no FP8 kernels, side by side in `dtype`.
      widths: of each GEMM, the columns of its kernels.
      fp8: the collections "fp8" and "fp8_cache".
    """

    params: dict
    joined: dict[LayerPath, dict[str, jax.Array]]
    widths: dict[LayerPath, tuple[int, ...]]
    fp8: dict

    @classmethod
    def of(cls, model: GPT, variables: Mapping) -> "_Weights":
        params, state = variables["params"], variables.get("fp8", {})
        gemms = tuple(_gemms(model.config))
        cast = {} if model.recipe is None else cast_gemms(params, state, dict.fromkeys(gemms, model.recipe))
        cast = ready_for_loop(cast, params)
        with jax.named_scope(CAST_SCOPE):
            leaves = ("bias",) if cast else ("kernel", "bias")
            side_by_side = {gemm: _joined(params, gemm, leaves, model.dtype) for gemm in gemms}
        widths = {gemm: tuple(kernel.shape[-1] for kernel in kernels_of(gemm, params)) for gemm in gemms}
        return cls(dict(params), side_by_side, widths, {"fp8": state, "fp8_cache": cast})

    def variables(self) -> dict:
        """For `apply`: each layer's part is cut where it is used, and what puts the parts together again is, to the
        compiler, nothing.
        """
        parts = {}
        for gemm, leaves in self.joined.items():
            for leaf, array in leaves.items():
                cut = split_columns(array, self.widths[gemm])
                parts |= {(*path[:-1], leaf): part for path, part in zip(kernel_paths(gemm), cut, strict=True)}
        params = map_with_names(lambda path, param: parts.get(path, param), self.params)
        return {"params": params, **{name: collection for name, collection in self.fp8.items() if collection}}


def _gemms(config) -> Iterator[LayerPath]:
    into_mlp = ("gate", "up") if is_gated(config.activation) else ("up",)
    name_in_mlp = experts_name if config.num_experts else joined_name
    for index in range(config.num_layers):
        for names in (PROJECTIONS, ("out",)):
            yield f"layer_{index}", "attention", joined_name(names)
        for names in (into_mlp, ("down",)):
            yield f"layer_{index}", "mlp", name_in_mlp(names)


def _joined(params, gemm, leaves, dtype) -> dict[str, jax.Array]:
    """Those leaves of the layers of a GEMM that they have, side by side."""
    found = {leaf: [at_path(params, (*path[:-1], leaf)) for path in kernel_paths(gemm)] for leaf in leaves}
    return {leaf: joined(tuple(arrays), dtype) for leaf, arrays in found.items() if arrays[0] is not None}


def _make_head(model, params) -> Callable[[jax.Array], jax.Array]:
    """A function of (batch, seq, hidden) to logits (batch, seq, vocab), without a gradient: in FP8 it takes any number
    of rows.
    """
    table, recipe = params["embedding" if model.config.tie_embeddings else "head"], model.head_recipe
    if recipe is None:
        with jax.named_scope(CAST_SCOPE):
            return PlainHead(table.astype(model.dtype)).logits
    weight = cast_weight(table, lambda measure: recipe.cast(KERNEL, None, measure))

    def head(x):
        rows = as_matrix(x)
        cast = recipe.cast(INPUT, None, partial(amax, rows))
        operand = Fp8Operand(quantize_rowwise(rows, cast), x.shape[:-1])
        return Fp8Head(weight, cast, recipe, model.dtype).logits(operand)

    return head
