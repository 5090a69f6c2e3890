"""Named scopes of a traced program: the same program under the name of another layer.

    equations of layer_0/attention/out ─with_scope("layer_0", "layer_3")→ the same of layer_3/attention/out

Profiles, and reports on a compiled program, name an operation by its scopes. A program that is traced once for several
layers has those of one.
"""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jax_fp8.jaxprs.equations import inner_jaxprs


def with_scope(program: ClosedJaxpr, old: str, new: str) -> ClosedJaxpr:
    """The program with the scope `new` in place of each scope `old`, also in the jaxprs that its equations hold."""
    if old == new:
        return program
    return ClosedJaxpr(_with_scope(program.jaxpr, old, new), program.consts)


def _with_scope(jaxpr: Jaxpr, old: str, new: str) -> Jaxpr:
    return jaxpr.replace(eqns=[_renamed(equation, old, new) for equation in jaxpr.eqns])


def _renamed(equation: JaxprEqn, old: str, new: str) -> JaxprEqn:
    source = equation.source_info
    names = source.name_stack
    if old in map(_name, names.stack):
        stack = tuple(type(part)(new) if _name(part) == old else part for part in names.stack)
        equation = equation.replace(source_info=source.replace(name_stack=type(names)(stack)))
    if any(_has_scope(inner, old) for inner in inner_jaxprs(equation)):
        params = {name: _in_value(value, old, new) for name, value in equation.params.items()}
        equation = equation.replace(params=params)
    return equation


def _has_scope(jaxpr: Jaxpr, name: str) -> bool:
    return any(
        name in map(_name, equation.source_info.name_stack.stack)
        or any(_has_scope(inner, name) for inner in inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def _in_value(value: object, old: str, new: str) -> object:
    """A parameter of an equation: a jaxpr, several of them, or anything else, which stays."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_in_value(each, old, new) for each in value)
    if isinstance(value, ClosedJaxpr):
        return with_scope(value, old, new)
    return _with_scope(value, old, new) if isinstance(value, Jaxpr) else value


def _name(part: Any) -> str:
    """The name of a scope, or of a transformation such as `jvp(layer_0)`."""
    return part.name
