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

from jax.extend.core import Literal

# By the names of primitives. A cast between varying and invariant, as `pcast`, changes no value.
_BRINGS_THE_SAME = {
    *("psum", "psum_invariant", "unreduced_psum", "pmax", "unreduced_pmax", "pmin", "unreduced_pmin"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "pbroadcast"),
}
_GIVES_EACH_ITS_OWN = {"axis_index", "reduce_scatter", "unreduced_reduce_scatter", "ppermute", "all_to_all"}
_ONE_BY_ONE = {*_BRINGS_THE_SAME, "optimization_barrier"}  # several operands, each with its result


def which_differ(jaxpr: Any, axis: str, operands: Sequence[bool]) -> list[bool]:
    """Whether each result of a jaxpr may differ from device to device of `axis`, if those of its operands differ where
    `operands` says so.
    """
    differs = dict(zip(jaxpr.invars, operands, strict=True))

    def read(var) -> bool:
        return not isinstance(var, Literal) and differs.get(var, False)

    for equation in jaxpr.eqns:
        found = _RULES.get(equation.primitive.name, _by_what_it_holds)(equation, axis, [*map(read, equation.invars)])
        differs.update(zip(equation.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _by_what_it_holds(equation, axis, operands) -> list[bool]:
    """Of a primitive that may hold a function of its operands, as `jax.jit`, `jax.checkpoint` and `custom_vjp` do."""
    name, number = equation.primitive.name, len(equation.outvars)
    if name in _BRINGS_THE_SAME | _GIVES_EACH_ITS_OWN and _is_over(equation, axis):
        return [name in _GIVES_EACH_ITS_OWN] * number
    if name in _ONE_BY_ONE and number == len(operands):
        return [*operands]
    inner = [_open(value) for value in equation.params.values() if hasattr(_open(value), "eqns")]
    sizes = len(operands), number
    held = [jaxpr for jaxpr in inner if (len(jaxpr.invars), len(jaxpr.outvars)) == sizes]
    return _any_of(held, axis, operands) if held else [any(operands)] * number


def _of_cond(equation, axis, operands) -> list[bool]:
    chosen_by, *others = operands
    found = _any_of([_open(branch) for branch in equation.params["branches"]], axis, others)
    return [chosen_by or differs for differs in found]


def _of_scan(equation, axis, operands) -> list[bool]:
    """Operands are what all turns share, what they carry, and arrays with a part for each turn: of one dim more."""
    body = _open(equation.params["jaxpr"])
    carried = sum(map(_ndims_are_equal, equation.outvars, body.outvars))
    with_parts = len(operands) - sum(map(_ndims_are_equal, equation.invars, body.invars))
    first = len(operands) - with_parts - carried

    def turn(carry):
        return which_differ(body, axis, [*operands[:first], *carry, *operands[first + carried :]])

    carry = _until_nothing_changes(lambda carry: turn(carry)[:carried], operands[first : first + carried])
    return [*carry, *turn(carry)[carried:]]


def _ndims_are_equal(outer, inner) -> bool:
    return len(outer.aval.shape) == len(inner.aval.shape)


def _of_while(equation, axis, operands) -> list[bool]:
    """Operands are what the condition reads alone, what the body reads alone, and what both are handed."""
    cond, body = _open(equation.params["cond_jaxpr"]), _open(equation.params["body_jaxpr"])
    carried = len(equation.outvars)
    of_cond, first = len(cond.invars) - carried, len(operands) - carried

    def turn(carry):
        (chosen,) = which_differ(cond, axis, [*operands[:of_cond], *carry])
        return [chosen or differs for differs in which_differ(body, axis, [*operands[of_cond:first], *carry])]

    return _until_nothing_changes(turn, operands[first:])


def _until_nothing_changes(turn, carry) -> list[bool]:
    """What the turns of a loop carry, at most: what once differs is taken to differ in every turn."""
    while (grown := [old or new for old, new in zip(carry, turn(carry), strict=True)]) != carry:
        carry = grown
    return carry


def _any_of(jaxprs, axis, operands) -> list[bool]:
    found = [which_differ(jaxpr, axis, operands) for jaxpr in jaxprs]
    return [any(of_all) for of_all in zip(*found, strict=True)]


def _is_over(equation, axis) -> bool:
    """Whether a collective is one of all devices of this axis."""
    params = equation.params
    named = params["axes"] if "axes" in params else params["axis_name"]
    is_named = axis in (named if isinstance(named, tuple) else (named,))
    in_groups = params.get("axis_index_groups") is not None and equation.primitive.name in _BRINGS_THE_SAME
    return is_named and not in_groups


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


_RULES: dict[str, Callable] = {"cond": _of_cond, "scan": _of_scan, "while": _of_while}
