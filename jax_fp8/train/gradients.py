"""Gradients of a loss, and beside them, never among them, the amaxes of its backward pass.

    variables ─a recorder beside each GEMM─ loss, backward → loss, gradients of params; amaxes f32[rows]

`value_grads_and_amaxes` puts a `Recorder` (core/recorder.py) beside the state of every GEMM, differentiates, and reads
what the layers left there. Gradients that add up over microbatches come back the same way, in `accumulate_grads`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import fp32_max_grad
from jax import lax

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names, put_at_path
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import RECORDER, ByIdentity, Cotangents, Recorder, listing
from jax_fp8.core.state import (
    check_dtypes,
    join_amaxes,
    keep_known_rows,
    map_gemms,
    map_gemms_with_path,
    no_amaxes,
)
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.update_state import finish_step
from jax_fp8.kernels.varying import vary, varying_axes
from jax_fp8.ops.passes import share_wgrad
from jax_fp8.train.by_layer import ByLayer
from jax_fp8.train.checks import ALONE, ALONE_OR_PAIR, check_loss
from jax_fp8.train.diagnostics import Observed, beside_amaxes, new_refs

Sums = Mapping[LayerPath, jax.Ref]  # of gradients, by the path of the kernel
NO_SUMS: Sums = MappingProxyType({})


def value_grads_and_amaxes(
    loss_fn: Callable, has_aux: bool = False, from_current: bool = False, observed: Observed = ()
) -> Callable:
    """Like `jax.value_and_grad` over the params of a variable dict; beside them the amaxes of the pass, f32[rows], for
    `finish_step` or `stage_joined`.

    With `from_current` every tensor is scaled by its own amax: for a first pass, when there is no history yet. How
    the tensors of `observed` were cast stands behind the amaxes (train/diagnostics.py).
    """

    @inside_its_mesh
    def run(variables, *args, **kwargs):
        cotangents, axes = Cotangents(), varying_axes(variables, args, kwargs)
        health = new_refs(observed, axes)
        recorded = record_in(variables, cotangents, axes, from_current, observed=observed, health=health)
        value, grads, amaxes = differentiate(loss_fn, has_aux, variables, recorded, cotangents, args, kwargs)
        return value, grads, beside_amaxes(amaxes, [ref[...] for ref in health.values()])

    return run


def with_first_scales(fp8_state: Mapping, amaxes: jax.Array, recipe: Recipe | None) -> dict:
    """The state after a warm start that found the amaxes f32[rows]."""
    return keep_known_rows(fp8_state, finish_step(fp8_state, amaxes, recipe)[0])


def accumulate_grads(
    loss_fn: Callable,
    weight: float,
    gemms: Collection[LayerPath] = (),
    observed: Observed = (),
    has_aux: bool = False,
) -> Callable:
    """`value_grads_and_amaxes` that adds the gradients to sums: `sums + weight * grads`.

    The kernels of a GEMM with FP8 state, or of one of `gemms` for recipes without state (see `list_gemms`), are added
    up by the GEMMs that compute their gradients, in place, unless the layer is stacked by `nn.scan`.

    Returns:
      A function of `(variables, sums, *args)` that returns loss (and aux), `sums` and `amaxes`. `sums` matches
      `variables["params"]`, float32; `amaxes`: f32[rows].
    """

    def run(variables, sums, *args, **kwargs):
        added = {
            path: jax.new_ref(at_path(sums, path)) for path in added_by_gemms(fp8_state_of(variables), sums, gemms)
        }

        cotangents, axes = Cotangents(), varying_axes(variables, args, kwargs)
        health, options = new_refs(observed, axes), {"stateless": gemms, "observed": observed}
        recorded = record_in(variables, cotangents, axes, False, added, weight, health=health, **options)
        value, grads, amaxes = differentiate(loss_fn, has_aux, variables, recorded, cotangents, args, kwargs, added)

        # What a GEMM has added up is read from where it left it. Its own gradient is zeros then: adding these brings
        # what reached the kernel on another way, as a rule nothing.
        def merge(path, total, gradient):
            total = added[path][...] if path in added else total
            return total + np.float32(weight) * gradient.astype(jnp.float32)

        return value, map_with_names(merge, sums, grads), beside_amaxes(amaxes, [ref[...] for ref in health.values()])

    return run


def list_gemms(loss_fn: Callable, variables: Mapping, *args: Any, recipe: Recipe | None = None) -> list[LayerPath]:
    """The layers whose GEMMs run in FP8, by path, found by tracing the loss: recipes without state leave no other trace
    of them in the variables. Those of one recipe, or with None of all.

    A loss may apply a model to a part of the variables: then its layers know other paths, and are not listed.
    """
    with listing() as found:
        jax.eval_shape(lambda *given: loss_fn(*given), variables, *args)
    paths = [path for path, gemm in found.items() if recipe in (None, gemm.recipe)]
    return with_kernels(paths, variables["params"])


def with_kernels(gemms: Iterable[LayerPath], params: Mapping) -> list[LayerPath]:
    """Those whose kernels are among the params by their path."""
    return [path for path in gemms if _are_kernels([at_path(params, name) for name in kernel_paths(path)])]


def _are_kernels(leaves) -> bool:
    return bool(leaves) and all(getattr(leaf, "ndim", 0) >= 2 for leaf in leaves)


def added_by_gemms(fp8_state: Mapping, sums: Mapping, gemms: Collection[LayerPath] = ()) -> list[LayerPath]:
    """The kernels whose gradients `accumulate_grads` leaves to their GEMMs, and not to an addition after it.

    They are matrices, not stacked by `nn.scan`, and large enough for a GEMM of their own.
    """
    paths = [*gemms]
    map_gemms_with_path(lambda path, _: paths.append(path), fp8_state)
    added: dict[LayerPath, None] = {}
    for path in paths:
        kernels = [at_path(sums, kernel) for kernel in kernel_paths(path)]
        if not kernels or any(getattr(kernel, "ndim", None) != 2 for kernel in kernels):
            continue
        if not share_wgrad(kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)):
            added |= dict.fromkeys(kernel_paths(path))
    return list(added)


def _sums_of(gemm, added) -> tuple[ByIdentity, ...]:
    """The sums of a GEMM's kernels, if they are added up by it."""
    return tuple(ByIdentity(added[kernel]) for kernel in kernel_paths(gemm) if kernel in added)


