"""One optimizer step as one jitted program with donated state: on a GPU, one CUDA graph.

    weights → FP8, once
    batch → microbatches ─scan→ gradients (mean, float32), staged amaxes (max) → update_state, once → fp8, scales
                                   └→ optimizer, in place → params, opt_state, and the weight cache cast with these scales

Donated buffers keep their addresses from step to step, so the graph is recorded once; nothing waits for the host.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jax_fp8.core.recipe import DelayedScaling, Recipe, check_recipe
from jax_fp8.core.staging import value_and_grad, warm_start_value_and_grad
from jax_fp8.core.state import count_nonfinite, keep_known_rows, map_gemms, update_state
from jax_fp8.train.train_state import TrainState
from jax_fp8.train.updates import InPlace, apply_updates, was_applied
from jax_fp8.train.weight_cache import cast_requests, cast_weights, refresh

# A whole step, loops and conditionals included, as one CUDA graph. Collectives stay outside: inside graphs they were slower and could hang.
CUDA_GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_graph_min_graph_size": 1,
}


class TrainStep:
    """`state, metrics = step(state, batch)`; made by `make_train_step`.

    The argument `state` is donated: use the returned one. `metrics` holds device scalars: "loss" (float32, mean over microbatches) and
    "nonfinite_amaxes" (int32, tensors whose amax was infinite or NaN and whose scale was therefore left alone).
    """

    def __init__(self, step: Callable, warm_start: Callable | None):
        self._step, self._warm_start = step, warm_start
        self._last_step_count = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        if isinstance(state.step, Tracer):  # being looked at, not run
            return self._step(state, batch)
        # Only a state this object did not return itself can be a fresh one; asking its step count would otherwise wait for the device.
        if self._warm_start is not None and state.step is not self._last_step_count and int(state.step) == 0:
            state = self._warm_start(state, batch)
        state, metrics = self._step(state, batch)
        self._last_step_count = state.step
        return state, metrics

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower the step for inspection; arrays or `jax.ShapeDtypeStruct`s."""
        return self._step.lower(state, batch)

    def trace(self, state: TrainState, batch: Any) -> jax.stages.Traced:
        """Trace the step for inspection; arrays or `jax.ShapeDtypeStruct`s."""
        return self._step.trace(state, batch)


def make_train_step(
    loss_fn: Callable[[dict, Any], jax.Array],
    tx: optax.GradientTransformation,
    recipe: Recipe | None,
    microbatches: int = 1,
    *,
    warm_start: bool = True,
    donate: bool = True,
    in_place: bool = True,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """Make the training step of a loss.

    Args:
      loss_fn: `loss_fn(variables, batch)`, the mean loss of a (micro)batch, a scalar.
      tx: the optimizer.
      recipe: the recipe of the model's layers; None for plain bfloat16.
      microbatches: split the batch, whose leaves all have one leading dim, into this many; gradients and loss are their mean, amaxes
        their maximum, and the FP8 state moves once.
      warm_start: before step 0, run the loss once with current scaling, so that the first step finds scales instead of ones.
      donate: update the state in place.
      in_place: let `fused_adam` write params, masters, moments and the weight cache in one kernel. It must then be the last transform that touches the
        updates; pass False for a `tx` that computes with what it returns (`optax.MultiSteps`, a scale after it). Other optimizers are not affected.
      compiler_options: XLA options; None is one CUDA graph per step where the default backend is a GPU.
    """
    check_recipe(recipe)
    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {microbatches}")
    if compiler_options is None:
        compiler_options = CUDA_GRAPH_OPTIONS if jax.default_backend() == "gpu" else {}
    jit = partial(jax.jit, donate_argnums=(0,) if donate else (), compiler_options=compiler_options)

    optimizer = optax.with_extra_args_support(tx)

    def step(state, batch):
        _check_state(state, recipe)
        variables = _with_weights_cast(state.variables, recipe) if microbatches > 1 else state.variables
        loss, grads, staged = _accumulate(value_and_grad(loss_fn), variables, batch, microbatches)
        with jax.named_scope("fp8_state"):
            fp8 = update_state(staged, recipe)
            metrics = {"loss": loss, "nonfinite_amaxes": count_nonfinite(staged)}
        with jax.named_scope("optimizer"):
            request = {"in_place": InPlace(cast_requests(state.cache, state.params, fp8))} if in_place else {}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **request)
            params = apply_updates(state.params, updates)
        applied = was_applied(updates)
        if applied is not None:
            fp8 = jax.tree.map(lambda new, old: jnp.where(applied, new, old), fp8, state.fp8)
        cache = refresh(state.cache, params, fp8, updates)
        return TrainState(state.step + 1, params, fp8, opt_state, cache), metrics

    def warm(state, batch):
        _check_state(state, recipe)
        _, _, staged = _accumulate(warm_start_value_and_grad(loss_fn), state.variables, batch, microbatches)
        return state.replace(fp8=keep_known_rows(state.fp8, update_state(staged, recipe)))

    return TrainStep(jit(step), jit(warm) if warm_start and isinstance(recipe, DelayedScaling) else None)


def _with_weights_cast(variables, recipe):
    """The weights in FP8 for all microbatches of a step, cast here unless the state carries them. Scales must be known: delayed scaling."""
    if "fp8_cache" in variables or not isinstance(recipe, DelayedScaling):
        return variables
    return {**variables, "fp8_cache": cast_weights(variables, recipe)}


def _accumulate(gradient_fn, variables, batch, microbatches):
    """Mean loss and gradients over the microbatches, and the state with the maximum of their amaxes staged."""
    if microbatches == 1:
        return gradient_fn(variables, batch)

    def add(carry, microbatch):
        loss, grads, fp8 = carry
        new_loss, new_grads, fp8 = gradient_fn({**variables, "fp8": fp8}, microbatch)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, new_grads)
        return (loss + new_loss, grads, fp8), None

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), variables["params"])
    start = (jnp.float32(0), zeros, variables.get("fp8", {}))
    (loss, grads, fp8), _ = jax.lax.scan(add, start, _split(batch, microbatches))
    return loss / microbatches, jax.tree.map(lambda g: g / microbatches, grads), fp8


def _split(batch, microbatches):
    """(batch, ...) as (microbatches, batch / microbatches, ...), strided, so that a sharded batch dim stays where it is."""

    def split(x):
        if x.shape[0] % microbatches:
            raise ValueError(
                f"microbatches must divide the batch size, got {microbatches=} and a batch of {x.shape[0]}"
            )
        return jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0)

    return jax.tree.map(split, batch)


def _check_state(state, recipe):
    has_state = bool(map_gemms(dict, state.fp8))
    if has_state and not isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"the state holds amax histories, but recipe={recipe!r} has none; pass the recipe the model was made with"
        )
    if not has_state and isinstance(recipe, DelayedScaling):
        raise ValueError(
            'recipe=DelayedScaling needs the collection "fp8" in the state, which is empty; give the model the same recipe'
        )
