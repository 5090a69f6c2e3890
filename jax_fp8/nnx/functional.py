"""An NNX model as the variables that `fp8.make_train_step` takes.

    model ─split→ variables, merge        loss_fn(variables, batch): model = merge(variables); ...

Then a step is one program with donated state, as for a Linen model: the weight cache, microbatches whose gradients the
GEMMs add up, the optimizer in place, a mesh.
"""

from collections.abc import Callable
from typing import TypeVar

from flax import nnx

from jax_fp8.core.paths import at_path, put_at_path
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.nnx.state import Fp8State, attach, gemms_of, names_of, state_of, write

STATS = "batch_stats"
Model = TypeVar("Model")


def split(model: Model) -> tuple[dict[str, PyTree], Callable[[Variables], Model]]:
    """Split a model into its variables, as nested dicts, and the function that makes a model of such variables.

    Each model that the function makes has its own `nnx.Param`, `Fp8State` and `nnx.BatchStat`. Everything else is the
    same in all of them, the counts of random keys too. So a loss with dropout calls `nnx.reseed(model, **rngs)` with
    the keys that a step hands it.

    Args:
      model: an NNX module.

    Returns:
      The variables by the paths of layers, and the function `merge(variables)`.

      The variables are `{"params": ..., "fp8": ...}`, with "batch_stats" where the model has any. The function takes
      these variables, or others like them: those of a later state, with a weight cache, or with the recorders of a
      step.

    Raises:
      ValueError: if the name of an FP8 layer holds a "+" or begins with a "~", which are for names of GEMMs.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> import jax_fp8.nnx
      >>> variables, merge = jax_fp8.nnx.split(jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
      >>> tx = fp8.fused_adamw(1e-3)
      >>> state = fp8.TrainState.create(variables=variables, tx=tx)
      >>> step = fp8.make_train_step(lambda variables, x: jnp.mean(merge(variables)(x)), tx, fp8.DelayedScaling())
      >>> state, metrics = step(state, jnp.ones((16, 16)))
      >>> merge(state.variables)(jnp.ones((2, 16))).shape
      (2, 32)
    """
    graphdef, params, state, stats, others = nnx.split(model, nnx.Param, Fp8State, nnx.BatchStat, ...)
    flat = {"params": nnx.to_flat_state(params), STATS: nnx.to_flat_state(stats)}
    first_stats = _as_tree(flat[STATS])

    def merge(variables: Variables) -> Model:
        collections = {STATS: first_stats, **variables}
        new_variables = [
            (path, variable.replace(at_path(collections[name], names_of(path))))
            for name, flat_state in flat.items()
            for path, variable in flat_state
        ]
        merged = nnx.merge(graphdef, nnx.from_flat_state(new_variables), state, others, copy=True)
        gemms = gemms_of(merged)
        new_state = variables.get("fp8", {})
        write(gemms, new_state)
        attach(gemms, new_state, variables.get("fp8_cache", {}))
        return merged

    variables = {"params": _as_tree(flat["params"]), "fp8": state_of(gemms_of(model))}
    return variables | ({STATS: first_stats} if first_stats else {}), merge


def batch_stats(model: PyTree) -> dict[str, PyTree]:
    """Read the batch statistics of a model as nested dicts, by the paths of its layers.

    After it has called the model, a loss with `has_aux` returns `{"batch_stats": jax_fp8.nnx.batch_stats(model)}`.

    Args:
      model: an NNX module.

    Returns:
      The arrays of all `nnx.BatchStat`; {} where there are none.

    Example:
      >>> from flax import nnx
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> model = nnx.Sequential(nnx.BatchNorm(16, rngs=nnx.Rngs(0)))
      >>> jax.tree.map(jnp.shape, jax_fp8.nnx.batch_stats(model))
      {'layers': {'0': {'mean': (16,), 'var': (16,)}}}
    """
    return _as_tree(nnx.to_flat_state(nnx.state(model, nnx.BatchStat)))


def _as_tree(flat: nnx.FlatState[nnx.Variable]) -> dict[str, PyTree]:
    tree: dict[str, PyTree] = {}
    for path, variable in flat:
        put_at_path(tree, names_of(path[:-1]), {str(path[-1]): variable.get_value()})
    return tree
