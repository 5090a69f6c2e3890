"""One optimizer step as one jitted program with donated state: on a GPU, one CUDA graph.

    weights ─cast once→ FP8
    batch → microbatches ─scan→ gradients (mean, float32) ─optimizer, in place→ params, opt_state, weight cache
                              └ amaxes (maximum) ─finish_step, once, in place→ new scales ┘

`make_train_step` checks its arguments and binds them; the step itself is `TrainStep` (step.py).
"""

from collections.abc import Callable, Mapping

import jax
import optax
from jax.sharding import Mesh

from jax_fp8.core.checks import check_flags, check_integer
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.core.recipe_rules import RecipeOrRules, step_recipe
from jax_fp8.core.types import Batch, PyTree, RandomLoss, Variables
from jax_fp8.distributed.pipeline_checks import check_pipeline
from jax_fp8.grads.loss_aux import AuxLoss
from jax_fp8.parallel.mesh import Parallelism, as_parallelism
from jax_fp8.parallel.tiles import check_sequence
from jax_fp8.state.checks import check_optimizer, check_step_loss
from jax_fp8.train.cuda_graph import options_of_step
from jax_fp8.train.programs import Programs
from jax_fp8.train.rngs import DrawingLoss, check_rngs
from jax_fp8.train.step import TrainStep


def make_train_step(
    loss_fn: Callable[[Variables, Batch], PyTree] | RandomLoss,
    tx: optax.GradientTransformation,
    recipe: RecipeOrRules,
    microbatches: int = 1,
    *,
    cache_weights: bool = True,
    warm_start: bool = True,
    donate: bool = True,
    compiler_options: Mapping[str, object] | None = None,
    parallel: Parallelism | Mesh | None = None,
    rngs: Mapping[str, jax.Array] | None = None,
    has_aux: bool = False,
) -> TrainStep:
    """Make the training step of a loss: gradients, optimizer and FP8 state in one program.

    Args:
      loss_fn: `loss_fn(variables, batch)`, or `loss_fn(variables, batch, rngs=...)`: the mean loss of a (micro)batch, a
        scalar. A model, and a function of other arguments, are refused. With `fsdp`, only FP8 layers may read their
        kernels: these are gathered in FP8, and any other use of one finds NaN.
      tx: the optimizer, an `optax.GradientTransformation`; others are refused. `fused_adam` writes params, masters,
        moments and the weight cache in one kernel, if it is the last transform that touches the updates. If another
        one computes with its result, the step warns, and adds updates to params as with any optimizer.
      recipe: the recipe of the model's layers, or their rules, or None for plain bfloat16. A layer with another recipe
        is refused when the loss is traced.
      microbatches: into how many the batch is split, whose leaves all have one leading dim; 1 by default. Gradients and
        loss are means over them, amaxes maxima, and the FP8 state moves once. They must divide the batch.
      cache_weights: True casts the weights once for all microbatches. False casts them in every one, which gives the
        same numbers more slowly; refused with `pipe`. A weight cache in the state is read in any case.
      warm_start: True runs the loss once with current scaling before a step that would meet rows of the FP8 state
        without history: before step 0, after a first step that was skipped, and when a layer runs for the first time.
        With False these rows have a scale of 1.
      donate: True updates the state in place; False leaves the argument `state` alive, for the memory of a second one.
      compiler_options: a dict of XLA options. None makes one CUDA graph per step where the default backend is a GPU,
        and on a mesh runs collectives beside compute (parallel/overlap.py).
      parallel: spread the step over the devices of this mesh, or as this `Parallelism` says. None runs it on one
        device, or as jax splits it by the shardings of its arguments. The loss of a batch is the mean over its parts.
        The axis `pipe` needs a `LayeredLoss`, as `next_token_loss` of a `GPT` returns it.
      rngs: keys for a loss that draws, such as {"dropout": jax.random.key(0)}; None for one that does not. From these
        and the step count, the step makes other keys for each microbatch and each device's part of the batch, and
        passes them to the loss. Refused with `pipe`, and with layers that keep activations on the host.
      has_aux: True for a loss that returns `(loss, aux)`. Entries of a dict `aux` that are named like
        `state.collections`, such as "batch_stats", become those of the state; `metrics["aux"]` is the rest. Over
        microbatches and devices that split the batch, floats are means. Of the rest, integers are sums, and flags are
        true where any is; of collections, integers and flags are maxima. Refused with `pipe`, a `LayeredLoss`, and
        `accumulate_step`.

    Returns:
      A `TrainStep`, called as `state, metrics = step(state, batch)`.

    Raises:
      ValueError: if an argument is of another kind, or refused beside others, as said above. The step raises it where
        its state or batch does not fit.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((16, 16))
      >>> def loss_fn(variables, batch):
      ...     return jnp.mean(jnp.square(layer.apply(variables, batch).astype(jnp.float32) - 1))
      >>> step = fp8.make_train_step(loss_fn, fp8.fused_adamw(1e-3), layer.recipe)
      >>> state = step.init_state(layer.init, jax.random.key(0), x)
      >>> state, metrics = step(state, x)
      >>> int(state.step), sorted(metrics)
      (1, ['loss', 'nonfinite_amaxes', 'underflowing_amaxes'])
    """
    check_step_loss(loss_fn, rngs is not None)
    check_optimizer(tx)
    own_recipes, recipe = [*recipe.values()] if isinstance(recipe, Mapping) else [recipe], step_recipe(recipe)
    check_integer("microbatches", microbatches)
    check_flags(cache_weights=cache_weights, warm_start=warm_start, donate=donate, has_aux=has_aux)
    offloads = isinstance(loss_fn, LayeredLoss) and bool(loss_fn.on_host)
    parallel = as_parallelism(parallel)
    compiler_options = options_of_step(compiler_options, parallel is not None, offloads)
    optimizer = optax.with_extra_args_support(tx)
    if parallel is not None and parallel.sequence_parallel:
        check_sequence(own_recipes)
    if parallel is not None and parallel.stages > 1:
        check_pipeline(parallel, loss_fn, microbatches, cache_weights, has_aux)
    loss_fn = AuxLoss(loss_fn) if has_aux else loss_fn
    if rngs is not None:
        check_rngs(rngs, loss_fn, parallel)
        loss_fn = DrawingLoss(loss_fn, rngs)
    programs = Programs(loss_fn, optimizer, recipe, microbatches, cache_weights, parallel, has_aux)
    return TrainStep(programs, donate, compiler_options, warm_start)
