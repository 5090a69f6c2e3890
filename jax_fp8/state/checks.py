"""What must hold of a loss, an optimizer, a state and a batch, said as soon as it is known.

The arguments of `make_train_step` are functions of functions: swapped or not yet called, they would fail far from where
they were given.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from jax_fp8.core.checks import NUMBERS, describe, first_difference
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import check_dtypes, gemm_states


def check_loss_fn(loss_fn: Any) -> None:
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


def check_step_loss(loss_fn: Any, draws: bool) -> None:
    """Raise unless this can be the loss of a step, which calls it with variables and a batch, and rngs if it draws."""
    check_loss_fn(loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # as of some callables that are not written in Python
        return
    try:
        signature.bind(None, None, **({"rngs": None} if draws else {}))
    except TypeError:
        wanted = "(variables, batch, rngs)" if draws else "(variables, batch)"
        raise ValueError(
            f"loss_fn must take {wanted}, got one that takes {signature}; bind what else it needs with "
            "functools.partial, and pass rngs to make_train_step where it draws"
        ) from None


def check_optimizer(tx: Any) -> None:
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


def check_variables(variables: Any) -> None:
    """Raise unless this is what `model.init` returned."""
    if not isinstance(variables, Mapping):
        raise ValueError(
            f'variables must be a dict with "params", got {describe(variables)}; pass what model.init returned'
        )
    for name, collection in variables.items():
        if not isinstance(collection, Mapping):
            raise ValueError(
                f'variables["{name}"] must be a dict, got {describe(collection)}; leave out what is not there'
            )


def check_is(name: str, value: Any, cls: type, remedy: str) -> None:
    """Raise unless an argument is of its class."""
    if not isinstance(value, cls):
        raise ValueError(f"{name} must be a {cls.__name__}, got {describe(value)}; {remedy}")


def check_not_donated(state: Any, pending: Any = None) -> None:
    """Raise where a state, or what microbatches add to, was given away before: some of its arrays are gone."""
    if _is_gone(state):
        raise ValueError(
            "state must be the one that the last step returned, got one that a step has taken; use the new one"
        )
    if _is_gone(pending):
        raise ValueError(
            "pending must be what the last start, accumulate_step or apply_step returned, got one that another call "
            "has taken; use the new one"
        )


@contextmanager
def explain_donation(state: Any) -> Iterator[None]:
    """Where a call fails because its state was given away before, say so. Nothing is asked of a call that does not
    fail: a state has a thousand arrays, and the device waits while the host looks through them.
    """
    try:
        yield
    except Exception as error:
        if "delete" in str(error):  # jax: "Array has been deleted"; of another error, the state is gone by a warm pass
            check_not_donated(state)
        raise


def _is_gone(tree: Any) -> bool:
    return any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()
        for leaf in jax.tree.leaves(tree)
    )


def check_on_mesh(state: Any, mesh: Mesh) -> None:
    """Raise unless a state lies on the devices of a mesh."""
    wanted = set(mesh.devices.flat)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set != wanted:
            raise ValueError(
                f"the state must lie on the {len(wanted)} devices of the step's mesh, got state"
                f"{jax.tree_util.keystr(path)} on {len(leaf.sharding.device_set)}; make it with step.init_state, "
                "or pass step.place(state, batch)"
            )


def check_opt_state(opt_state: Any, tx: Any, params: Any) -> None:
    """Raise unless the optimizer could have made this state for these params; only its structure is looked at."""
    expected = jax.eval_shape(tx.init, params)
    if jax.tree.structure(expected) != jax.tree.structure(opt_state):
        difference = first_difference(expected, opt_state, arrays=False) or "its containers are others"
        raise ValueError(
            f"state.opt_state must be that of the step's optimizer, but {difference}; make the state with "
            "TrainState.create and the tx of make_train_step"
        )


def check_kept_types(before: Any, after: Any) -> None:
    """Raise unless an optimizer step left every array of a state its shape and dtype, as a branch of a program must."""
    difference = first_difference(before, after)
    if difference is not None:
        raise ValueError(
            f"an optimizer step must keep the types of its state, but {difference}; keep this array in the dtype that "
            "tx returns, such as float32 params or fused_adamw"
        )


NO_NUMBERS = tuple("OSUMm")  # kinds of NumPy's dtypes: objects, text, dates


def check_state(state: Any, recipe: Recipe | None) -> None:
    """Raise unless the amax histories of a state are those of this recipe, in their dtype."""
    check_dtypes(state.fp8)
    has_state, keeps_state = bool(gemm_states(state.fp8)), recipe is not None and recipe.has_state
    if has_state and not keeps_state:
        raise ValueError(
            f"the state holds amax histories, but recipe={recipe!r} has none; pass the recipe the model was made with"
        )
    if not has_state and keeps_state:
        raise ValueError(
            'recipe=DelayedScaling needs the collection "fp8" in the state, which is empty; '
            "give the model the same recipe"
        )


def check_holds_arrays(name: str, tree: Any) -> None:
    """Raise where a leaf of a tree is neither an array of numbers or random keys nor a number."""
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
                "leave it out, or make numbers of it"
            )


def check_batch(batch: Any, microbatches: int) -> None:
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
        found = " and ".join(f"{size} of {name}" for size, name in sizes.items())
        raise ValueError(f"the arrays of a batch must have one leading dim to be split, got {found}; pad or repeat one")


def _is_transform(tx) -> bool:
    return callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
