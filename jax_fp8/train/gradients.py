"""Gradients of a loss, and beside them, never among them, the amaxes of its backward pass.

    variables ─a recorder beside each GEMM─ loss, backward → loss, gradients of params; amaxes, staged in the FP8 state

`value_and_grad` puts a `Recorder` (core/recorder.py) beside the state of every GEMM, differentiates, and reads what the
layers left there. Gradients that add up over microbatches come back the same way, in `accumulate_grads`.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recorder import RECORDER, ByIdentity, Recorder, listing
from jax_fp8.core.state import join_amaxes, map_gemms, map_gemms_with_path, stage_joined
from jax_fp8.ops.passes import share_wgrad
from jax_fp8.train.checks import check_loss, check_loss_fn


def value_and_grad(loss_fn: Callable, has_aux: bool = False) -> Callable:
    """Like `jax.value_and_grad` over the params of a variable dict,
    and hands back the FP8 state with this pass's amaxes staged.

    Args:
      loss_fn: `loss_fn(variables, *args, **kwargs)`, a scalar, or `(scalar, aux)` with `has_aux`.
        `variables` is a Flax variable dict.
      has_aux: as in `jax.value_and_grad`.

    Returns:
      A function of the same arguments that returns `(loss, grads, fp8_state)`, or `((loss, aux), grads, fp8_state)`.
      `grads` matches `variables["params"]`; `fp8_state` is `variables["fp8"]` with slot 0 of each history raised to the
      amaxes of this pass, to be finished by `update_state`, or {} where there is no state.
    """

    check_loss_fn(loss_fn)
    record = value_grads_and_amaxes(loss_fn, has_aux)

    def run(variables, *args, **kwargs):
        value, grads, amaxes = record(variables, *args, **kwargs)
        return value, grads, stage_joined(_fp8_state(variables), amaxes)

    return run


def value_grads_and_amaxes(loss_fn: Callable, has_aux: bool = False, from_current: bool = False) -> Callable:
    """`value_and_grad` that hands back the amaxes of its pass alone, f32[rows], for `finish_step`:
    a step then stages none.

    With `from_current` every tensor is scaled by its own amax: for a first pass, when there is no history yet.
    """

    def run(variables, *args, **kwargs):
        recorded = map_gemms(partial(_with_recorder, from_current=from_current), _fp8_state(variables))
        value, grads = _differentiate(loss_fn, has_aux, variables, recorded, args, kwargs)
        return value, grads, _amaxes(variables, recorded)

    return run


def accumulate_grads(loss_fn: Callable, weight: float, gemms: Collection[LayerPath] = ()) -> Callable:
    """`value_grads_and_amaxes` that adds the gradients to sums: `sums + weight * grads`.

    The kernels of a GEMM with FP8 state, or of one of `gemms` for recipes without state (see `list_gemms`), are added
    up by the GEMMs that compute their gradients, in place, unless the layer is stacked by `nn.scan`.

    Returns:
      A function of `(variables, sums, *args)` that returns `(loss, sums, amaxes)`. `sums` matches
      `variables["params"]`, float32; `amaxes`: f32[rows].
    """

    def run(variables, sums, *args, **kwargs):
        added = {path: jax.new_ref(at_path(sums, path)) for path in added_by_gemms(_fp8_state(variables), sums, gemms)}
        recorded = map_gemms_with_path(partial(_with_sums, added, weight), _fp8_state(variables))
        for gemm in gemms:
            if sums_of_gemm := _sums_of(gemm, added):
                put_at_path(recorded, gemm, {RECORDER: Recorder(None, sums_of_gemm, weight, True, None)})
        value, grads = _differentiate(loss_fn, False, variables, recorded, args, kwargs)

        # What a GEMM has added up is read from where it left it. Its own gradient is zeros then: adding these brings
        # what reached the kernel on another way, as a rule nothing.
        def merge(path, total, gradient):
            total = added[path][...] if path in added else total
            return total + np.float32(weight) * gradient.astype(jnp.float32)

        return value, map_with_names(merge, sums, grads), _amaxes(variables, recorded)

    return run


def list_gemms(loss_fn: Callable, variables: Mapping, *args: Any) -> list[LayerPath]:
    """The layers whose GEMMs run in FP8, by path, found by tracing the loss:
    recipes without state leave no other trace of them in the variables.
    """
    with listing() as found:
        jax.eval_shape(lambda *given: loss_fn(*given), variables, *args)
    return list(found)


def added_by_gemms(fp8_state: Mapping, sums: Mapping, gemms: Collection[LayerPath] = ()) -> list[LayerPath]:
    """The kernels whose gradients `accumulate_grads` leaves to their GEMMs, and not to an addition after it.

    They are matrices, not stacked by `nn.scan`, and large enough for a GEMM of their own.
    """
    paths = [*gemms]
    map_gemms_with_path(lambda path, _: paths.append(path), fp8_state)
    added: dict[LayerPath, None] = {}
    for path in paths:
        kernels = [at_path(sums, kernel) for kernel in kernel_paths(path)]
        if any(getattr(kernel, "ndim", None) != 2 for kernel in kernels):
            continue
        if not share_wgrad(kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)):
            added |= dict.fromkeys(kernel_paths(path))
    return list(added)


def _sums_of(gemm, added) -> tuple[ByIdentity, ...]:
    """The sums of a GEMM's kernels, if they are added up by it."""
    return tuple(ByIdentity(added[kernel]) for kernel in kernel_paths(gemm) if kernel in added)


def _with_sums(added, weight, path, gemm):
    return _with_recorder(gemm, sums=_sums_of(path, added), weight=weight)


def _differentiate(loss_fn, has_aux, variables, recorded, args, kwargs):
    def of_params(params):
        replaced = {**variables, "params": params}
        out = loss_fn({**replaced, "fp8": recorded} if recorded else replaced, *args, **kwargs)
        check_loss(out, has_aux)
        return (out[0], _without_recorders(out[1])) if has_aux else out

    return jax.value_and_grad(of_params, has_aux=has_aux)(variables["params"])


def _fp8_state(variables) -> Mapping:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f'loss_fn must take a variable dict with "params" first, got {_describe(variables)}; '
            f'pass {{"params": ..., "fp8": ...}}'
        )
    return variables.get("fp8", {})


def _with_recorder(gemm, from_current=False, sums: tuple[ByIdentity, ...] = (), weight=1.0):
    stacked = gemm["scale"].shape[:-1]
    layers = gemm["scale"].size // 3
    ref = jax.new_ref(jnp.zeros((layers, 3) if stacked else (3,), jnp.float32))
    slot = jnp.arange(layers, dtype=jnp.int32).reshape(stacked) if stacked else None
    return {**gemm, RECORDER: Recorder(ByIdentity(ref), sums, weight, from_current, slot)}


def _amaxes(variables, recorded) -> jax.Array:
    found = []
    map_gemms(lambda _, gemm: found.append(gemm[RECORDER].record.amax_ref[...]), _fp8_state(variables), recorded)
    return join_amaxes(found)


def _without_recorders(tree):
    """A collection that `loss_fn` returned as aux, without what was put into it."""
    if isinstance(tree, Mapping):
        return {name: _without_recorders(child) for name, child in tree.items() if not isinstance(child, Recorder)}
    return type(tree)(map(_without_recorders, tree)) if type(tree) in (tuple, list) else tree


def _describe(value):
    return f"a dict with {sorted(value)}" if isinstance(value, Mapping) else type(value).__name__
