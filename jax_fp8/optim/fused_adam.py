"""Adam and AdamW with master weights, as an Optax transform.

Optax keeps no master weights: with bfloat16 params a small update rounds away. Here every param that is not float32 has
a master in the optimizer state, and the param is the master rounded to nearest even after every step. Where a param
arrives that is not its rounded master, because it was loaded, replaced or edited, the param becomes the master.
Moments may be kept in 16 or 8 bits, and params in FP8. The arithmetic is that of `jax_fp8.kernels.adam`, one kernel
launch for the whole tree when it works in place, as `make_train_step` has it.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_fp8.core.cast import Cast
from jax_fp8.core.checks import check_flags, describe, flatten_like, structure_error
from jax_fp8.core.fp8_array import Fp8Pair, is_fp8
from jax_fp8.core.paths import LayerPath, names_of
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.core.unpicklable import UnpicklableFunction
from jax_fp8.kernels.adam import adam
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.adam_leaf import adam_leaf
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.shared_cast import SharedCast
from jax_fp8.kernels.storage import REMAINDER, same_numbers
from jax_fp8.optim.adam_state import FusedAdamState, Kept, Storage, given_masters, with_own_master
from jax_fp8.optim.hyperparameters import check_hyperparameters, check_scalars, check_update
from jax_fp8.optim.moment_scales import with_moment_scales
from jax_fp8.optim.skipping import note_applied
from jax_fp8.optim.updates import InPlace, NewParam, NewValues

FLOAT32 = np.dtype("float32")  # not jnp.float32: `optax.inject_hyperparams` takes anything callable for a schedule
GRADIENT_DTYPES = tuple(map(np.dtype, ("float32", "bfloat16", "float16")))
CANNOT_BE_PICKLED = (
    "an optimizer cannot be pickled, for it is made of functions; pickle its state, and call fused_adam again"
)
ScalarOrSchedule = float | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]  # optax.Schedule, among others
Wrapper = TypeVar("Wrapper", bound=Callable)


def fused_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    master_dtype: Any = FLOAT32,
    mu_dtype: Any = FLOAT32,
    nu_dtype: Any = FLOAT32,
    mask: Any = None,
    skip_nonfinite: bool = False,
    max_grad_norm: float | None = None,
    master: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with master weights.

    Params are float32, bfloat16, float16 or `Fp8Array`, in any mixture; gradients are arrays of the same shapes. A
    param in FP8 is written with the scale that the amax after the step before gave.

    Args:
      learning_rate: a number, or a schedule of the step count.
      b1, b2, eps: as in `optax.adam`, the betas from 0 to below 1. `eps` is added outside the root, after bias
        correction, and must be above 0: a weight without any gradient would be 0 / 0.
      weight_decay: decoupled (AdamW) with `adam_w_mode`, else an L2 term added to the gradient.
      bias_correction: divide the moments by `1 - b**count`.
      master_dtype: float32; float16; or "remainder", 16 bits beside each bfloat16 param, which give the same params as
        float32 masters.
      mu_dtype, nu_dtype: float32, bfloat16, E4M3 or E5M2 storage of the moments. In fewer than 32 bits they are rounded
        stochastically, by the step count, so that small increments count; FP8 has one scale per array, found from the
        largest gradient. float16 is refused: the squares of small gradients are below its smallest number.
      mask: a tree of bools like the params, or a function of the params that returns one: which leaves decay.
      skip_nonfinite: a step with an infinite or NaN gradient (with `max_grad_norm`: norm of the gradients) changes
        nothing, `count` included.
      max_grad_norm: above 0: scale the gradients down to this global norm; unlike `optax.clip_by_global_norm` it costs
        no pass that writes them.
      master: masters to start from, a tree like the params, instead of the params themselves; `init` copies them. They
        must round to the params: a param that its master does not round to is the master. A float32 param is its own
        master and ignores it.

    Returns:
      A transform whose `update(grads, state, params)` returns float32 deltas: `optax.apply_updates` lands on the
      rounded master. For a param in FP8 it returns the new `Fp8Array`, which `jax_fp8.apply_updates` puts in its place.
      Extra arguments of `update`: `grad_scale`, a scalar that multiplies every gradient (one over the loss scale), and
      `in_place`, an `InPlace`.
    """
    check_hyperparameters(learning_rate, b1, b2, eps, weight_decay, max_grad_norm)
    check_flags(adam_w_mode=adam_w_mode, bias_correction=bias_correction, skip_nonfinite=skip_nonfinite)
    storage = Storage.of(master_dtype, mu_dtype, nu_dtype)
    no_decay = isinstance(weight_decay, int | float) and weight_decay == 0

    @inside_its_mesh
    def init(params):
        tree = jax.tree.structure(params, is_leaf=is_fp8)
        masters = given_masters(master, params, tree)
        kept = [storage.init(*row) for row in zip(tree.flatten_up_to(params), masters, strict=True)]
        return FusedAdamState.of(jnp.zeros((), jnp.int32), tree, kept)

    def update(updates, state, params=None, *, in_place: InPlace | None = None, grad_scale=None, **extra):
        del extra
        check_update(state, in_place, grad_scale)
        tree = _checked_tree(updates, params)
        gradients, params_ = tree.flatten_up_to(updates), tree.flatten_up_to(params)
        kept = state.kept(tree)
        for param, row in zip(params_, kept, strict=True):
            storage.check(param, row)
        before, kept = kept, [with_own_master(*row) for row in zip(params_, kept, strict=True)]

        scale = 1 if grad_scale is None else grad_scale
        norm = None if max_grad_norm is None else _global_norm(gradients, scale)
        applied = _all_finite(gradients, norm) if skip_nonfinite else None
        if in_place is not None and in_place.apply is not None:
            applied = in_place.apply if applied is None else in_place.apply & applied
        if applied is not None:
            note_applied(applied)
        count = jnp.asarray(optax.safe_increment(state.count))
        steps = count.astype(jnp.float32)
        numbers = {
            "rate": learning_rate(state.count) if callable(learning_rate) else learning_rate,
            "b1": b1,
            "one_minus_b1": 1 - b1,
            "b2": b2,
            "one_minus_b2": 1 - b2,
            "eps": eps,
            "weight_decay": weight_decay,
            "correction1": 1 / (1 - jnp.float32(b1) ** steps) if bias_correction else 1,
            "correction2": 1 / (1 - jnp.float32(b2) ** steps) if bias_correction else 1,
            "grad_scale": scale if norm is None else _clipped(scale, norm, max_grad_norm),
            "apply": True if applied is None else applied,
        }
        check_scalars(numbers)
        coefficients = Coefficients(**{name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()})

        decays = [bool(decay) and not no_decay for decay in _decay_mask(mask, params, tree)]
        casts, shared = _requested_casts(in_place, params)
        rows = zip(gradients, params_, kept, casts, decays, strict=True)
        leaves = [_leaf(*row, coefficients, l2=not adam_w_mode) for row in rows]
        seed = state.count.astype(jnp.uint32)
        if in_place is None:
            stepped = [adam_leaf(leaf, coefficients, seed, i, adam_w_mode) for i, leaf in enumerate(leaves)]
            results = [_delta(param, leaf, delta) for param, (leaf, delta) in zip(params_, stepped, strict=True)]
            leaves = [_landed(*row) for row in zip(params_, results, [leaf for leaf, _ in stepped], strict=True)]
        else:
            copied = {i for i, cast in enumerate(casts) if cast} | {i for of in shared for i in of.leaves}
            leaves = [leaf.as_matrix() if i in copied else leaf for i, leaf in enumerate(leaves)]
            leaves, pairs = adam(leaves, coefficients, seed, adam_w_mode, shared)
            leaves = [leaf.in_shape(param.shape) for param, leaf in zip(params_, leaves, strict=True)]
            pair_of = {cast.leaves[0]: pair for cast, pair in zip(shared, pairs, strict=True)}
            rows = zip(params_, leaves, strict=True)
            results = [_new_param(param, leaf, pair_of.get(i), applied) for i, (param, leaf) in enumerate(rows)]
        kept = [_keep(*row, applied) for row in zip(params_, leaves, before, strict=True)]
        count = count if applied is None else jnp.where(applied, count, state.count)
        return tree.unflatten(results), FusedAdamState.of(count, tree, kept)

    functions = (UnpicklableFunction(function, CANNOT_BE_PICKLED) for function in (init, update))
    return optax.GradientTransformationExtraArgs(*functions)


