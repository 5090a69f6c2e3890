"""Adam and AdamW with master weights, as an Optax transform.

    gradients, params, FusedAdamState ─a Leaf for each param─ kernels/adam.py → updates, the next FusedAdamState

Optax keeps no master weights: with bfloat16 params a small update rounds away. Here every param that is not float32 has
a master in the optimizer state, and after every step the param is the master rounded to nearest even. A param that
somebody loaded, replaced or edited is no longer its rounded master; then it becomes the master. Moments may be stored
in 16 or 8 bits, and params in FP8. In place, as `make_train_step` calls it, one kernel launch updates many params.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jax_fp8.core.checks import check_flags
from jax_fp8.core.types import PyTree, TreeDef
from jax_fp8.core.unpicklable import UnpicklableFunction
from jax_fp8.kernels.adam import adam
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf
from jax_fp8.kernels.adam_leaf import adam_leaf
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.kernels.shared_cast import SharedCast
from jax_fp8.optim.adam_state import FusedAdamState, Param, Storage, initial_masters, with_own_master
from jax_fp8.optim.hyperparameters import (
    ScalarOrSchedule,
    check_hyperparameters,
    check_scalars,
    check_update,
    checked_params,
    checked_tree,
    decay_mask,
)
from jax_fp8.optim.skipping import all_finite, note_applied
from jax_fp8.optim.updates import (
    InPlace,
    NewParam,
    delta_to,
    leaf_of,
    new_param,
    next_state,
    requested_casts,
    with_landed_master,
)

FLOAT32 = np.dtype("float32")  # not jnp.float32: `optax.inject_hyperparams` takes anything callable for a schedule
CANNOT_BE_PICKLED = (
    "an optimizer cannot be pickled, for it is made of functions; pickle its state, and call fused_adam again"
)


def fused_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    master_dtype: DTypeLike = FLOAT32,
    mu_dtype: DTypeLike = FLOAT32,
    nu_dtype: DTypeLike = FLOAT32,
    mask: PyTree = None,
    skip_nonfinite: bool = False,
    max_grad_norm: float | None = None,
    master: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Make an Adam optimizer with master weights.

    Params are float32, bfloat16, float16 or `Fp8Array`, in any mixture; gradients are arrays of the same shapes. A step
    writes a param in FP8 with a scale from its amax after the step before. The formulas are those of Adam
    (https://arxiv.org/abs/1412.6980) and AdamW (https://arxiv.org/abs/1711.05101), in float32.

    Args:
      learning_rate: a number, or a schedule of the step count.
      b1, b2, eps: as in `optax.adam`, the betas from 0 to below 1. `eps` is added outside the root, after bias
        correction, and must be above 0: a weight without any gradient would be 0 / 0.
      weight_decay: the coefficient of decay; 0 leaves it out.
      adam_w_mode: True decouples the decay from the gradient (AdamW); False adds an L2 term to the gradient.
      bias_correction: divide the moments by `1 - b**count`.
      master_dtype: float32; float16; or "remainder", 16 bits beside each bfloat16 param, which give the same params as
        float32 masters.
      mu_dtype, nu_dtype: float32, bfloat16, E4M3 or E5M2 storage of the moments. With fewer than 32 bits, moments are
        rounded stochastically, seeded by the step count, so that small increments count. FP8 has one scale per array,
        which follows from the largest gradient. float16 is refused: the squares of small gradients are below its
        smallest number.
      mask: a tree of bools like the params, or a function of the params that returns one: which leaves decay.
      skip_nonfinite: a step with an infinite or NaN gradient changes nothing, `count` included. With `max_grad_norm`,
        so does a step whose gradient norm overflows.
      max_grad_norm: above 0: scale the gradients down to this global norm. Unlike `optax.clip_by_global_norm` this does
        not write the gradients again.
      master: masters to start from, a tree like the params; None starts from the params. `init` copies them. A master
        must round to its param; otherwise the param becomes the master. A float32 param is its own master and ignores
        its entry.

    Returns:
      A transform whose `update(grads, state, params)` returns float32 deltas, with which `optax.apply_updates` arrives
      at the rounded masters. For a param in FP8 it returns the new `Fp8Array`, by which `jax_fp8.apply_updates`
      replaces the param. Extra arguments of `update`: `grad_scale`, a scalar that multiplies every gradient (one over
      the loss scale), and `in_place`, an `InPlace`.

    Raises:
      ValueError: if an argument is not in its range. `init` and `update` raise it where trees or dtypes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> tx = fp8.fused_adam(0.5)
      >>> params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"kernel": jnp.ones((2, 2))}, state, params)
      >>> new = fp8.apply_updates(params, updates)
      >>> new["kernel"][0, 0].item(), new["kernel"].dtype.name, state.master["kernel"].dtype.name
      (0.5, 'bfloat16', 'float32')
    """
    check_hyperparameters(learning_rate, b1, b2, eps, weight_decay, max_grad_norm)
    check_flags(adam_w_mode=adam_w_mode, bias_correction=bias_correction, skip_nonfinite=skip_nonfinite)
    adam = _FusedAdam(
        learning_rate=learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        adam_w_mode=adam_w_mode,
        bias_correction=bias_correction,
        storage=Storage.from_options(master_dtype, mu_dtype, nu_dtype),
        mask=mask,
        skip_nonfinite=skip_nonfinite,
        max_grad_norm=max_grad_norm,
        master=master,
    )
    init = UnpicklableFunction(inside_its_mesh(adam.init), CANNOT_BE_PICKLED)
    return optax.GradientTransformationExtraArgs(init, UnpicklableFunction(adam.update, CANNOT_BE_PICKLED))


