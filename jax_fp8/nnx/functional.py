"""An NNX model as the variables that `fp8.make_train_step` takes.

    model ─split→ variables, merge        loss_fn(variables, batch): model = merge(variables); ...

Then a step is one program with donated state, as for a Linen model: the weight cache, microbatches whose gradients the
GEMMs add up, the optimizer in place, a mesh.
"""

from collections.abc import Callable
from typing import TypeVar

from flax import nnx

from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.paths import LayerPath, at_path, put_at_path
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.nnx.state import Fp8State, FrozenWeight, attach, gemm_path, gemms_of, names_of, state_of, write

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

      The variables are `{"params": ..., "fp8": ...}`, with "batch_stats" and "fp8_frozen" where the model has batch
      statistics or frozen kernels. The function takes these variables, or others like them: those of a later state,
      with a weight cache, or with the recorders of a step.

    Raises:
      ValueError: if the name of an FP8 layer holds a "+" or begins with a "~", which are for names of GEMMs. `merge`
        raises it if the variables lack one of the model.

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
    graphdef, params, state, stats, frozen, others = nnx.split(
        model, nnx.Param, Fp8State, nnx.BatchStat, FrozenWeight, ...
    )
    flat = {name: nnx.to_flat_state(part) for name, part in (("params", params), (STATS, stats), (FROZEN, frozen))}
    trees = {name: _as_tree(part) for name, part in flat.items()}

    def merge(variables: Variables) -> Model:
        collections = {STATS: trees[STATS], **variables}
        new_variables = [
            (path, variable.replace(_value(collections, name, _names(path, variable))))
            for name, flat_state in flat.items()
            for path, variable in flat_state
        ]
        merged = nnx.merge(graphdef, nnx.from_flat_state(new_variables), state, others, copy=True)
        gemms = gemms_of(merged)
        new_state = variables.get("fp8", {})
        write(gemms, new_state)
        attach(gemms, new_state, variables.get("fp8_cache", {}))
        return merged

    variables = {"params": trees["params"], "fp8": state_of(gemms_of(model))}
    return variables | {name: trees[name] for name in (STATS, FROZEN) if trees[name]}, merge


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
        *layer, name = _names(path, variable)
        put_at_path(tree, tuple(layer), {name: variable.get_value()})
    return tree


def _names(path: tuple, variable: nnx.Variable) -> LayerPath:
    """Where a variable is in its collection. The weight of a frozen GEMM is its `kernel`, as in Linen."""
    return (*gemm_path(path[:-1]), "kernel") if isinstance(variable, FrozenWeight) else names_of(path)


def _value(collections: Variables, name: str, names: LayerPath) -> PyTree:
    value = at_path(collections.get(name), names)
    if value is None:
        raise ValueError(
            f'merge needs all variables of the model that was split, got none at "{name}"/{"/".join(names)}; pass '
            "variables with the structure of those that split returned, and freeze kernels of the model before split"
        )
    return value
