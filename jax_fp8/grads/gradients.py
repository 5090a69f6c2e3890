"""Gradients of a loss, and beside them, never among them, the amaxes of its backward pass.

    variables ─a recorder beside each GEMM─ loss, backward → PassResult(loss, grads, amaxes f32[rows], ...)

A `GradientTape` (grads/tape.py) makes each pass. jax differentiates the loss as a whole; where layers offload residuals
to the host, `ByLayer` differentiates it layer by layer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import jax
import jax.numpy as jnp

from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import Recorder
from jax_fp8.core.state import keep_known_rows
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.grads.by_layer import ByLayer
from jax_fp8.grads.checks import ALONE, ALONE_OR_PAIR, check_loss
from jax_fp8.grads.tape import GradientTape, Observed, PassResult
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.update_state import finish_step
from jax_fp8.kernels.vma import varying_axes


def take_gradients(
    loss_fn: Callable,
    has_aux: bool = False,
    *,
    from_current: bool = False,
    observe: Observed = (),
    gemms: Collection[LayerPath] = (),
    sums: PyTree = None,
    weight: float = 1.0,
) -> Callable[..., PassResult]:
    """Like `jax.value_and_grad` over the params of a variable dict; beside them the amaxes of the pass.

    Args:
      from_current: scale every tensor by its own amax: for a first pass, when there is no history yet.
      observe: the measurements that backward passes make.
      gemms: GEMMs of recipes without state, which are not in the FP8 state.
      sums: of gradients, like the params, float32; the pass returns `sums + weight * grads`. A GEMM with FP8 state, or
        one of `gemms`, adds the gradients of its kernels to their sums in place, unless `nn.scan` stacks its layer.
      weight: of this pass's gradients in the sums.
    """

    @inside_its_mesh
    def run(variables: Variables, *args: PyTree, **kwargs: object) -> PassResult:
        tape = GradientTape(
            variables,
            gemms=gemms,
            sums=sums,
            weight=weight,
            observe=observe,
            from_current=from_current,
            axes=varying_axes(variables, args, kwargs),
        )
        return differentiate(tape, loss_fn, has_aux, *args, **kwargs)

    return run


def differentiate(tape: GradientTape, loss_fn: Callable, has_aux: bool, *args: PyTree, **kwargs: object) -> PassResult:
    """Run a loss and its backward with the variables of the tape, and read the tape."""
    aux = None
    if isinstance(loss_fn, LayeredLoss) and loss_fn.on_host and not has_aux:
        by_layer = ByLayer(loss_fn, tape.variables, tape.receive, tape.sums)
        loss, (grads, d_rows) = by_layer.value_and_grads(tape.rows, *args, **kwargs)
        check_loss(loss, has_aux=False, remedy=ALONE)
    else:
        value_and_grads = jax.value_and_grad(loss_of(tape, loss_fn, has_aux, *args, **kwargs), (0, 1), has_aux)
        loss, (grads, d_rows) = value_and_grads(tape.variables["params"], tape.rows)
        loss, aux = loss if has_aux else (loss, None)
    return tape.read(loss, grads, d_rows, aux)


def loss_of(
    tape: GradientTape, loss_fn: Callable, has_aux: bool, *args: PyTree, **kwargs: object
) -> Callable[..., PyTree]:
    """The loss (and aux) as a function of the params, and of the vector f32[rows] whose cotangent takes amaxes."""

    def of_params(params: PyTree, rows: jax.Array) -> PyTree:
        tape.receive(rows)
        out = loss_fn({**tape.variables, "params": params}, *args, **kwargs)
        check_loss(out, has_aux, ALONE if isinstance(loss_fn, LayeredLoss) else ALONE_OR_PAIR)
        return (jnp.asarray(out[0]), _without_recorders(out[1])) if has_aux else jnp.asarray(out)

    return of_params


def with_first_scales(fp8_state: Mapping, amaxes: jax.Array, recipe: Recipe | None) -> dict:
    """The state after a warm start that found the amaxes f32[rows]."""
    return keep_known_rows(fp8_state, finish_step(fp8_state, amaxes, recipe)[0])


def with_kernels(gemms: Iterable[LayerPath], params: Mapping) -> list[LayerPath]:
    """The GEMMs whose kernels are params at their paths."""
    return [path for path in gemms if _are_kernels([at_path(params, name) for name in kernel_paths(path)])]


def _are_kernels(leaves: list[PyTree]) -> bool:
    return bool(leaves) and all(getattr(leaf, "ndim", 0) >= 2 for leaf in leaves)


def _without_recorders(tree: PyTree) -> PyTree:
    """The aux of a loss without the recorders, which are in the collection "fp8" if the loss returns it."""
    if isinstance(tree, Mapping):
        return {name: _without_recorders(child) for name, child in tree.items() if not isinstance(child, Recorder)}
    return type(tree)(map(_without_recorders, tree)) if type(tree) in (tuple, list) else tree