def _with_keywords_of(function: Callable, *, without: str) -> Callable[[Wrapper], Wrapper]:
    """A decorator: help, documentation and `optax.inject_hyperparams` see the names that `**settings` stands for."""

    def decorate(wrapper):
        signature = inspect.signature(wrapper)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        shared = [
            parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name != without
        ]
        vars(wrapper)["__signature__"] = signature.replace(parameters=[*own, *shared])
        return wrapper

    return decorate


@_with_keywords_of(fused_adam, without="adam_w_mode")
def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    **settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """`fused_adam` with decoupled weight decay and `optax.adamw`'s default for it; all other arguments are the same."""
    return fused_adam(learning_rate, b1, b2, eps, weight_decay, adam_w_mode=True, **settings)


def _leaf(gradient, param, kept, cast, decays, coefficients, l2) -> Leaf:
    """One param as the op wants it."""
    leaf = Leaf(gradient, kept.mu, kept.nu, None if is_fp8(param) else param, kept.master, decays=decays)
    if is_fp8(param):
        values = Fp8Pair.with_shared_scale(param.values, kept.fp8["transposed"], param.scale, kept.fp8["amax"])
        leaf = replace(leaf, cast=values, scale=scale_from_amax(kept.fp8["amax"], param.dtype))
    elif cast is not None:
        leaf = replace(leaf, cast=cast[0], scale=cast[1].known_scale)
    return with_moment_scales(leaf, param, coefficients, l2)


