"""Early checks of a loss, an optimizer, a state and a batch.

The arguments of `make_train_step` are functions. If a user swaps two of them, or forgets to call one, the error would
otherwise come much later, far from that line.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_fp8.core.checks import NUMBERS, describe, first_difference
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import check_dtypes, gemm_states
from jax_fp8.core.types import Batch, PyTree


def check_loss_fn(loss_fn: object) -> None:
    """Raise unless this can be a loss `loss_fn(variables, *args)`."""
    arrived = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else describe(loss_fn)
    if _is_transform(loss_fn):
        raise ValueError("loss_fn must be a function of (variables, batch), got an optimizer; swap the arguments")
    if isinstance(loss_fn, type) or (hasattr(loss_fn, "init") and hasattr(loss_fn, "apply")):
        raise ValueError(
            f"loss_fn must be a function of (variables, batch) that returns a scalar, got {arrived}, a model; "
            "pass next_token_loss(model), or a function that calls model.apply"
        )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function of (variables, batch) that returns a scalar, got {arrived}")


def check_step_loss(loss_fn: Callable, draws: bool) -> None:
    """Raise unless this can be the loss of a step, which calls it with variables and a batch, and rngs if it draws."""
    check_loss_fn(loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some callables that are not written in Python have no signature
        return
    try:
        signature.bind(None, None, **({"rngs": None} if draws else {}))
    except TypeError:
        wanted = "(variables, batch, rngs)" if draws else "(variables, batch)"
        raise ValueError(
            f"loss_fn must take {wanted}, got one that takes {signature}; bind other arguments with "
            "functools.partial, and pass rngs to make_train_step if it draws"
        ) from None


def check_optimizer(tx: object) -> None:
    """Raise unless this is an Optax transform."""
    if _is_transform(tx):
        return
    if callable(tx):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise ValueError(
            f"tx must be an optax.GradientTransformation, got the function {name}; call it, as in "
            "optax.adamw(1e-3), and mind the order: make_train_step(loss_fn, tx, recipe)"
        )
    raise ValueError(f"tx must be an optax.GradientTransformation, got {describe(tx)}; pass fused_adamw(1e-3)")


def check_variables(variables: object) -> None:
    """Raise unless this can be the result of `model.init`."""
    if not isinstance(variables, Mapping):
        raise ValueError(
            f'variables must be a dict with "params", got {describe(variables)}; pass what model.init returned'
        )
    for name, collection in variables.items():
        if not isinstance(collection, Mapping):
            raise ValueError(
                f'variables["{name}"] must be a dict, got {describe(collection)}; leave out collections without entries'
            )


def check_is(name: str, value: object, cls: type, remedy: str) -> None:
    """Raise unless an argument is an instance of its class."""
    if not isinstance(value, cls):
        raise ValueError(f"{name} must be a {cls.__name__}, got {describe(value)}; {remedy}")


def check_not_donated(state: PyTree, pending: PyTree = None) -> None:
    """Raise where a state, or the pending sums of microbatches, was donated before: some of its arrays are deleted."""
    if _is_deleted(state):
        raise ValueError(
            "state must be the one that the last step returned, got one that a step has taken; use the new one"
        )
    if _is_deleted(pending):
        raise ValueError(
            "pending must be what the last start, accumulate_step or apply_step returned, got one that another call "
            "has taken; use the new one"
        )


@contextmanager
def explain_donation(state: PyTree) -> Iterator[None]:
    """Explain a call that fails because its state was donated before. The state is checked only after a failure: it has
    a thousand arrays, and the device would wait while the host looks through them.
    """
    try:
        yield
    except Exception as error:
        # jax says "Array has been deleted". After other errors the state may be deleted too, by a warm pass before.
        if "delete" in str(error):
            check_not_donated(state)
        raise


def _is_deleted(tree: PyTree) -> bool:
    return any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    )


def check_on_mesh(state: PyTree, mesh: Mesh) -> None:
    """Raise unless a state is on all devices of a mesh, and on no others."""
    wanted = set(mesh.devices.flat)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set != wanted:
            raise ValueError(
                f"the state must lie on the {len(wanted)} devices of the step's mesh, got state"
                f"{jax.tree_util.keystr(path)} on {len(leaf.sharding.device_set)}; make it with step.init_state, "
                "or pass step.place(state, batch)"
            )


def check_opt_state(opt_state: PyTree, tx: optax.GradientTransformation, params: PyTree) -> None:
    """Raise unless the optimizer makes states of this structure for these params."""
    expected = jax.eval_shape(tx.init, params)
    if jax.tree.structure(expected) != jax.tree.structure(opt_state):
        difference = first_difference(expected, opt_state, arrays=False) or "its containers are others"
        raise ValueError(
            f"state.opt_state must be that of the step's optimizer, but {difference}; make the state with "
            "TrainState.create and the tx of make_train_step"
        )


def check_kept_types(before: PyTree, after: PyTree) -> None:
    """Raise unless an optimizer step keeps all shapes and dtypes of a state, as a branch of a program must."""
    difference = first_difference(before, after)
    if difference is not None:
        raise ValueError(
            f"an optimizer step must keep the types of its state, but {difference}; keep this array in the dtype that "
            "tx returns, such as float32 params or fused_adamw"
        )


NO_NUMBERS = tuple("OSUMm")  # kinds of NumPy's dtypes: objects, bytes, text, dates, spans of time


def check_state(state: PyTree, recipe: Recipe | None) -> None:
    """Raise unless the state has amax histories if and only if the recipe uses them, and all are float32."""
    check_dtypes(state.fp8)
    has_histories, needs_histories = bool(gemm_states(state.fp8)), recipe is not None and recipe.has_state
    if has_histories and not needs_histories:
        raise ValueError(
            f"the state holds amax histories, but recipe={recipe!r} has none; pass the recipe the model was made with"
        )
    if not has_histories and needs_histories:
        raise ValueError(
            'recipe=DelayedScaling needs the collection "fp8" in the state, which is empty; '
            "give the model the same recipe"
        )


def check_holds_arrays(name: str, tree: PyTree) -> None:
    """Raise unless each leaf of a tree is an array of numbers, an array of random keys, or a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        is_number = (
            isinstance(leaf, bool | NUMBERS | complex)
            if dtype is None
            else getattr(dtype, "kind", None) not in NO_NUMBERS
        )
        if not is_number:
            raise ValueError(
                f"{name} must hold arrays of numbers, got {describe(leaf)} at {name}{jax.tree_util.keystr(path)}; "
                "leave it out, or convert it to numbers"
            )


def check_batch(batch: Batch, microbatches: int) -> None:
    """Raise where a batch is empty, or cannot be split into so many microbatches."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {f"batch{jax.tree_util.keystr(path)}": jnp.shape(leaf) for path, leaf in leaves}
    for name, shape in shapes.items():
        if shape and not shape[0]:
            raise ValueError(
                f"a batch must have at least one row, got {name} of shape {shape}; leave empty batches out"
            )
        if microbatches > 1 and not shape:
            raise ValueError(
                f"microbatches are parts of arrays, got {name}, a scalar; give it a leading dim like the rest"
            )
        if microbatches > 1 and shape[0] % microbatches:
            raise ValueError(f"microbatches must divide the batch size, got {microbatches=} and a batch of {shape[0]}")
    sizes = {shape[0]: name for name, shape in shapes.items() if shape}
    if microbatches > 1 and len(sizes) > 1:
        arrived = " and ".join(f"{size} of {name}" for size, name in sizes.items())
        raise ValueError(
            f"the arrays of a batch must have one leading dim to be split, got {arrived}; pad or repeat one"
        )


def _is_transform(tx: object) -> bool:
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
