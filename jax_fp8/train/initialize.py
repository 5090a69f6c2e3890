"""Makes the first state array by array, and puts each array on its devices as soon as it is computed.

    jaxpr of `init` ─equation by equation→ each result with its sharding

As one program, the initialization of a model takes longer to compile than its step: XLA makes one kernel for the random
numbers of every array, also where arrays have the same shape. Equation by equation, jax compiles one kernel for each
shape. It also keeps no more than one array whole on a device: a state that a mesh splits may not fit into one device.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding

from jax_fp8.core.types import PyTree
from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import variables


def make_by_array(program: ClosedJaxpr, shapes: PyTree, shardings: PyTree, *args: PyTree) -> PyTree:
    """The results of a traced function, computed equation by equation, without equations that no result needs.

    Args:
      program, shapes: what `jax.make_jaxpr(function, return_shape=True)(*args)` returned.
      shardings: a tree like the results, of their shardings; None leaves them on the device that makes them.
    """
    leaves, tree = jax.tree.flatten(shapes)
    result_shardings = [None] * len(leaves) if shardings is None else tree.flatten_up_to(shardings)
    jaxpr = without_dead_code(program).jaxpr
    values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))

    last_use = {var: number for number, equation in enumerate(jaxpr.eqns) for var in variables(equation.invars)}
    results = _Results(jaxpr.outvars, result_shardings)
    for var, value in values.items():
        results.take(var, value)
    for number, equation in enumerate(jaxpr.eqns):
        for var, value in zip(equation.outvars, _evaluate(jaxpr, equation, values), strict=True):
            results.take(var, value)
            if last_use.get(var, -1) > number:
                values[var] = value
        for var in variables(equation.invars):
            if last_use[var] == number:  # its memory is free for the arrays that follow
                values.pop(var, None)
    return tree.unflatten(results.finished())


class _Results:
    """The results so far, each with its sharding."""

    def __init__(self, outvars: Sequence[Var | Literal], shardings: Sequence[NamedSharding | None]):
        self._outvars, self._shardings = outvars, shardings
        self._values: list[jax.Array | None] = [None] * len(outvars)
        self._positions: dict[Var, list[int]] = {}  # a variable may be several results
        for position, var in enumerate(outvars):
            if not isinstance(var, Literal):
                self._positions.setdefault(var, []).append(position)

    def take(self, var: Var, value: jax.Array) -> None:
        for position in self._positions.get(var, ()):
            self._values[position] = _put(value, self._shardings[position])

    def finished(self) -> list[jax.Array | None]:
        """All results, also those that are constants of the program; each is an array of its own."""
        for position, var in enumerate(self._outvars):
            if isinstance(var, Literal):
                self._values[position] = _put(np.asarray(var.val), self._shardings[position])
        return self._values


def _put(value: jax.Array | np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """A copy of a value with this sharding: a step may donate it."""
    if sharding is None:
        return jax.numpy.array(value)
    if jax.process_count() == 1:
        return jax.device_put(value, sharding, may_alias=False)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _evaluate(jaxpr: Jaxpr, equation: JaxprEqn, values: dict[Var, jax.Array]) -> list[jax.Array]:
    """The results of one equation: a program of its own, which jax compiles once for all equations that are alike."""
    operands = variables(equation.invars)
    alone = jaxpr.replace(constvars=[], invars=operands, outvars=list(equation.outvars), eqns=[equation])
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(values[operand] for operand in operands))
