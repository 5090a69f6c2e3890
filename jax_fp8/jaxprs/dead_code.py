"""A traced program without what its results do not need."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from jax_fp8.jaxprs.equations import variables


def without_dead_code(program: ClosedJaxpr, outvars: Sequence[Any] | None = None) -> ClosedJaxpr:
    """The same program with the equations that these results need; None is all results of the program.

    An equation is kept whole, and so is what it holds. One with an effect, such as a write to a Ref, is needed where
    something that it reads or writes is.
    """
    outvars = [*(program.jaxpr.outvars if outvars is None else outvars)]
    wanted, needed = {*variables(outvars)}, []
    for equation in reversed(program.jaxpr.eqns):
        operands = variables(equation.invars)
        touched = [*equation.outvars, *operands] if equation.effects else equation.outvars
        if not wanted.isdisjoint(touched):
            needed.append(equation)
            wanted.update(operands)
    return ClosedJaxpr(program.jaxpr.replace(eqns=needed[::-1], outvars=outvars), program.consts)
