"""What is the same on all devices of a mesh axis, and what differs: found in a jaxpr, equation by equation.

    a device's part of an array, its number on the axis ─any operation→ differs ─sum, maximum, all-gather→ the same

Arrays inside of a `jax.shard_map` do not say whether they are split. This does, from how they were made: what comes of
anything that differs may differ, until a collective brings all devices the same.

jax's own types know less here: what an all_gather made counts as varying. They also refuse right programs, whose loops
and branches do not say by themselves what varies. Nothing is refused here; loops are followed until nothing changes.
What a program writes into a Ref is not followed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from jax_fp8.jaxprs.collectives import COLLECTIVES, axes_of
from jax_fp8.jaxprs.equations import called_jaxpr, inner_jaxprs, scan_parts

_BRINGS_THE_SAME = ("psum", "pmax", "pmin", "all_gather", "pbroadcast")  # of the functions of jax.lax; others do not
_ONE_BY_ONE = {"optimization_barrier"} | {name for name, of in COLLECTIVES.items() if of in _BRINGS_THE_SAME}


def which_differ(jaxpr: Any, axis: str, operands: Sequence[bool]) -> list[bool]:
    """Whether each result of a jaxpr may differ from device to device of `axis`, if those of its operands differ where
    `operands` says so.
    """
    differs = dict(zip(jaxpr.invars, operands, strict=True))

    def read(var) -> bool:
        return not isinstance(var, Literal) and differs.get(var, False)

    for equation in jaxpr.eqns:
        found = _RULES.get(equation.primitive.name, _of_any)(equation, axis, [*map(read, equation.invars)])
        differs.update(zip(equation.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _of_any(equation, axis, operands) -> list[bool]:
    """Of a collective, a call, or any operation."""
    name, number = equation.primitive.name, len(equation.outvars)
    is_over = (name in COLLECTIVES or name == "axis_index") and axis in axes_of(equation)
    if is_over and COLLECTIVES.get(name) not in _BRINGS_THE_SAME:
        return [True] * number
    if is_over and equation.params.get("axis_index_groups") is None:
        return [False] * number
    if name in _ONE_BY_ONE and number == len(operands):  # several operands, each with its result
        return [*operands]
    called = called_jaxpr(equation)
    return [any(operands)] * number if called is None else which_differ(called, axis, operands)


def _of_cond(equation, axis, operands) -> list[bool]:
    chosen_by, *others = operands
    found = [which_differ(branch, axis, others) for branch in inner_jaxprs(equation)]
    return [chosen_by or any(of_all) for of_all in zip(*found, strict=True)]


def _of_scan(equation, axis, operands) -> list[bool]:
    parts = scan_parts(equation)

    def turn(carry):
        return which_differ(parts.body, axis, [*operands[parts.consts], *carry, *operands[parts.xs]])

    carry = _until_nothing_changes(lambda carry: turn(carry)[parts.last_carry], operands[parts.carry])
    return [*carry, *turn(carry)[parts.ys]]


def _of_while(equation, axis, operands) -> list[bool]:
    """Operands are what the condition reads alone, what the body reads alone, and what both are handed."""
    (cond,), (body,) = (jaxprs_in_params({name: equation.params[name]}) for name in ("cond_jaxpr", "body_jaxpr"))
    of_cond = equation.params["cond_nconsts"]
    first = of_cond + equation.params["body_nconsts"]

    def turn(carry):
        (chosen,) = which_differ(cond, axis, [*operands[:of_cond], *carry])
        return [chosen or differs for differs in which_differ(body, axis, [*operands[of_cond:first], *carry])]

    return _until_nothing_changes(turn, operands[first:])


def _until_nothing_changes(turn, carry) -> list[bool]:
    """What the turns of a loop carry, at most: what once differs is taken to differ in every turn."""
    while (grown := [old or new for old, new in zip(carry, turn(carry), strict=True)]) != carry:
        carry = grown
    return carry


_RULES: dict[str, Callable] = {"cond": _of_cond, "scan": _of_scan, "while": _of_while}
