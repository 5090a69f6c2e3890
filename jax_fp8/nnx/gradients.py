"""Gradients of NNX models, and beside them the amaxes of the backward pass, staged in the model.

NNX differentiates, as `nnx.value_and_grad` does; the recorders of a `GradientTape` stand beside the state of each GEMM
meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import jax
from flax import nnx

from jax_fp8.core.checks import check_bool
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import keep_known_rows, stage_joined
from jax_fp8.grads.tape import GradientTape, Observed, PassResult
from jax_fp8.kernels.explicit import inside_mesh_of
from jax_fp8.kernels.vma import varying_axes
from jax_fp8.nnx.state import GemmState, attach, detach, finish_step, gemms_of, state_of, write

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]


def value_and_grad(loss_fn: Callable, *, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """Like `nnx.value_and_grad`, and stages the amaxes of the pass in the `Fp8State` of every module it is given.

        loss, grads = jax_fp8.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        jax_fp8.nnx.update_state(model)

    Several passes before one `update_state` (microbatches) stage the maximum of each.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)`, a scalar, or `(scalar, aux)` with `has_aux`.
      argnums: as in `nnx.value_and_grad`: 0 is all `nnx.Param` of the first argument, and
        `nnx.DiffState(0, filter)` are others.
      has_aux: as in `nnx.value_and_grad`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
    """

    def finish(gemms: Mapping[LayerPath, GemmState], found: PassResult) -> None:
        write(gemms, stage_joined(state_of(gemms), found.amaxes))

    return _differentiated(loss_fn, argnums, has_aux, False, finish)


def warm_start(loss_fn: Callable, *, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """Scales for the first step, when there is no history yet: from a pass in which every tensor is scaled by its own
    amax. Call it once, before the first step.

        jax_fp8.nnx.warm_start(loss_fn)(model, batch)

    Args:
      loss_fn, argnums, has_aux: as in `value_and_grad`.

    Returns:
      A function of the same arguments that returns nothing: scales and first histories are in the model. Rows that have
      a history already are left as they are. What else the loss changes in the model is changed.
    """

    def finish(gemms: Mapping[LayerPath, GemmState], found: PassResult) -> None:
        before = state_of(gemms)
        write(gemms, stage_joined(before, found.amaxes))
        finish_step(gemms)
        write(gemms, keep_known_rows(before, state_of(gemms)))

    warmed = _differentiated(loss_fn, argnums, has_aux, True, finish)

    @wraps(loss_fn)
    def run(*args, **kwargs) -> None:
        warmed(*args, **kwargs)

    return run


def _differentiated(
    loss_fn: Callable, argnums: Argnums, has_aux: bool, from_current: bool, finish: Callable, observe: Observed = ()
) -> Callable:
    """`nnx.value_and_grad` with a recorder beside each GEMM; `finish(gemms, result)` takes the pass."""
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function of a model, got {loss_fn!r}")
    check_bool("has_aux", has_aux)
    is_one = isinstance(argnums, int | nnx.DiffState)
    wanted = (argnums,) if isinstance(argnums, int | nnx.DiffState) else tuple(argnums)

    @wraps(loss_fn)
    def run(*args, **kwargs):
        names, given = tuple(kwargs), (*args, *kwargs.values())
        arrays = [_arrays(node) for node in given]
        with inside_mesh_of(arrays):
            return differentiate(names, given, arrays)

    def differentiate(names: tuple[str, ...], given: tuple, arrays: list) -> tuple:
        gemms = gemms_of(given)
        variables = {"params": {}, "fp8": state_of(gemms)}
        axes = varying_axes(variables, arrays)
        tape = GradientTape(variables, from_current=from_current, observe=observe, axes=axes)

        def of_rows(*given_and_rows: Any) -> Any:
            *given, rows = given_and_rows
            tape.receive(rows)
            positional = len(given) - len(names)
            return loss_fn(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

        attach(gemms, tape.variables["fp8"])
        try:
            value_and_grads = nnx.value_and_grad(of_rows, argnums=(*wanted, len(given)), has_aux=has_aux)
            value, (*grads, rows) = value_and_grads(*given, tape.rows)
        finally:
            detach(gemms)
        loss, aux = value if has_aux else (value, None)
        found = tape.read(loss, grads[0] if is_one else tuple(grads), rows, aux)
        finish(gemms, found)
        return value, found.grads

    return run


def _arrays(node: Any) -> list[Any]:
    return jax.tree.leaves(nnx.state(node)) if isinstance(node, nnx.Module) else jax.tree.leaves(node)