def record_in(
    variables: Mapping,
    cotangents: Cotangents,
    axes: frozenset[str],
    from_current: bool = False,
    sums: Sums = NO_SUMS,
    weight: float = 1.0,
    deferrals: Mapping[LayerPath, Any] = MappingProxyType({}),
    stateless: Collection[LayerPath] = (),
    observed: Observed = (),
    health: Mapping[LayerPath, jax.Ref] = MappingProxyType({}),
) -> dict:
    """The FP8 state with a recorder beside the state of each GEMM.

    Args:
      axes: over which what the loss takes varies, in a `shard_map` that checks.
      from_current: scale every tensor by its own amax.
      sums, weight: Refs of sums of kernels' gradients, and what these are multiplied by.
      deferrals: by GEMM, where it leaves the operands of its kernels' gradients.
      stateless: GEMMs without state, whose kernels may be among `sums`.
      observed, health: GEMMs that are measured, and where they leave what they find.
    """
    check_dtypes(fp8_state_of(variables))
    first_row = 0
    of_health = {path: ByIdentity(ref) for path, ref in health.items()}

    def with_recorder(path, gemm):
        nonlocal first_row
        stacked, layers = gemm["scale"].shape[:-1], gemm["scale"].size // 3
        ref = jax.new_ref(vary(jnp.zeros((layers, 3) if stacked else (3,), jnp.float32), axes))
        slot = jnp.arange(layers, dtype=jnp.int32).reshape(stacked) if stacked else None
        own = _sums_of(path, sums)
        deferral = ByIdentity(deferrals[path]) if path in deferrals else None
        others = cotangents, first_row, deferral, of_health.get(path), path if from_current else None
        first_row += 3 * layers
        return {**gemm, RECORDER: Recorder(ByIdentity(ref), own, weight, from_current, slot, *others)}

    recorded = map_gemms_with_path(with_recorder, fp8_state_of(variables))
    slots = {gemm.path: gemm.slots() for gemm in observed}
    for path in dict.fromkeys([*stateless, *slots]):
        own, found = _sums_of(path, sums), of_health.get(path)
        if (own or found) and at_path(recorded, (*path, RECORDER)) is None:
            recorder = Recorder(None, own, weight, True, slots.get(path), cotangents, health=found)
            put_at_path(recorded, path, {RECORDER: recorder})
    return recorded


