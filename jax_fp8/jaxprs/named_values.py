"""What a program says of values that have a name (`jax.ad_checkpoint.checkpoint_name`): which argument each of them is,
and how often a call of the program comes by one.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from jax_fp8.jaxprs.equations import all_equations, called_jaxpr, inner_jaxprs, scan_parts

# Calls whose gradient is that of the function which they hold; a rule of its own may have any other.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
UNCHANGED = ("name", "sharding_constraint")


@dataclass(frozen=True)
class Origin:
    """Which argument a value is; or, after `depth` scans over leading dims, an element of it."""

    argument: int
    depth: int = 0


Origins = dict[str, set[Origin | None]]


def origins(jaxpr: Any, given: Sequence[Origin | None], unchanged: Collection[str] = UNCHANGED) -> Origins:
    """What carries a name in a jaxpr: each argument that it is, or None for anything else.

    Args:
      given: of the jaxpr's arguments.
      unchanged: primitives whose result is what they take.
    """
    found: Origins = defaultdict(set)
    _walk(jaxpr, given, found, unchanged)
    return found


def _walk(jaxpr, given, found: Origins, unchanged) -> list[Origin | None]:
    """The origins of the results."""
    known = dict(zip(jaxpr.invars, given, strict=True))

    def origin_of(atom):
        return None if isinstance(atom, Literal) else known.get(atom)

    for equation in jaxpr.eqns:
        taken = [origin_of(atom) for atom in equation.invars]
        name = equation.primitive.name
        called = called_jaxpr(equation) if name in _CALLS else None
        results: Sequence[Origin | None] = [None] * len(equation.outvars)
        if name in unchanged:
            results = taken[:1]
        elif called is not None:
            results = _walk(called, taken, found, unchanged)
        elif name == "scan":
            parts = scan_parts(equation)
            elements = (of and Origin(of.argument, of.depth + 1) for of in taken[parts.xs])
            in_a_turn = [*taken[parts.consts], *[None for _ in taken[parts.carry]], *elements]
            _walk(parts.body, in_a_turn, found, unchanged)
        else:
            for inner in inner_jaxprs(equation):
                of_inner = taken[1:] if name == "cond" else [None] * len(inner.invars)
                _walk(inner, of_inner, found, unchanged)
        if name == "name":
            found[equation.params["name"]].add(taken[0])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [origin_of(atom) for atom in jaxpr.outvars]


def call_counts(jaxpr: Any) -> Counter[str]:
    """How often one call of a jaxpr comes by each name; infinitely often in a loop of unknown length."""
    counts: Counter[str] = Counter()
    for equation, count in all_equations(jaxpr):
        if equation.primitive.name == "name":
            counts[equation.params["name"]] += count  # type: ignore[assignment]
    return counts
