"""A GPT for generation: new tokens and the caches of earlier ones → logits after the last token, and longer caches.

`Reader.for_prompts` casts the weights once: kernels to FP8, as `model.apply` would, or to `dtype`, and biases to
`dtype`. It also joins kernels that stand side by side. So a loop around `read` casts activations alone. A reader is a
tree of arrays, which one program may return and another take.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.formats import INPUT, KERNEL
from jax_fp8.core.frozen import FROZEN, frozen_weight, is_frozen
from jax_fp8.core.paths import (
    LayerPath,
    at_path,
    experts_name,
    joined_name,
    kernel_paths,
    map_with_names,
    put_at_path,
)
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recipe_rules import recipe_at
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.amax import amax, as_matrix
from jax_fp8.kernels.chain import chained
from jax_fp8.kernels.quantize import quantize_rowwise
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT
from jax_fp8.nn.attention import KV_CACHE, PROJECTIONS
from jax_fp8.nn.gemm import shared_fields
from jax_fp8.ops.cached_attention import KeyValueCache, Slots, empty_slots, positions_of
from jax_fp8.ops.gemm_residual import as_one_array
from jax_fp8.ops.head import Fp8Head, Fp8Operand, PlainHead, finished_logits
from jax_fp8.ops.parameters import joined, split_columns
from jax_fp8.ops.passes import CAST_SCOPE, cast_weight
from jax_fp8.ops.weight_version import cached_weights
from jax_fp8.ops.weights import cast_gemms

Caches = dict[str, tuple[Slots, Slots]]  # keys and values of each layer: see KeyValueCache
STATIC = {"static": True}
CACHE = "fp8_cache"  # the collection of a weight cache


class _Body(GPT):
    """A GPT without its head."""

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, last: jax.Array) -> jax.Array:
        """The input (batch, 1, hidden) of the head, for tokens (batch, seq) at `positions`: of each row the token with
        the number `last` (batch,).
        """
        x = self._embed(self._table("embedding"), tokens, positions)
        for index in range(self.config.num_layers):
            x = self._layer(index)(x)
        return self._normalize(jnp.take_along_axis(x, last[:, None, None], axis=1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reader:
    """A model with its weights cast, for prompts of these lengths i32[batch], padded to `prompt_slots`. Weights of a
    cache among the variables, and frozen ones, are not cast again.
    """

    body: _Body = field(metadata=STATIC)
    weights: "_Weights"
    head: "_Head"
    lengths: jax.Array
    prompt_slots: int = field(metadata=STATIC)

    @classmethod
    def for_prompts(cls, model: GPT, variables: Variables, lengths: jax.Array, prompt_slots: int) -> "Reader":
        # A capacity is a part of training: here it would be that of the few tokens of one step.
        model = model.clone(config=replace(model.config, capacity_factor=None))
        body, weights = _Body(**shared_fields(model, GPT)), _Weights.cast_from(model, variables)
        return cls(body, weights, _Head.cast_from(model, variables["params"]), lengths, prompt_slots)

    def empty_caches(self, new_slots: int, dtype: jax.typing.DTypeLike | None = None) -> Caches:
        """Caches with room for the prompts and so many new tokens of each row; in `dtype`, or that of the model."""
        config, batch = self.body.config, self.lengths.shape[0]
        slots = self.prompt_slots + new_slots
        shape = batch, config.kv_heads, slots, config.features_of_head
        empty = empty_slots(shape, self.body.dtype if dtype is None else dtype)
        return {f"layer_{index}": (empty, empty) for index in range(config.num_layers)}

    def read(self, tokens: jax.Array, caches: Caches, step: jax.Array | None) -> tuple[jax.Array, Caches]:
        """Read tokens, and return logits f32[batch, vocab] after the last one, and the caches with these tokens.

        Args:
          tokens: the prompts i32[batch, prompt_slots], or one new token of each row i32[batch, 1].
          step: the number of the new token, from 0; None for prompts.
        """
        lengths, slots = self.lengths, self.prompt_slots
        kv_caches = {
            name: {"attention": {"slots": KeyValueCache(*pair, lengths, step, slots)}} for name, pair in caches.items()
        }
        last = lengths - 1 if step is None else jnp.zeros_like(lengths)
        positions = positions_of(lengths, slots, step)
        # Without this barrier XLA cuts the joined arrays before a loop around this call, and joins them in every turn.
        joined_arrays, tokens = lax.optimization_barrier((self.weights.joined, tokens))
        variables = {**replace(self.weights, joined=joined_arrays).variables(), KV_CACHE: kv_caches}
        apply = partial(self.body.apply, mutable=[KV_CACHE])
        x, written = (apply if step is None else chained(apply))(variables, tokens, positions, last)
        layers: PyTree = written[KV_CACHE]
        new_caches = {name: layers[name]["attention"]["slots"] for name in caches}
        logits = self.head.logits(x)[:, 0].astype(jnp.float32)
        return logits, {name: (cache.key, cache.value) for name, cache in new_caches.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weights:
    """The cast weights of the layers.

    Args:
      params: of the model; layers read those that `joined` does not have.
      joined: the biases of each GEMM side by side in `dtype`, and of one without FP8 its kernels too.
      widths: of each GEMM, the columns of its kernels.
      fp8: the collections "fp8", "fp8_cache" and "fp8_frozen".
    """

    params: dict[str, PyTree]
    joined: dict[LayerPath, dict[str, jax.Array]]
    widths: tuple[tuple[LayerPath, tuple[int, ...]], ...] = field(metadata=STATIC)
    fp8: dict[str, PyTree]

    @classmethod
    def cast_from(cls, model: GPT, variables: Variables) -> "_Weights":
        params, state = variables["params"], variables.get("fp8", {})
        gemms = tuple(gemms_of(model.config))
        recipes = {gemm: recipe_at(model.recipe, kernel_paths(gemm)[0][:-1]) for gemm in gemms}
        recipes = {gemm: own for gemm, own in recipes.items() if not is_frozen(variables, gemm)}
        plain = {gemm for gemm, own in recipes.items() if own is None}
        cached = dict(cached_weights(variables.get(CACHE, {})))
        to_cast = {gemm: own for gemm, own in recipes.items() if own is not None and gemm not in cached}
        cast = cast_gemms(params, state, to_cast)
        for gemm, weight in cached.items():
            put_at_path(cast, gemm, {"kernel": weight})
        with jax.named_scope(CAST_SCOPE):
            joined_arrays = {
                gemm: _joined(params, gemm, ("kernel", "bias") if gemm in plain else ("bias",), model.dtype)
                for gemm in gemms
            }
        widths = {
            gemm: tuple(array.shape[-1] for array in _arrays(params, gemm, next(iter(arrays))))
            for gemm, arrays in joined_arrays.items()
            if arrays
        }
        frozen: dict[str, PyTree] = {}
        for gemm in gemms:
            if (weight := frozen_weight(variables.get(FROZEN, {}), gemm)) is not None:
                put_at_path(frozen, gemm, {"kernel": replace(weight, columnwise=as_one_array(weight.columnwise))})
        collections = {"fp8": state, CACHE: cast, FROZEN: frozen}
        return cls(_with_wide_vectors(params), joined_arrays, tuple(widths.items()), collections)

    def variables(self) -> dict[str, PyTree]:
        """For `apply`. It cuts the joined arrays into the params of layers, and their op joins these again. XLA cancels
        the one against the other.
        """
        parts, widths = {}, dict(self.widths)
        for gemm, leaves in self.joined.items():
            for leaf, array in leaves.items():
                cut = split_columns(array, widths[gemm])
                parts |= {(*path[:-1], leaf): part for path, part in zip(kernel_paths(gemm), cut, strict=True)}
        params = map_with_names(lambda path, param: parts.get(path, param), self.params)
        return {"params": params, **{name: collection for name, collection in self.fp8.items() if collection}}


def _with_wide_vectors(params: PyTree) -> dict[str, PyTree]:
    """Params whose vectors are float32, in which norms compute: else each token would widen them again."""
    is_vector = lambda param: isinstance(param, jax.Array) and param.ndim == 1  # noqa: E731
    return jax.tree.map(lambda param: param.astype(jnp.float32) if is_vector(param) else param, dict(params))


def gemms_of(config: GPTConfig) -> Iterator[LayerPath]:
    """The paths of the GEMMs of all layers of a GPT."""
    into_mlp = ("gate", "up") if is_gated(config.activation) else ("up",)
    for index in range(config.num_layers):
        for names in (PROJECTIONS, ("out",)):
            yield f"layer_{index}", "attention", joined_name(names)
        has_experts = config.layer_fields(index)["num_experts"] > 0
        for names in (into_mlp, ("down",)):
            yield f"layer_{index}", "mlp", (experts_name if has_experts else joined_name)(names)
            if has_experts and config.shared_expert_features:
                yield f"layer_{index}", "mlp", "shared", joined_name(names)


def _joined(
    params: PyTree, gemm: LayerPath, leaves: tuple[str, ...], dtype: jax.typing.DTypeLike
) -> dict[str, jax.Array]:
    """For each of these leaves that the layers of a GEMM have: the arrays of all layers side by side."""
    parts = {leaf: _arrays(params, gemm, leaf) for leaf in leaves}
    return {leaf: joined(tuple(arrays), dtype) for leaf, arrays in parts.items() if arrays[0] is not None}


def _arrays(params: PyTree, gemm: LayerPath, leaf: str) -> list[PyTree]:
    """The arrays of this name of all layers of a GEMM; None for a layer without one."""
    return [at_path(params, (*path[:-1], leaf)) for path in kernel_paths(gemm)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Head:
    """The head without a gradient. Its weight (vocab, hidden) is in the model's dtype, or in FP8 by `recipe`. In FP8 it
    takes any number of rows.
    """

    weight: PyTree
    config: GPTConfig = field(metadata=STATIC)
    recipe: Recipe | None = field(metadata=STATIC)
    dtype: jax.typing.DTypeLike = field(metadata=STATIC)

    @classmethod
    def cast_from(cls, model: GPT, params: PyTree) -> "_Head":
        table, recipe = params["embedding" if model.config.tie_embeddings else "head"], model.head_recipe
        if recipe is not None:
            weight = cast_weight(table, lambda measure: recipe.cast(KERNEL, None, measure))
        else:
            with jax.named_scope(CAST_SCOPE):
                weight = table.astype(model.dtype)
        return cls(weight, model.config, recipe, model.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """From (batch, seq, hidden) to (batch, seq, vocab)."""
        if self.recipe is None:
            logits = PlainHead(self.weight).logits(x)
        else:
            rows = as_matrix(x)
            cast = self.recipe.cast(INPUT, None, partial(amax, rows))
            operand = Fp8Operand(quantize_rowwise(rows, cast), x.shape[:-1])
            logits = Fp8Head(self.weight, cast, self.recipe, self.dtype).logits(operand)
        return finished_logits(logits, divisor=self.config.logit_divisor, cap=self.config.logit_cap)
