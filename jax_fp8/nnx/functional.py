"""An NNX model as the variables that `fp8.make_train_step` takes.

    model ─split→ variables, merge        loss_fn(variables, batch): model = merge(variables); ...

Then a step is one program with donated state, as for a Linen model: the weight cache, microbatches whose gradients the
GEMMs add up, the optimizer in place, a mesh.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jax_fp8.core.paths import at_path, put_at_path
from jax_fp8.nnx.state import Fp8State, attach, gemms_of, names_of, state_of, write

STATS = "batch_stats"


def split(model: Any) -> tuple[dict, Callable[[Mapping], Any]]:
    """The variables of a model as nested dicts, and the function that makes a model of such variables.

        variables, merge = jax_fp8.nnx.split(model)
        state = fp8.TrainState.create(variables=variables, tx=tx)
        step = fp8.make_train_step(lambda variables, batch: loss(merge(variables), batch), tx, recipe)

    What is no `nnx.Param`, `Fp8State` or `nnx.BatchStat` is the same in each model that `merge` makes: also the counts
    of random keys, so that a loss with dropout calls `nnx.reseed(model, **rngs)` with those that a step hands it.

    Returns:
      `{"params": ..., "fp8": ...}`, by the paths of layers, with "batch_stats" where the model has such; and
      `merge(variables)`, which takes these, or others like them: those of a later state, with a weight cache, or with
      what a step puts into them.
    """
    graphdef, params, state, stats, others = nnx.split(model, nnx.Param, Fp8State, nnx.BatchStat, ...)
    flat = {"params": nnx.to_flat_state(params), STATS: nnx.to_flat_state(stats)}

    first_stats = _as_tree(flat[STATS])

    def merge(variables: Mapping) -> Any:
        given = {STATS: first_stats, **variables}
        of_variables = [
            (path, variable.replace(at_path(given[name], names_of(path))))
            for name, variables_of in flat.items()
            for path, variable in variables_of
        ]
        made = nnx.merge(graphdef, nnx.from_flat_state(of_variables), state, others, copy=True)
        gemms = gemms_of(made)
        in_fp8 = variables.get("fp8", {})
        write(gemms, in_fp8)
        attach(gemms, in_fp8, variables.get("fp8_cache", {}))
        return made

    found = {"params": _as_tree(flat["params"]), "fp8": state_of(gemms_of(model))}
    return found | ({STATS: first_stats} if first_stats else {}), merge


def batch_stats(model: Any) -> dict:
    """The batch statistics of a model as nested dicts, by the paths of its layers. A loss with `has_aux` returns those
    of the model that it has called, as `{"batch_stats": jax_fp8.nnx.batch_stats(model)}`.
    """
    return _as_tree(nnx.to_flat_state(nnx.state(model, nnx.BatchStat)))


def _as_tree(flat) -> dict:
    tree: dict = {}
    for path, variable in flat:
        put_at_path(tree, names_of(path[:-1]), {str(path[-1]): variable.get_value()})
    return tree
