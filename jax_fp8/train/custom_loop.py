"""For a training loop of one's own, on one device or on a mesh: gradients with staged amaxes, first scales, and the
shardings of variables.

    variables, batch ─value_and_grad→ loss, grads, fp8_state ─optimizer, update_state→ variables

On a mesh these functions run inside the caller's `jax.jit`. They use the same `MeshPass` as `make_train_step`
(distributed/mesh_pass.py).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from jax_fp8.core.checks import check_bool, check_flags, describe
from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recipe_rules import RecipeOrRules, step_recipe
from jax_fp8.core.shards import declared_shardings
from jax_fp8.core.state import stage_joined
from jax_fp8.core.types import Batch, PyTree, Variables
from jax_fp8.distributed.mesh_pass import MeshPass
from jax_fp8.grads.delayed import delayed_gradients
from jax_fp8.grads.gradients import take_gradients, with_first_scales
from jax_fp8.grads.loss_aux import AuxLoss, check_shapes_of_parts, others_of
from jax_fp8.grads.loss_trace import LossTrace, checked, shapes_of_part
from jax_fp8.grads.tape import PassResult, fp8_state_of
from jax_fp8.kernels.explicit import inside_its_mesh
from jax_fp8.parallel.mesh import Parallelism, as_parallelism
from jax_fp8.parallel.placement import place_params
from jax_fp8.state.checks import check_batch, check_loss_fn
from jax_fp8.state.train_state import TrainState
from jax_fp8.train.recipes import same_recipe


def value_and_grad(
    loss_fn: Callable,
    has_aux: bool = False,
    *,
    parallel: Parallelism | Mesh | None = None,
    delay_wgrad_compute: bool = False,
) -> Callable:
    """Like `jax.value_and_grad` over the params of a variable dict, but also returns the FP8 state of this pass.

    Args:
      loss_fn: `loss_fn(variables, *args, **kwargs)`, a scalar, or `(scalar, aux)` with `has_aux`.
        `variables` is a Flax variable dict.
      has_aux: as in `jax.value_and_grad`. On a mesh, aux combines all parts of the batch, as in
        `make_train_step`.
      parallel: a mesh, or a `Parallelism` with options; call the function under `jax.jit` then. The axis `pipe`, a
        schedule and chunks are refused. Every array of `args` is split by its first dim over `data`, `fsdp` and
        `expert`, and the loss is the mean over its parts.
      delay_wgrad_compute: leave the GEMMs of weight gradients for later, to `backward_dw`; refused with a mesh. `grads`
        has all gradients that need no such GEMM: of biases, norms, embeddings, the head, and of a penalty on kernels.
        It also has those of kernels that cannot be delayed: of layers in a branch of `lax.cond` or under `jax.vmap`,
        and of kernels that the loss casts, scales or masks before their layer reads them.

    Returns:
      A function of the same arguments that returns `(loss, grads, fp8_state)`, or `((loss, aux), grads, fp8_state)`.
      `grads` matches `variables["params"]`, on a mesh also in its sharding. `fp8_state` is `variables["fp8"]` with
      slot 0 of each history raised to the amaxes of this pass; pass it to `update_state`. It is {} where there is no
      state. With `delay_wgrad_compute` there is a fourth result, `DeferredGradients`, a pytree with the operands of the
      delayed GEMMs in FP8; `grads` has zeros in place of the gradients that they will compute.

    Raises:
      ValueError: if `loss_fn` is not a function, or a setting is refused, as said above. The function raises it where
        the loss is not a scalar; on a mesh also where it is not under `jax.jit`, or a batch cannot be split.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((16, 16))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> def loss_fn(variables, x):
      ...     return jnp.mean(layer.apply(variables, x).astype(jnp.float32))
      >>> loss, grads, fp8_state = jax.jit(fp8.value_and_grad(loss_fn))(variables, x)
      >>> grads["kernel"].shape, fp8_state["amax_history"][0, 0].item()
      ((16, 32), 1.0)
    """
    check_loss_fn(loss_fn)
    check_flags(has_aux=has_aux, delay_wgrad_compute=delay_wgrad_compute)
    parallel = as_parallelism(parallel)
    if parallel is not None and delay_wgrad_compute:
        raise ValueError(
            f"weight gradients are delayed on one device, got delay_wgrad_compute=True with {parallel=}; "
            "leave out one of them"
        )
    if parallel is not None:
        parallel.check_has_no_stages("value_and_grad")
        return _value_and_grad_on_mesh(parallel, loss_fn, has_aux)

    @inside_its_mesh
    def run(variables: Variables, *args: PyTree, **kwargs: PyTree) -> tuple:
        if not delay_wgrad_compute:
            return results(variables, take_gradients(loss_fn, has_aux)(variables, *args, **kwargs))
        result, deferred = delayed_gradients(loss_fn, has_aux)(variables, *args, **kwargs)
        return *results(variables, result), deferred

    def results(variables: Variables, result: PassResult) -> tuple:
        value = (result.loss, result.aux) if has_aux else result.loss
        return value, result.grads, stage_joined(fp8_state_of(variables), result.amaxes)

    return run


def warm_start(
    loss_fn: Callable,
    recipe: RecipeOrRules,
    has_aux: bool = False,
    *,
    parallel: Parallelism | Mesh | None = None,
) -> Callable:
    """Make the function that finds scales for the first step, when there is no history yet.

    They come from a pass that scales every tensor by its own amax. `make_train_step` does this by itself; a loop of
    one's own calls it once, before its first step.

    Args:
      loss_fn, has_aux, parallel: as in `value_and_grad`.
      recipe: that of the model's layers, or their rules.

    Returns:
      A function of the same arguments as `loss_fn` that returns the FP8 state, with the amaxes of this pass as its
      first history; {} where there is no state. Rows that have a history already, such as calibrated ones, keep it.

    Raises:
      ValueError: as in `value_and_grad`; also if `recipe` is not a recipe. The function raises it where the layers of
        the loss have another recipe.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.full((16, 16), 448.0)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> def loss_fn(variables, x):
      ...     return jnp.mean(layer.apply(variables, 2 * x).astype(jnp.float32))
      >>> fp8_state = jax.jit(fp8.warm_start(loss_fn, layer.recipe))(variables, x)
      >>> fp8_state["scale"][0].item()
      2.0
    """
    check_loss_fn(loss_fn)
    recipe = step_recipe(recipe)
    check_bool("has_aux", has_aux)
    parallel = as_parallelism(parallel)
    if parallel is not None:
        parallel.check_has_no_stages("warm_start")
        return _warm_start_on_mesh(parallel, loss_fn, recipe, has_aux)
    first_pass = take_gradients(loss_fn, has_aux, from_current=True)

    def run(variables: Variables, *args: PyTree, **kwargs: PyTree) -> Mapping:
        with same_recipe(recipe, "warm_start"):
            amaxes = first_pass(variables, *args, **kwargs).amaxes
        return with_first_scales(fp8_state_of(variables), amaxes, recipe)

    return run


def shardings(init_fn: Callable, *args: PyTree, parallel: Parallelism | Mesh) -> PyTree:
    """Find the shardings of variables on a mesh, for `jax.jit(..., out_shardings=...)` and `jax.device_put`.

    Args:
      init_fn: `model.init`, or another function that returns a dict with "params". Other entries with the names and
        shapes of params, such as moments of an optimizer, are sharded like the params; the rest is replicated.
      *args: the arguments of `init_fn`; only their shapes count.
      parallel: a mesh, or a `Parallelism`, whose rules are followed; None is refused.

    Returns:
      A tree like the result, with a `jax.sharding.NamedSharding` for each array.

    Raises:
      ValueError: if `parallel` is neither a mesh nor a `Parallelism`, or `init_fn` returns no dict with "params".

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> layer, key, x = fp8.Dense(32), jax.random.key(0), jnp.ones((2, 16))
      >>> placed = fp8.shardings(layer.init, key, x, parallel=mesh)
      >>> variables = jax.jit(layer.init, out_shardings=placed)(key, x)
      >>> variables["params"]["kernel"].sharding.mesh.axis_names
      ('fsdp',)
    """
    spread = as_parallelism(parallel)
    if spread is None:
        raise ValueError("shardings are those on a mesh, got parallel=None; pass a mesh, or leave out out_shardings")
    with declared_shardings() as declared:
        shapes = jax.eval_shape(init_fn, *args)
    if not isinstance(shapes, Mapping) or "params" not in shapes:
        raise ValueError(f'init_fn must return a dict with "params", got {describe(shapes)}; pass model.init')
    frozen = shapes.get(FROZEN, {})
    placement = place_params(spread, shapes["params"], declared, frozen)
    placed = placement.shardings(shapes)
    return {**placed, FROZEN: placement.shardings_of_frozen(frozen)} if frozen else placed


def _value_and_grad_on_mesh(parallel: Parallelism, loss_fn: Callable, has_aux: bool) -> Callable:
    def local(share: Callable, state_of: Callable[[], TrainState], batch: Batch, *_: object) -> PassResult:
        return take_gradients(share, has_aux)(state_of().variables, batch)

    def run(mesh_pass: MeshPass, state: TrainState, batch: Batch) -> tuple:
        result = mesh_pass.settled(state, batch).gradients(local, state, batch, ())
        value = result.loss
        if has_aux:
            aux = result.aux
            value = value, {**aux.rest, **aux.collections} if isinstance(aux.rest, dict) else aux.rest
        return value, result.grads, stage_joined(state.fp8, result.amaxes)

    return _with_state_on_mesh(parallel, loss_fn, has_aux, run)


def _warm_start_on_mesh(parallel: Parallelism, loss_fn: Callable, recipe: Recipe | None, has_aux: bool) -> Callable:
    def local(share: Callable, state_of: Callable[[], TrainState], batch: Batch, *_: object) -> jax.Array:
        return take_gradients(share, has_aux, from_current=True)(state_of().variables, batch).amaxes

    def run(mesh_pass: MeshPass, state: TrainState, batch: Batch) -> Mapping:
        with same_recipe(recipe, "warm_start"):
            amaxes, _ = mesh_pass.first_amaxes(local, state, batch)
        return with_first_scales(state.fp8, amaxes, recipe)

    return _with_state_on_mesh(parallel, loss_fn, has_aux, run)


def _with_state_on_mesh(parallel: Parallelism, loss_fn: Callable, has_aux: bool, run: Callable) -> Callable:
    """`run(mesh_pass, state, batch)` as a function of `(variables, *batch)`, whatever their shardings."""
    if has_aux:
        loss_fn = AuxLoss(loss_fn)

    def loss_of_batch(variables: Variables, batch: Batch) -> PyTree:
        return loss_fn(variables, *batch)

    @inside_its_mesh
    def run_on_mesh(variables: Variables, *batch: PyTree, **kwargs: PyTree) -> PyTree:
        if kwargs:
            raise ValueError(
                f"arguments must be positional on a mesh, which splits their arrays, got {', '.join(kwargs)}=...; "
                "pass them by position, or bind them to the loss"
            )
        check_batch(batch, 1)
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((variables, batch))):
            raise ValueError("gradients on a mesh must be taken under jax.jit, got arrays; call jax.jit(function)")
        state = _as_state(variables)
        parallel.check_rows(batch, 1)
        checked_loss = checked(loss_of_batch, has_aux)
        trace = LossTrace.from_function(checked_loss, state.variables, batch)
        if has_aux and parallel.batch_parts > 1:
            part = shapes_of_part(batch, parallel.batch_parts)
            check_shapes_of_parts(LossTrace.from_function(checked_loss, state.variables, part).out, trace.out)
        mesh_pass = MeshPass.from_state(parallel, loss_of_batch, None, True, state, batch, has_aux=has_aux, trace=trace)
        return run(mesh_pass, mesh_pass.constrain(state), batch)

    return run_on_mesh


def _as_state(variables: Variables) -> TrainState:
    """Variables as the `TrainState` of a step without an optimizer."""
    fp8_state = fp8_state_of(variables)  # raises where there are no params
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables["params"],
        fp8=fp8_state,
        opt_state=None,
        cache=variables.get("fp8_cache", {}),
        collections=others_of(variables),
    )
