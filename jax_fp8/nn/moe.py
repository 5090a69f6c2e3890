"""A mixture of experts in the place of a Transformer's MLP, norm included.

    x ─norm─→ router → experts of each token, weights
         ├──→ rows, sorted by expert → MLPs in FP8 ─sum─→ + x
         └──→ shared expert, where there is one ───────────┘

The router and its softmax are float32. The layer sows its auxiliary losses, already weighted, into the collection
"losses". The training loss adds them up, as `next_token_loss` does.
"""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer

from jax_fp8.core.checks import check_integer, check_number
from jax_fp8.core.paths import experts_name, joined_name
from jax_fp8.core.recipe_rules import recipe_of_all
from jax_fp8.core.shards import (
    COLUMNS,
    EXPERTS,
    ROWS,
    ParamSharding,
    current_experts,
    current_tensor,
    declare_sharding,
    parts_of,
    sum_over_batch,
)
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.kernels.amax import as_matrix
from jax_fp8.kernels.explicit import whole
from jax_fp8.kernels.norm import normalize
from jax_fp8.kernels.quantize import as_tuple
from jax_fp8.nn.checks import check_is_split, check_layer, check_padding, layer_name
from jax_fp8.nn.declared_gemm import DeclaredGemm
from jax_fp8.nn.dense import NormVariables
from jax_fp8.nn.dropout import drop, drops
from jax_fp8.nn.gemm import Fp8Module, GemmState, shared_fields
from jax_fp8.nn.names import named
from jax_fp8.nn.router import RouterVariables
from jax_fp8.nn.shared_expert import SharedExpert
from jax_fp8.ops.cached_attention import is_token
from jax_fp8.ops.collectives import gather_rows, own_rows
from jax_fp8.ops.expert_mlp import expert_mlp
from jax_fp8.ops.expert_rows import ExpertRows, check_capacity, sort_tokens
from jax_fp8.ops.layer_gemm import check_multiples_of_16
from jax_fp8.ops.parameters import LinearParameters, as_one_matrix
from jax_fp8.ops.router import EXPERT_USE, RouterRule, Routing, route

LOSSES = "losses"


