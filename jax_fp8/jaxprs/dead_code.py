"""Dead-code removal: a traced program without the equations that its results do not need."""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr

from jax_fp8.jaxprs.equations import Atom, variables


def without_dead_code(program: ClosedJaxpr, outvars: Sequence[Atom] | None = None) -> ClosedJaxpr:
    """The same program with only the equations that these results need; None is all results of the program.

    A needed equation is kept whole, with all equations of the jaxprs in it. An equation with an effect, such as a write
    to a Ref, is needed if any of its operands or results is.
    """
    outvars = [*(program.jaxpr.outvars if outvars is None else outvars)]
    live, needed = {*variables(outvars)}, []
    for equation in reversed(program.jaxpr.eqns):
        operands = variables(equation.invars)
        touched = [*equation.outvars, *operands] if equation.effects else equation.outvars
        if not live.isdisjoint(touched):
            needed.append(equation)
            live.update(operands)
    return ClosedJaxpr(program.jaxpr.replace(eqns=needed[::-1], outvars=outvars), program.consts)