def differentiate(loss_fn, has_aux, variables, recorded, cotangents, args, kwargs, sums: Sums = NO_SUMS):
    """Loss (and aux), gradients of the params, and the amaxes f32[rows] of the pass."""
    of_params = loss_of_params(loss_fn, has_aux, variables, recorded, cotangents, args, kwargs)
    value_and_grads = jax.value_and_grad(of_params, argnums=(0, 1), has_aux=has_aux)
    if isinstance(loss_fn, LayeredLoss) and loss_fn.on_host and not has_aux:
        value_and_grads = _by_layer(loss_fn, variables, recorded, cotangents, args, kwargs, sums)
    of_rows = partial(value_and_grads, variables["params"])
    return recorded_pass(of_rows, variables, recorded, cotangents, varying_axes(variables, args, kwargs))


def recorded_pass(value_and_grads: Callable, variables: Mapping, recorded: Mapping, cotangents: Cotangents, axes):
    """Run a pass whose layers have these recorders, whoever differentiates; and read what they left.

    Args:
      value_and_grads: of the vector f32[rows] whose cotangent takes amaxes, which the loss puts into `cotangents` (see
        `sums_are_maxima`). Returns the loss (and aux), and two gradients: any, and that of the vector.
      axes: as in `record_in`.

    Returns:
      Loss (and aux), gradients, and the amaxes f32[rows] of the pass.
    """
    rows = vary(no_amaxes(fp8_state_of(variables)), axes)
    value, (grads, from_cotangents) = value_and_grads(rows)
    amaxes = _amaxes(variables, recorded)
    return value, grads, jnp.maximum(amaxes, from_cotangents) if cotangents.is_used else amaxes


def _by_layer(loss, variables, recorded, cotangents, args, kwargs, sums) -> Callable:
    def read_rows(rows):
        cotangents.vector = sums_are_maxima(rows)

    def value_and_grads(params, rows):
        replaced = {**variables, "params": params, **({"fp8": recorded} if recorded else {})}
        value, grads = ByLayer(loss, replaced, read_rows, sums).value_and_grads(rows, *args, **kwargs)
        check_loss(value, has_aux=False, remedy=ALONE)
        return value, grads

    return value_and_grads


def loss_of_params(loss_fn, has_aux, variables, recorded, cotangents, args, kwargs) -> Callable:
    """The loss (and aux) as a function of the params, and of the vector f32[rows] whose cotangent takes amaxes."""

    def of_params(params, rows):
        cotangents.vector = sums_are_maxima(rows)
        replaced = {**variables, "params": params}
        out = loss_fn({**replaced, "fp8": recorded} if recorded else replaced, *args, **kwargs)
        check_loss(out, has_aux, ALONE if isinstance(loss_fn, LayeredLoss) else ALONE_OR_PAIR)
        return (jnp.asarray(out[0]), _without_recorders(out[1])) if has_aux else jnp.asarray(out)

    return of_params


@jax.custom_vjp
def sums_are_maxima(rows: jax.Array) -> jax.Array:
    """f32[rows] in a dtype whose cotangents are "added" by taking the larger one."""
    with jax.debug_nans(False):  # which cannot look at such a dtype outside of jit
        return lax.convert_element_type(rows, fp32_max_grad)


sums_are_maxima.defvjp(
    lambda rows: (sums_are_maxima(rows), None),
    lambda _, maxima: (jnp.maximum(lax.convert_element_type(maxima, jnp.float32), 0),),
)


def fp8_state_of(variables) -> Mapping:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f'loss_fn must take a variable dict with "params" first, got {_describe(variables)}; '
            f'pass {{"params": ..., "fp8": ...}}'
        )
    return variables.get("fp8", {})


def _amaxes(variables, recorded) -> jax.Array:
    found = []
    map_gemms(lambda _, gemm: found.append(gemm[RECORDER].amax_ref[...]), fp8_state_of(variables), recorded)
    return join_amaxes(found)


def _without_recorders(tree):
    """A collection that `loss_fn` returned as aux, without what was put into it."""
    if isinstance(tree, Mapping):
        return {name: _without_recorders(child) for name, child in tree.items() if not isinstance(child, Recorder)}
    return type(tree)(map(_without_recorders, tree)) if type(tree) in (tuple, list) else tree


def _describe(value):
    return f"a dict with {sorted(value)}" if isinstance(value, Mapping) else type(value).__name__