class LayerNormMoE(Fp8Module):
    """A mixture of experts: `Σ down(weight · activation(up(norm(x))))` over the experts of each token.

    The result is as wide as `x`. Every token reaches all of its experts, if there is no `capacity_factor`. Variables:
    `params/{norm, router, up, down}`, with a gated activation `gate` too; kernels of experts are (num_experts, in,
    out), the router's is f32 (in, num_experts). Under delayed scaling `fp8/{+up, +down}` or `fp8/{+gate+up, +down}`:
    all experts share the three scales of a GEMM. There are no biases but `params/router/correction_bias`
    f32 (num_experts,), if asked for. A shared expert has variables of its own, `params/shared` and `fp8/shared`.

    The layer sows into two collections, where they are mutable: into "losses" its weighted auxiliary losses, and into
    "intermediates" `expert_fractions`, f32[num_experts], the share of tokens that the router sends to each expert, and
    with a `capacity_factor` `dropped_fraction`, f32[], the share of the choices of tokens that were dropped.

    Args:
      hidden_features: of each expert; with a recipe a multiple of 16, as the features of `x`.
      num_experts: MLPs that the router chooses from.
      experts_per_token: how many experts a token goes to.
      activation, norm, epsilon: as in `LayerNormMLP`.
      normalize_router_weights: divide the weights of a token by their sum, as Mixtral does.
      router_scores: "softmax", or "sigmoid" as DeepSeek-V3 has it: what makes scores of the router's logits. Experts
        with the highest scores are chosen, and their scores are their weights.
      router_scale: weights are multiplied by it at last.
      router_correction_bias: add a bias to the scores where experts are chosen, and to no weight. It balances experts
        without a loss, by an optimizer in `balance_experts`; then set `router_aux_loss` to 0.
      expert_groups, groups_per_token: the experts are so many groups of neighbours, of which a token may use so many.
      group_score_experts: a group's score is the sum of so many of its highest scores.
      shared_expert_features: hidden features of one more expert, which all tokens go to; 0 has none. Its weight is 1.
      gate_shared_expert: its weight is the sigmoid of `norm(x)` times a vector, `params/shared/router`.
      capacity_factor: None drops no token. Otherwise, of the tokens of a device, at most so many times the mean go to
        each expert, `capacity_factor * tokens * experts_per_token / num_experts`, rounded up. Tokens behind these
        have one expert less, and nothing in its place. Arrays then need room for so many rows alone, on every device.
      router_aux_loss: weight of the load-balancing loss of Switch Transformer (https://arxiv.org/abs/2101.03961,
        equation 4), for several choices of a token.
      router_z_loss: weight of the z-loss of ST-MoE (https://arxiv.org/abs/2202.08906, equation 5).
      down_init: initializer of the kernels of `down`; None is `kernel_init`.
      residual: return `x + ...`, added before the one rounding.
      recompute: sort and quantize again in the backward, instead of keeping the rows of all experts in FP8.
      dropout_rate: the fraction of the experts' sum that is dropped, by the random stream "dropout", before the
        residual is added.
      deterministic: True turns dropout off. With a dropout_rate, either this field or the argument must be set.
      zero_centered_scale: as in `SelfAttention`.
      recipe, dtype, param_dtype, kernel_init, bias_init, logical_axes, lora: as in `Fp8Module`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.LayerNormMoE(32, num_experts=4), jnp.ones((2, 8, 16))
      >>> variables = jax.jit(layer.init)(jax.random.key(0), x)
      >>> y, sown = jax.jit(lambda v, x: layer.apply(v, x, mutable=["losses"]))(variables, x)
      >>> y.shape, [*sown["losses"]]
      ((2, 8, 16), ['router_loss'])
    """

    hidden_features: int
    num_experts: int
    experts_per_token: int = 2
    activation: str = "gelu"
    norm: str = "layernorm"
    epsilon: float = 1e-6
    normalize_router_weights: bool = True
    router_scores: str = "softmax"
    router_scale: float = 1.0
    router_correction_bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    group_score_experts: int = 2
    shared_expert_features: int = 0
    gate_shared_expert: bool = False
    capacity_factor: float | None = None
    router_aux_loss: float = 0.01
    router_z_loss: float = 0.0
    down_init: Initializer | None = None
    residual: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    zero_centered_scale: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool | None = None, lengths: jax.Array | None = None) -> jax.Array:
        """Send each token to its experts, and add up what they return.

        Args:
          x: (..., in), real numbers of any dtype.
          deterministic: as in the fields; None leaves the choice to the field.
          lengths: int (batch,), of `x` (batch, seq, in): positions from there on are padding, which goes to no expert
            and counts in no loss of the router.

        Returns:
          (..., in) in `dtype`.

        Raises:
          ValueError: if a field is not valid, sizes are not multiples of 16 with a recipe, an array has another shape
            or dtype, or an axis `tensor` does not split the experts; or if a layer with dropout has `deterministic`
            twice, or not at all.
        """
        check_layer(self, x, ("hidden_features", "num_experts"))
        tensor = current_tensor()
        all_rows = x.shape[:-1] if tensor is None else tensor.all_rows(x.shape[:-1])
        if lengths is not None:
            check_padding(layer_name(self), None, lengths, all_rows)
        _check_fields(self)
        features, hidden = x.shape[-1], self.hidden_features
        norm = NormVariables(**shared_fields(self, NormVariables), name="norm")(features)
        router = RouterVariables(self.kernel_init, self.logical_axes, self.router_correction_bias, name="router")
        router = router(features, self.num_experts)
        names = ("gate", "up") if is_gated(self.activation) else ("up",)
        up = self._declare(names, features, hidden, self.kernel_init, ("expert", "embed", "mlp"), COLUMNS)
        down_init = self.down_init or self.kernel_init
        down = self._declare(("down",), hidden, features, down_init, ("expert", "mlp", "residual"), ROWS)
        if (up.fp8 is None) != (down.fp8 is None):
            raise ValueError(
                f"{layer_name(self)}: all kernels of experts must be in FP8 or none, got rules with a recipe for one "
                f"of {', '.join(names)} and down, and None for the other; write a rule that matches both"
            )

        tokens = as_matrix(x.astype(self.dtype))
        normalized = normalize(tokens, norm, self.epsilon, self.dtype)[0]
        mask = None
        if lengths is not None:
            mask = own_rows(as_matrix(is_token(lengths, all_rows[-1])[..., None])[:, 0], tensor)
        routing = route(normalized, router.kernel, RouterRule.from_fields(vars(self)), router.bias, mask, tensor)
        chosen = gather_rows(routing.experts, tensor)
        expert_rows = sort_tokens(chosen, self.num_experts, current_experts(), self.capacity_factor)
        dropped = self._dropped_fraction(chosen, expert_rows)
        router.record.measure(EXPERT_USE, jnp.append(routing.fractions, jnp.stack([dropped, routing.entropy])))
        self._sow(routing, dropped)
        drops_some = drops(self, deterministic)
        residual = tokens if self.residual else None
        added = None if drops_some else residual
        if self.shared_expert_features:
            shared_expert = SharedExpert(**shared_fields(self, SharedExpert), name="shared")
            added = shared_expert(tokens, norm, normalized, residual=added is not None)
        y, amaxes = expert_mlp(
            normalized,
            routing.weights,
            expert_rows,
            up.parameters,
            down.parameters,
            (up.fp8, down.fp8) if up.fp8 and down.fp8 else None,
            self.activation,
            self.dtype,
            residual=added,
            recompute=self.recompute,
            tensor=tensor,
        )
        if amaxes is not None:
            up.stage(amaxes[0])
            down.stage(amaxes[1])
        y = drop(self, y, self.dropout_rate, residual) if drops_some else y
        return y.reshape(x.shape)

    def _declare(
        self,
        names: tuple[str, ...],
        in_features: int,
        features: int,
        init: Initializer,
        axes: tuple[str, ...],
        split_dim: int,
    ) -> DeclaredGemm:
        """One grouped GEMM by the kernels of these layers side by side; `axes` are the names of their dims, and
        `split_dim` is the one that `tensor` splits.
        """
        whole_shape = self.num_experts, in_features, features
        how = init, axes if self.logical_axes else None, self.param_dtype, split_dim
        kernels = tuple(_Experts(whole_shape, *how, name=name)() for name in names)
        shape = kernels[0].shape  # of this device
        recipe = recipe_of_all(self.recipe, self.path, names)
        if recipe is None:
            return DeclaredGemm(_side_by_side(kernels))
        layer = "/".join((layer_name(self), joined_name(names)))
        check_multiples_of_16(layer, shape[1], (shape[2],) * len(names), current_tensor())
        state = GemmState(recipe, layer, name=experts_name(names))
        declared = state(_side_by_side(tuple(map(as_one_matrix, kernels))), None)
        kernels = tuple(kernel.reshape(shape) for kernel in as_tuple(declared.parameters.kernel))
        return replace(declared, parameters=_side_by_side(kernels))

    def _dropped_fraction(self, chosen: jax.Array, expert_rows: ExpertRows) -> jax.Array:
        """The share f32[] of the choices of all tokens that have no row for want of capacity."""
        if self.capacity_factor is None:
            return jnp.float32(0)
        assert expert_rows.dropped is not None, "counted where there is a capacity"
        numbers = jnp.sum(expert_rows.dropped), jnp.sum(chosen < self.num_experts)
        dropped, chosen = (sum_over_batch(number.astype(jnp.float32)) for number in numbers)
        return dropped / jnp.maximum(chosen, 1)

    def _sow(self, routing: Routing, dropped: jax.Array) -> None:
        if self.is_initializing():  # otherwise `init` would return losses among the variables
            return
        weighted = self.router_aux_loss * routing.balance_loss + self.router_z_loss * routing.z_loss
        self.sow(LOSSES, "router_loss", weighted)
        self.sow("intermediates", "expert_fractions", routing.fractions)
        if self.capacity_factor is not None:
            self.sow("intermediates", "dropped_fraction", dropped)