def _delta(param, leaf, update):
    """What to add to a param to arrive at the new one."""
    if is_fp8(param):
        return NewValues.of(leaf.cast.rowwise)
    if leaf.master is None:
        return update
    new, old = leaf.param.astype(jnp.float32), param.astype(jnp.float32)
    return jnp.where(new == old, -jnp.float32(0), new - old)  # adding -0 changes nothing, not even a -0


def _landed(param, delta, leaf) -> Leaf:
    """No float32 delta leads from a bfloat16 param to one that is 2**16 times smaller: there the param that adding the
    delta gives becomes the master.
    """
    if leaf.master is None or is_fp8(param):
        return leaf
    landed = (param.astype(jnp.float32) + delta).astype(param.dtype)
    own = jnp.zeros((), REMAINDER) if leaf.master.dtype == REMAINDER else landed.astype(leaf.master.dtype)
    return replace(leaf, master=jnp.where(same_numbers(landed, leaf.param), leaf.master, own))


def _new_param(param, leaf, shared_pair, applied) -> NewParam:
    if is_fp8(param):
        return NewParam(leaf.cast.rowwise, None, applied)
    return NewParam(leaf.param, leaf.cast or shared_pair, applied)


def _keep(param, leaf, before, applied) -> Kept:
    """What the state keeps; of a param in FP8, whose changed values have become the master already, as it was `before`
    where the step is skipped.
    """
    fp8 = {"amax": leaf.cast.amax, "transposed": leaf.cast.arrays[1]} if is_fp8(param) else None
    kept = Kept(leaf.mu, leaf.nu, leaf.master, fp8)
    if fp8 is None or applied is None:
        return kept
    return jax.tree.map(partial(jnp.where, applied), kept, before)


def _global_norm(gradients, scale):
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32) * scale)) for g in gradients]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _clipped(scale, norm, max_norm):
    """`scale`, smaller where the norm of the scaled gradients is above `max_norm`."""
    return jnp.where(norm < max_norm, scale, scale * (max_norm / norm))


def _all_finite(gradients, norm):
    """Where the norm is known, nothing is read again: it is finite unless a gradient is not,
    or squares too large for float32."""
    if norm is not None:
        return jnp.isfinite(norm)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in gradients], jnp.bool_))


def _requested_casts(in_place, params) -> tuple[list, list[SharedCast]]:
    """For each param its copy with one scale, and how it is cast, or None; and the copies of several, or by tile, that
    are all among these params."""
    arrays = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8)
    requests = {} if in_place is None else {path: _as_cast(*of) for path, of in in_place.casts.items()}
    numbers = {names_of(path): number for number, (path, param) in enumerate(arrays) if not is_fp8(param)}
    own = {path: of for path, of in requests.items() if isinstance(path[0], str) and of[1].rule.tile is None}
    side_by_side = {_kernels_at(path): of for path, of in requests.items() if path not in own}
    shared = [
        _shared_cast(pair, how, tuple(numbers[kernel] for kernel in kernels))
        for kernels, (pair, how) in side_by_side.items()
        if all(kernel in numbers for kernel in kernels)
    ]
    return [own.get(names_of(path)) for path, _ in arrays], shared


def _kernels_at(path) -> tuple[LayerPath, ...]:
    """The names of kernels in one copy; those of one kernel are a path of names themselves."""
    return (path,) if isinstance(path[0], str) else path


def _shared_cast(pair, how: Cast, leaves: tuple[int, ...]) -> SharedCast:
    if how.rule.tile is None:
        return SharedCast(pair, how.known_scale, leaves)
    return SharedCast(pair, None, leaves, how.rule)


def _as_cast(pair, how) -> tuple[Fp8Pair, Cast]:
    return pair, how if isinstance(how, Cast) else Cast.with_scale(pair.rowwise.dtype, how)


def _decay_mask(mask, params, tree) -> list:
    if mask is None:
        return [True] * tree.num_leaves
    decays = mask(params) if callable(mask) else mask
    found = flatten_like("mask", tree, decays, "make it with jax.tree.map over params")
    for decay in found:
        if not isinstance(decay, int) and jnp.shape(decay) != ():
            raise ValueError(
                f"mask must have one bool for each param, got {describe(decay)}; say of whole params whether they decay"
            )
    return found


def _checked_tree(updates, params):
    if params is None:
        raise ValueError(
            "fused_adam needs the params to update their masters, got None; call update(grads, state, params)"
        )
    tree = jax.tree.structure(params, is_leaf=is_fp8)
    if jax.tree.structure(updates) != tree:
        remedy = "pass the gradients of these params, one array for each (for an Fp8Array too)"
        raise structure_error("grads", tree, updates, remedy)
    for gradient, param in zip(jax.tree.leaves(updates), tree.flatten_up_to(params), strict=True):
        found = f"{getattr(gradient, 'dtype', type(gradient).__name__)} of shape {jnp.shape(gradient)}"
        if jnp.shape(gradient) != param.shape or getattr(gradient, "dtype", None) not in GRADIENT_DTYPES:
            raise ValueError(
                "grads must be float32, bfloat16 or float16 arrays of the shapes of params, "
                f"got {found} for a param of shape {param.shape}; "
                "pass the gradients of these params"
            )
    return tree
