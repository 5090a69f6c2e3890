"""Gradients of NNX models. The amaxes of the backward pass are staged in the model.

`nnx.value_and_grad` differentiates. Meanwhile a recorder of a `GradientTape` stands beside the state of each GEMM, and
takes the amaxes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import jax
from flax import nnx

from jax_fp8.core.checks import check_bool
from jax_fp8.core.paths import LayerPath
from jax_fp8.core.state import keep_known_rows, stage_joined
from jax_fp8.core.types import PyTree
from jax_fp8.grads.tape import GradientTape, Observed, PassResult
from jax_fp8.kernels.explicit import inside_mesh_of
from jax_fp8.kernels.vma import varying_axes
from jax_fp8.nnx.state import GemmState, attach, detach, finish_step, gemms_of, state_of, write

Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]
Gemms = Mapping[LayerPath, GemmState]


def value_and_grad(loss_fn: Callable, *, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """Like `nnx.value_and_grad`; it also stages the amaxes of the pass in the `Fp8State` of every module it is given.

    Several passes before one `update_state` (microbatches) stage the maximum of each amax.

    Args:
      loss_fn: `loss_fn(model, *args, **kwargs)`, a scalar, or `(scalar, aux)` with `has_aux`.
      argnums: as in `nnx.value_and_grad`: 0 selects all `nnx.Param` of the first argument, and
        `nnx.DiffState(0, filter)` other variables of it.
      has_aux: as in `nnx.value_and_grad`.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.

    Raises:
      ValueError: if `loss_fn` is not a function, or `has_aux` not a bool.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> model = jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x).astype(jnp.float32))
      >>> loss, grads = jax_fp8.nnx.value_and_grad(loss_fn)(model, jnp.ones((16, 16)))
      >>> jax_fp8.nnx.update_state(model)
      >>> grads["kernel"].shape
      (16, 32)
    """

    def finish(gemms: Gemms, result: PassResult) -> None:
        write(gemms, stage_joined(state_of(gemms), result.amaxes))

    return _differentiated(loss_fn, argnums, has_aux, False, finish)


def warm_start(loss_fn: Callable, *, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """Make the function that gives a model scales for its first step, when there is no history yet.

    They come from a pass in which each tensor is scaled by its own amax. Call it once, before the first step.

    Args:
      loss_fn, argnums, has_aux: as in `value_and_grad`.

    Returns:
      A function of the same arguments that returns nothing. It writes scales and first histories into the model. Rows
      that have a history keep it. Other variables that the loss changes are changed as in any call.

    Raises:
      ValueError: as in `value_and_grad`.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> model = jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x).astype(jnp.float32))
      >>> jax_fp8.nnx.warm_start(loss_fn)(model, jnp.full((16, 16), 896.0))
      >>> model.fp8.scale[0].item()
      2.0
    """

    def finish(gemms: Gemms, result: PassResult) -> None:
        before = state_of(gemms)
        write(gemms, stage_joined(before, result.amaxes))
        finish_step(gemms)
        write(gemms, keep_known_rows(before, state_of(gemms)))

    run_pass = _differentiated(loss_fn, argnums, has_aux, True, finish)

    @wraps(loss_fn)
    def run(*args: PyTree, **kwargs: PyTree) -> None:
        run_pass(*args, **kwargs)

    return run


def _differentiated(
    loss_fn: Callable,
    argnums: Argnums,
    has_aux: bool,
    from_current: bool,
    finish: Callable[[Gemms, PassResult], None],
    observe: Observed = (),
) -> Callable:
    """`nnx.value_and_grad` with a recorder beside each GEMM; `finish(gemms, result)` takes the pass."""
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function of a model, got {loss_fn!r}")
    check_bool("has_aux", has_aux)
    is_one = isinstance(argnums, int | nnx.DiffState)
    by = (argnums,) if isinstance(argnums, int | nnx.DiffState) else tuple(argnums)

    @wraps(loss_fn)
    def run(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        names, arguments = tuple(kwargs), (*args, *kwargs.values())
        arrays = [_arrays(argument) for argument in arguments]
        with inside_mesh_of(arrays):
            return differentiate(names, arguments, arrays)

    def differentiate(
        names: tuple[str, ...], arguments: tuple[PyTree, ...], arrays: list[list[jax.Array]]
    ) -> tuple[PyTree, PyTree]:
        gemms = gemms_of(arguments)
        variables = {"params": {}, "fp8": state_of(gemms)}
        axes = varying_axes(variables, arrays)
        tape = GradientTape(variables, from_current=from_current, observe=observe, axes=axes)

        def loss_with_rows(*arguments_and_rows: PyTree) -> PyTree:
            *arguments, rows = arguments_and_rows
            tape.receive(rows)
            positional = len(arguments) - len(names)
            return loss_fn(*arguments[:positional], **dict(zip(names, arguments[positional:], strict=True)))

        attach(gemms, tape.variables["fp8"])
        try:
            value_and_grads = nnx.value_and_grad(loss_with_rows, argnums=(*by, len(arguments)), has_aux=has_aux)
            value, (*grads, rows) = value_and_grads(*arguments, tape.rows)
        finally:
            detach(gemms)
        loss, aux = value if has_aux else (value, None)
        result = tape.read(loss, grads[0] if is_one else tuple(grads), rows, aux)
        finish(gemms, result)
        return value, result.grads

    return run


def _arrays(node: PyTree) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(node)) if isinstance(node, nnx.Module) else jax.tree.leaves(node)
