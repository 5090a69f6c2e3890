"""A state made array by array, each put where it belongs as soon as it is there.

As one program, the initialisation of a model takes longer to compile than its step: random numbers of every array are a
kernel of their own, also where shapes are the same. Operation by operation there is one for each shape. And no more
than one array at a time is whole on a device: what is split over a mesh may be larger than a device as a whole.
"""

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import variables


def make_by_array(program: Any, shapes: Any, shardings: Any, *args: Any) -> Any:
    """What a traced function returns, operation by operation; of all that it computes only what its results need.

    Args:
      program, shapes: what `jax.make_jaxpr(function, return_shape=True)(*args)` returned.
      shardings: a tree like the results, of where they are to be; None leaves them where they are made.
    """
    leaves, tree = jax.tree.flatten(shapes)
    places = [None] * len(leaves) if shardings is None else tree.flatten_up_to(shardings)
    jaxpr = without_dead_code(program).jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))

    last_use = {var: number for number, equation in enumerate(jaxpr.eqns) for var in variables(equation.invars)}
    results = _Results(jaxpr.outvars, places)
    for var, value in values.items():
        results.take(var, value)
    for number, equation in enumerate(jaxpr.eqns):
        made = _evaluate(jaxpr, equation, values)
        for var, value in zip(equation.outvars, made, strict=True):
            results.take(var, value)
            if last_use.get(var, -1) > number:
                values[var] = value
        for var in variables(equation.invars):
            if last_use[var] == number:
                values.pop(var, None)
    return tree.unflatten(results.finished())


class _Results:
    """The results so far, each in its place."""

    def __init__(self, outvars, places):
        self._outvars, self._places = outvars, places
        self._values: list[Any] = [var.val if isinstance(var, Literal) else None for var in outvars]
        self._wanted: dict[Any, list[int]] = {}
        for number, var in enumerate(outvars):
            if not isinstance(var, Literal):
                self._wanted.setdefault(var, []).append(number)

    def take(self, var, value) -> None:
        for number in self._wanted.get(var, ()):
            self._values[number] = _put(value, self._places[number])

    def finished(self) -> list[Any]:
        """Every result an array of its own."""
        numbers = (number for number, var in enumerate(self._outvars) if isinstance(var, Literal))
        for number in numbers:
            self._values[number] = _put(np.asarray(self._values[number]), self._places[number])
        return self._values


def _put(value, sharding) -> jax.Array:
    if sharding is None:
        return jax.numpy.array(value)
    if jax.process_count() == 1:
        return jax.device_put(value, sharding, may_alias=False)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _evaluate(jaxpr, equation, values) -> list[Any]:
    """What one equation makes: a program of its own, which jax compiles once for all that are alike."""
    operands = variables(equation.invars)
    alone = jaxpr.replace(constvars=[], invars=operands, outvars=list(equation.outvars), eqns=[equation])
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(values[operand] for operand in operands))
