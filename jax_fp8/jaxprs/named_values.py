"""Values with a name (`jax.ad_checkpoint.checkpoint_name`) in a program: which argument of the program each of them is,
and how often a call of the program computes them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, Literal, Var

from jax_fp8.jaxprs.equations import Atom, all_equations, called_jaxpr, inner_jaxprs, scan_parts

# Calls with the gradient of the function in them. A call with a rule of its own, such as custom_vjp, may have another.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
UNCHANGED = ("name", "sharding_constraint")  # primitives that return their operand


@dataclass(frozen=True)
class Origin:
    """Which argument a value is; or, after `depth` scans over leading dims, which argument it is an element of."""

    argument: int
    depth: int = 0


Origins = dict[str, set[Origin | None]]


def origins(jaxpr: Jaxpr, arguments: Sequence[Origin | None], unchanged: Collection[str] = UNCHANGED) -> Origins:
    """By name, the origins of all values in a jaxpr with this name; None for a value that is not an argument.

    Args:
      arguments: the origins of the jaxpr's arguments.
      unchanged: primitives whose result counts as their operand.
    """
    by_name: Origins = defaultdict(set)
    _walk(jaxpr, arguments, by_name, unchanged)
    return by_name


def _walk(
    jaxpr: Jaxpr, arguments: Sequence[Origin | None], by_name: Origins, unchanged: Collection[str]
) -> list[Origin | None]:
    """Add the origins of named values to `by_name`, and return those of the results."""
    known: dict[Var, Origin | None] = dict(zip(jaxpr.invars, arguments, strict=True))

    def origin_of(atom: Atom) -> Origin | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for equation in jaxpr.eqns:
        operands = [origin_of(atom) for atom in equation.invars]
        name = equation.primitive.name
        called = called_jaxpr(equation) if name in _CALLS else None
        results: Sequence[Origin | None] = [None] * len(equation.outvars)
        if name in unchanged:
            results = operands[:1]
        elif called is not None:
            results = _walk(called, operands, by_name, unchanged)
        elif name == "scan":
            parts = scan_parts(equation)
            elements = (origin and Origin(origin.argument, origin.depth + 1) for origin in operands[parts.xs])
            # An iteration may replace the carry, so it counts as no argument.
            in_body = [*operands[parts.consts], *[None for _ in operands[parts.carry]], *elements]
            _walk(parts.body, in_body, by_name, unchanged)
        else:
            for inner in inner_jaxprs(equation):
                in_inner = operands[1:] if name == "cond" else [None] * len(inner.invars)
                _walk(inner, in_inner, by_name, unchanged)
        if name == "name":
            by_name[equation.params["name"]].add(operands[0])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [origin_of(atom) for atom in jaxpr.outvars]


def call_counts(jaxpr: Jaxpr) -> Counter[str]:
    """How often one call of a jaxpr computes a value of each name; infinitely often in a loop of unknown length."""
    counts: Counter[str] = Counter()
    for equation, count in all_equations(jaxpr):
        if equation.primitive.name == "name":
            counts[equation.params["name"]] += count  # type: ignore[assignment]
    return counts
