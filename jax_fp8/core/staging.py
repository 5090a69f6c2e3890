"""Gradients and amaxes from one backward pass. This file is the only one that knows how the amaxes get out.

Flax state leaves a module through its mutable collections, but a backward pass has no such door: elsewhere the amax of an output gradient
travels as the cotangent of a parameter, and is summed under weight sharing, averaged over microbatches or clipped with the gradients.
Here `value_and_grad` makes one `jax.Ref` per GEMM and puts a `Recorder` beside the GEMM's state. The layer and its `custom_vjp` backward
write amaxes there by maximum, and they come back as what they are: staged state.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jax_fp8.core.state import map_gemms, stage

RECORDER = "recorder"


class _ByIdentity:
    """Keeps a Ref in the static part of a pytree: two are equal only when they are the same one."""

    __slots__ = ("ref",)

    def __init__(self, ref):
        self.ref = ref


@jax.tree_util.register_pytree_node_class
class Recorder:
    """A GEMM's way out of a backward pass, beside its state in the collection while `value_and_grad` runs.

    The Ref is static data of the pytree and is closed over wherever a transformation (`nn.scan`, `nn.remat`, `jit`) rebuilds the collection;
    only the slot is an array, one number per stacked layer, so that a scan over layers hands each layer its own.
    """

    def __init__(self, target: _ByIdentity, from_current: bool, slot: jax.Array | None):
        self.target, self.from_current, self.slot = target, from_current, slot

    @property
    def amax_ref(self) -> jax.Ref:
        return self.target.ref

    def tree_flatten(self):
        return (self.slot,), (self.target, self.from_current)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*static, *children)


def value_and_grad(loss_fn: Callable, has_aux: bool = False) -> Callable:
    """Like `jax.value_and_grad` over the params of a variable dict, and hands back the FP8 state with this pass's amaxes staged.

    Args:
      loss_fn: `loss_fn(variables, *args, **kwargs)`, a scalar, or `(scalar, aux)` with `has_aux`. `variables` is a Flax variable dict.
      has_aux: as in `jax.value_and_grad`.

    Returns:
      A function of the same arguments that returns `(loss, grads, fp8_state)`, or `((loss, aux), grads, fp8_state)`. `grads` matches
      `variables["params"]`; `fp8_state` is `variables["fp8"]` with slot 0 of each history raised to the amaxes of this pass, to be
      finished by `update_state`, or {} where there is no state.
    """
    return _value_and_grad(loss_fn, has_aux, from_current=False)


def warm_start_value_and_grad(loss_fn: Callable) -> Callable:
    """`value_and_grad` of a first pass, in which every tensor is scaled by its own amax because there is no history yet."""
    return _value_and_grad(loss_fn, has_aux=False, from_current=True)


def _value_and_grad(loss_fn, has_aux, from_current):
    def run(variables, *args, **kwargs):
        if not isinstance(variables, Mapping) or "params" not in variables:
            raise ValueError(
                f'loss_fn must take a variable dict with "params" first, got {_describe(variables)}; pass {{"params": ..., "fp8": ...}}'
            )
        fp8_state = variables.get("fp8", {})
        recorded = map_gemms(lambda gemm: _with_recorder(gemm, from_current), fp8_state)

        def of_params(params):
            replaced = {**variables, "params": params}
            out = loss_fn({**replaced, "fp8": recorded} if recorded else replaced, *args, **kwargs)
            return (out[0], _without_recorders(out[1])) if has_aux else out

        value, grads = jax.value_and_grad(of_params, has_aux=has_aux)(variables["params"])
        return value, grads, map_gemms(_staged, fp8_state, recorded)

    return run


def _with_recorder(gemm, from_current):
    stacked = gemm["scale"].shape[:-1]
    layers = gemm["scale"].size // 3
    ref = jax.new_ref(jnp.zeros((layers, 3) if stacked else (3,), jnp.float32))
    slot = jnp.arange(layers, dtype=jnp.int32).reshape(stacked) if stacked else None
    return {**gemm, RECORDER: Recorder(_ByIdentity(ref), from_current, slot)}


def _staged(gemm, recorded):
    amaxes = recorded[RECORDER].amax_ref[...].reshape(gemm["scale"].shape)
    return {**gemm, "amax_history": stage(gemm["amax_history"], amaxes)}


def _without_recorders(tree):
    """A collection that `loss_fn` returned as aux, without what was put into it."""
    if isinstance(tree, Mapping):
        return {name: _without_recorders(child) for name, child in tree.items() if not isinstance(child, Recorder)}
    return type(tree)(map(_without_recorders, tree)) if type(tree) in (tuple, list) else tree


def _describe(value):
    return f"a dict with {sorted(value)}" if isinstance(value, Mapping) else type(value).__name__
