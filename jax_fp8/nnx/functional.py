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


def split(model: Any) -> tuple[dict, Callable[[Mapping], Any]]:
    """The variables of a model as nested dicts, and the function that makes a model of such variables.

        variables, merge = jax_fp8.nnx.split(model)
        state = fp8.TrainState.create(variables=variables, tx=tx)
        step = fp8.make_train_step(lambda variables, batch: loss(merge(variables), batch), tx, recipe)

    What is neither `nnx.Param` nor `Fp8State`, such as random keys and batch statistics, is the same in each model that
    `merge` makes: a model that has such needs `value_and_grad`.

    Returns:
      `{"params": ..., "fp8": ...}`, by the paths of layers; and `merge(variables)`, which takes these, or others like
      them: those of a later state, with a weight cache, or with what a step puts into them.
    """
    graphdef, params, state, others = nnx.split(model, nnx.Param, Fp8State, ...)
    flat = nnx.to_flat_state(params)
    tree: dict = {}
    for path, variable in flat:
        put_at_path(tree, names_of(path[:-1]), {str(path[-1]): variable.get_value()})

    def merge(variables: Mapping) -> Any:
        of_params = [(path, variable.replace(at_path(variables["params"], names_of(path)))) for path, variable in flat]
        made = nnx.merge(graphdef, nnx.from_flat_state(of_params), state, others, copy=True)
        gemms = gemms_of(made)
        in_fp8 = variables.get("fp8", {})
        write(gemms, in_fp8)
        attach(gemms, in_fp8, variables.get("fp8_cache", {}))
        return made

    return {"params": tree, "fp8": state_of(gemms_of(model))}, merge