def _side_by_side(kernels: tuple[jax.Array, ...]) -> LinearParameters:
    return LinearParameters(kernels[0] if len(kernels) == 1 else kernels, None)


def apply_with_losses(
    model: nn.Module, variables: Variables, *args: PyTree, **options: Any
) -> tuple[PyTree, jax.Array | int]:
    """The result of `model.apply`, and the sum of the losses that its layers have sown, stacked layers included."""
    out, sown = model.apply(variables, *args, **options, mutable=[LOSSES])  # type: ignore[misc]
    return out, sum(jnp.sum(loss) for loss in jax.tree.leaves(sown))


class _Experts(nn.Module):
    """The kernels (experts, in, out) of one layer of all experts, each initialized by itself; in a step on shards those
    of this device. On an Explicit mesh that splits them, as the state of a step has them, they are gathered: the layer
    needs all experts of its tokens.
    """

    shape: tuple[int, int, int]
    kernel_init: Initializer
    axes: tuple[str, ...] | None
    param_dtype: Dtype
    split_dim: int

    @nn.compact
    def __call__(self) -> jax.Array:
        path, dim, tensor = (*self.path, "kernel"), self.split_dim, current_tensor()
        sharding = ParamSharding(dim, self.shape[dim], "hidden features of experts", has_experts=True)
        declare_sharding(path, sharding)
        shape, experts = list(self.shape), current_experts()
        if experts is not None:
            shape[EXPERTS] //= experts.size
        if tensor is not None:
            check_is_split("/".join(path), parts_of(path, dim), tensor)
            shape[dim] //= tensor.size

        def init_each(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
            experts, *kernel_shape = shape
            keys = jax.random.split(key, experts)
            return jax.vmap(lambda key: self.kernel_init(key, tuple(kernel_shape), dtype))(keys)

        init = named(init_each, self.axes, self.axes is not None)
        return whole(self.param("kernel", init, tuple(shape), self.param_dtype))


def _check_fields(module: LayerNormMoE) -> None:
    """Raise unless the fields of routing are valid, and no adapters are for experts."""
    layer = layer_name(module)
    for name in ("router_aux_loss", "router_z_loss"):
        check_number(f"{layer}: {name}", getattr(module, name), "that is not negative", lambda weight: weight >= 0)
    RouterRule.from_fields(vars(module)).check(module.num_experts, f"{layer}: ")
    check_capacity(f"{layer}: capacity_factor", module.capacity_factor)
    check_integer(f"{layer}: shared_expert_features", module.shared_expert_features, least=0)
    if module.gate_shared_expert and not module.shared_expert_features:
        raise ValueError(
            f"{layer}: gate_shared_expert is for a shared expert, got shared_expert_features=0; give it a size"
        )
    if module.lora is not None and any(map(module.lora.is_for, ("gate", "up", "down"))):
        raise ValueError(
            f"{layer}: experts have no adapters, got {module.lora}; name other layers, such as "
            'targets=("query", "key", "value", "out")'
        )
