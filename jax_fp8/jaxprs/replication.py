"""Which values of a jaxpr are replicated over a mesh axis, and which differ between its devices.

    a device's part of an array, its number on the axis ─any operation→ differs ─sum, maximum, all-gather→ the same

Arrays inside of a `jax.shard_map` do not say whether they are split. This file derives it, equation by equation: any
result of a value that differs may differ, until a collective makes it the same on all devices.

jax's own varying types do not suffice here. They count the result of an all_gather as varying, and they reject correct
programs with loops and branches that do not declare what varies. Here no program is rejected, and a loop is followed
until nothing changes. Values that a program writes to a Ref are not followed.
"""

from collections.abc import Callable, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jax_fp8.jaxprs.collectives import COLLECTIVES, axes_of
from jax_fp8.jaxprs.equations import Atom, called_jaxpr, inner_jaxprs, scan_parts

_REPLICATING = ("psum", "pmax", "pmin", "all_gather", "pbroadcast")  # functions of jax.lax with one result for all
_ONE_BY_ONE = {"optimization_barrier"} | {name for name, function in COLLECTIVES.items() if function in _REPLICATING}


def which_differ(jaxpr: Jaxpr, axis: str, operands: Sequence[bool]) -> list[bool]:
    """For each result of a jaxpr, whether it may differ between devices along `axis`; `operands`: whether each does."""
    differs = dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and differs.get(atom, False)

    for equation in jaxpr.eqns:
        rule = _RULES.get(equation.primitive.name, _operation_rule)
        differs.update(zip(equation.outvars, rule(equation, axis, [*map(read, equation.invars)]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _operation_rule(equation: JaxprEqn, axis: str, operands: Sequence[bool]) -> list[bool]:
    """The rule for a collective, a call, or any other operation."""
    name, number = equation.primitive.name, len(equation.outvars)
    is_over_axis = (name in COLLECTIVES or name == "axis_index") and axis in axes_of(equation)
    if is_over_axis and COLLECTIVES.get(name) not in _REPLICATING:
        return [True] * number
    if is_over_axis and equation.params.get("axis_index_groups") is None:
        return [False] * number
    if name in _ONE_BY_ONE and number == len(operands):  # several operands, each with a result of its own
        return [*operands]
    called = called_jaxpr(equation)
    return [any(operands)] * number if called is None else which_differ(called, axis, operands)


def _cond_rule(equation: JaxprEqn, axis: str, operands: Sequence[bool]) -> list[bool]:
    predicate, *others = operands
    branches = [which_differ(branch, axis, others) for branch in inner_jaxprs(equation)]
    return [predicate or any(in_branches) for in_branches in zip(*branches, strict=True)]


def _scan_rule(equation: JaxprEqn, axis: str, operands: Sequence[bool]) -> list[bool]:
    parts = scan_parts(equation)

    def run_body(carry: Sequence[bool]) -> list[bool]:
        return which_differ(parts.body, axis, [*operands[parts.consts], *carry, *operands[parts.xs]])

    carry = _fixed_point(lambda carry: run_body(carry)[parts.last_carry], operands[parts.carry])
    return [*carry, *run_body(carry)[parts.ys]]


def _while_rule(equation: JaxprEqn, axis: str, operands: Sequence[bool]) -> list[bool]:
    """The operands of a while loop are the condition's constants, the body's constants, and the carry."""
    (cond,), (body,) = (jaxprs_in_params({name: equation.params[name]}) for name in ("cond_jaxpr", "body_jaxpr"))
    cond_consts = equation.params["cond_nconsts"]
    first_carry = cond_consts + equation.params["body_nconsts"]

    def run_body(carry: Sequence[bool]) -> list[bool]:
        (predicate,) = which_differ(cond, axis, [*operands[:cond_consts], *carry])
        in_body = which_differ(body, axis, [*operands[cond_consts:first_carry], *carry])
        return [predicate or differs for differs in in_body]

    return _fixed_point(run_body, operands[first_carry:])


def _fixed_point(run_body: Callable[[Sequence[bool]], list[bool]], carry: Sequence[bool]) -> list[bool]:
    """Which values of a loop's carry may differ, in any iteration: once a value differs, it counts as different."""
    carry = [*carry]
    while (grown := [old or new for old, new in zip(carry, run_body(carry), strict=True)]) != carry:
        carry = grown
    return carry


_RULES: dict[str, Callable[[JaxprEqn, str, Sequence[bool]], list[bool]]] = {
    "cond": _cond_rule,
    "scan": _scan_rule,
    "while": _while_rule,
}