def fused_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    bias_correction: bool = True,
    master_dtype: DTypeLike = FLOAT32,
    mu_dtype: DTypeLike = FLOAT32,
    nu_dtype: DTypeLike = FLOAT32,
    mask: PyTree = None,
    skip_nonfinite: bool = False,
    max_grad_norm: float | None = None,
    master: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Make `fused_adam` with decoupled weight decay, and with `optax.adamw`'s default for it.

    Args:
      learning_rate, b1, b2, eps, weight_decay, bias_correction, mask: as in `fused_adam`.
      master_dtype, mu_dtype, nu_dtype, skip_nonfinite, max_grad_norm, master: as in `fused_adam`.

    Returns:
      The transform.

    Raises:
      ValueError: as in `fused_adam`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> tx = fp8.fused_adamw(1e-3, mu_dtype=jnp.bfloat16, max_grad_norm=1.0)
      >>> tx.init({"kernel": jnp.ones((16, 32))}).mu["kernel"].dtype.name
      'bfloat16'
    """
    return fused_adam(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay,
        adam_w_mode=True,
        bias_correction=bias_correction,
        master_dtype=master_dtype,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        mask=mask,
        skip_nonfinite=skip_nonfinite,
        max_grad_norm=max_grad_norm,
        master=master,
    )


@dataclass(frozen=True, eq=False)
class _FusedAdam:
    """`init` and `update` of `fused_adam`; the fields are its arguments."""

    learning_rate: ScalarOrSchedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    adam_w_mode: bool
    bias_correction: bool
    storage: Storage
    mask: PyTree
    skip_nonfinite: bool
    max_grad_norm: float | None
    master: PyTree

    def init(self, params: PyTree) -> FusedAdamState:
        tree = checked_params(params)
        masters = initial_masters(self.master, params, tree)
        states = [self.storage.init(*row) for row in zip(tree.flatten_up_to(params), masters, strict=True)]
        return FusedAdamState.from_param_states(jnp.zeros((), jnp.int32), tree, states)

    def update(
        self,
        updates: PyTree,
        state: FusedAdamState,
        params: PyTree = None,
        *,
        in_place: InPlace | None = None,
        grad_scale: ArrayLike | None = None,
        **extra: object,
    ) -> tuple[PyTree, FusedAdamState]:
        """Deltas, or new params if `in_place` asks for them, and the next state. Optax passes the `extra` arguments of
        other transforms in a chain, too.
        """
        del extra
        check_update(state, in_place, grad_scale)
        tree = checked_tree(updates, params)
        gradients, params_list = tree.flatten_up_to(updates), tree.flatten_up_to(params)
        before = state.param_states(tree)
        for param, param_state in zip(params_list, before, strict=True):
            self.storage.check(param, param_state)
        states = [with_own_master(*row) for row in zip(params_list, before, strict=True)]

        scale = 1 if grad_scale is None else grad_scale
        norm = None if self.max_grad_norm is None else _global_norm(gradients, scale)
        applied = self._applied(gradients, norm, in_place)
        count = jnp.asarray(optax.safe_increment(state.count))
        coefficients = self._coefficients(state.count, count, scale, norm, applied)

        casts, shared = requested_casts(in_place, params)
        rows = zip(gradients, params_list, states, casts, self._decays(params, tree), strict=True)
        leaves = [leaf_of(*row, coefficients, l2=not self.adam_w_mode) for row in rows]
        seed = state.count.astype(jnp.uint32)
        if in_place is None:
            results, leaves = self._deltas(params_list, leaves, coefficients, seed)
        else:
            copied = {i for i, cast in enumerate(casts) if cast} | {i for cast in shared for i in cast.leaves}
            leaves = [leaf.as_matrix() if i in copied else leaf for i, leaf in enumerate(leaves)]
            results, leaves = self._new_params(params_list, leaves, shared, coefficients, seed, applied)
        states = [next_state(*row, applied) for row in zip(params_list, leaves, before, strict=True)]
        count = count if applied is None else jnp.where(applied, count, state.count)
        return tree.unflatten(results), FusedAdamState.from_param_states(count, tree, states)

    def _applied(
        self, gradients: list[jax.Array], norm: jax.Array | None, in_place: InPlace | None
    ) -> jax.Array | None:
        """Whether this step changes anything, bool[]; None if it always does."""
        applied = all_finite(gradients, norm) if self.skip_nonfinite else None
        if in_place is not None and in_place.apply is not None:
            applied = in_place.apply if applied is None else in_place.apply & applied
        if applied is not None:
            note_applied(applied)
        return applied

    def _coefficients(
        self, before: jax.Array, count: jax.Array, scale: ArrayLike, norm: jax.Array | None, applied: jax.Array | None
    ) -> Coefficients:
        """The numbers of a step as float32 scalars. Each may be an array that `optax.inject_hyperparams` made."""
        rate, steps = self.learning_rate, count.astype(jnp.float32)
        numbers = {
            "rate": rate(before) if callable(rate) else rate,
            "b1": self.b1,
            "one_minus_b1": 1 - self.b1,
            "b2": self.b2,
            "one_minus_b2": 1 - self.b2,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "correction1": 1 / (1 - jnp.float32(self.b1) ** steps) if self.bias_correction else 1,
            "correction2": 1 / (1 - jnp.float32(self.b2) ** steps) if self.bias_correction else 1,
            "grad_scale": self._clipped(scale, norm),
            "apply": True if applied is None else applied,
        }
        check_scalars(numbers)
        return Coefficients(**{name: jnp.asarray(number, jnp.float32) for name, number in numbers.items()})

    def _clipped(self, scale: ArrayLike, norm: jax.Array | None) -> ArrayLike:
        """`scale`, smaller where the norm of the scaled gradients is too large."""
        if norm is None or self.max_grad_norm is None:
            return scale
        return jnp.where(norm < self.max_grad_norm, scale, scale * (self.max_grad_norm / norm))

    def _decays(self, params: PyTree, tree: TreeDef) -> list[bool]:
        """Which params decay. With a weight decay of 0 none does, and the kernel leaves the term out."""
        none_decays = isinstance(self.weight_decay, int | float) and self.weight_decay == 0
        return [bool(decay) and not none_decays for decay in decay_mask(self.mask, params, tree)]

    def _deltas(
        self, params: list[Param], leaves: list[Leaf], coefficients: Coefficients, seed: jax.Array
    ) -> tuple[list[Param], list[Leaf]]:
        """Deltas to add to the params, and the updated leaves; in `jnp`, for the kernel writes only in place."""
        stepped = [adam_leaf(leaf, coefficients, seed, i, self.adam_w_mode) for i, leaf in enumerate(leaves)]
        deltas = [delta_to(param, leaf, update) for param, (leaf, update) in zip(params, stepped, strict=True)]
        leaves = [leaf for leaf, _ in stepped]
        return deltas, [with_landed_master(*row) for row in zip(params, deltas, leaves, strict=True)]

    def _new_params(
        self,
        params: list[Param],
        leaves: list[Leaf],
        shared: list[SharedCast],
        coefficients: Coefficients,
        seed: jax.Array,
        applied: jax.Array | None,
    ) -> tuple[list[NewParam], list[Leaf]]:
        """New params in place, and the updated leaves. A shared cast goes with the first of its params."""
        leaves, pairs = adam(leaves, coefficients, seed, self.adam_w_mode, shared)
        leaves = [leaf.in_shape(param.shape) for param, leaf in zip(params, leaves, strict=True)]
        pair_of = {cast.leaves[0]: pair for cast, pair in zip(shared, pairs, strict=True)}
        rows = enumerate(zip(params, leaves, strict=True))
        return [new_param(param, leaf, pair_of.get(i), applied) for i, (param, leaf) in rows], leaves


def _global_norm(gradients: list[jax.Array], scale: ArrayLike) -> jax.Array:
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32) * scale)) for g in gradients]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
