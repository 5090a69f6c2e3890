"""What one equation of a jaxpr holds: the jaxprs in it, how its operands reach them, and how often they run.

jax changes how it writes these down (a scan counts its operands in jax 0.10, and has a tree of them since 0.11; a
jaxpr with its constants was a class of its own, and is a jaxpr since 0.11). Nobody else has to know.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jax.extend.core import Literal, jaxprs_in_params

T = TypeVar("T")
_LOOPS_AND_BRANCHES = ("scan", "while", "cond")


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def inner_jaxprs(equation: Any, platform: str | None = None) -> list[Any]:
    """The jaxprs that an equation holds.

    Args:
      platform: of what `jax.lax.platform_dependent` made, only the branch for it; None is all branches.
    """
    platforms = equation.params.get("branches_platforms")
    inner = [*jaxprs_in_params(equation.params)]
    if platform is None or platforms is None:
        return inner
    own = (number for number, names in enumerate(platforms) if names and platform in names)
    return [inner[next(own, len(inner) - 1)]]  # the default is the last one


def called_jaxpr(equation: Any) -> Any:
    """The jaxpr that takes an equation's operands, in order, and makes its results, as in `jax.jit`, `jax.checkpoint`,
    `jax.custom_vjp`, `jax.custom_jvp` and `jax.shard_map`; None of any other equation.
    """
    inner = inner_jaxprs(equation)
    if equation.primitive.name in _LOOPS_AND_BRANCHES or len(inner) != 1:
        return None
    (called,) = inner
    is_sharded = equation.primitive.name == "shard_map"  # which takes parts of its operands
    are_alike = _types(equation.invars) == _types(called.invars) and _types(equation.outvars) == _types(called.outvars)
    return called if is_sharded or are_alike else None


def _types(atoms) -> list[tuple]:
    return [(getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)) for atom in atoms]


@dataclass(frozen=True)
class ScanParts:
    """A `jax.lax.scan`: its body, and how many constants and carried values it has. The body takes constants, carry and
    an element of each stack of xs, and returns the next carry and an element of each stack of ys.
    """

    body: Any
    consts: int
    carry: int

    def operands(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Something of each operand: of the constants, the carry, the xs."""
        first_x = self.consts + self.carry
        return values[: self.consts], values[self.consts : first_x], values[first_x:]

    def results(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """Something of each result: of the last carry, the ys."""
        return values[: self.carry], values[self.carry :]


def scan_parts(equation: Any) -> ScanParts:
    """Those of a scan."""
    params, (body,) = equation.params, inner_jaxprs(equation)
    if "num_consts" in params:  # jax 0.10
        return ScanParts(body, params["num_consts"], params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()
    return ScanParts(body, len(consts), len(carry))


@dataclass(frozen=True)
class WhileParts:
    """A `jax.lax.while_loop`: its two jaxprs, each of which takes constants of its own, then the carry."""

    cond: Any
    body: Any
    cond_consts: int
    body_consts: int

    def operands(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """Something of each operand: of the constants of the condition, those of the body, the carry."""
        first = self.cond_consts + self.body_consts
        return values[: self.cond_consts], values[self.cond_consts : first], values[first:]


def while_parts(equation: Any) -> WhileParts:
    """Those of a while loop."""
    params = equation.params
    cond, body = (next(jaxprs_in_params({name: params[name]})) for name in ("cond_jaxpr", "body_jaxpr"))
    return WhileParts(cond, body, params["cond_nconsts"], params["body_nconsts"])


def turns(equation: Any, unknown: float = math.inf) -> Any:
    """How often an equation executes what it holds; `unknown` where only a run can tell, as of a while loop."""
    name = equation.primitive.name
    return equation.params["length"] if name == "scan" else unknown if name == "while" else 1


def all_equations(jaxpr: Any, count: float = 1) -> Iterator[tuple[Any, float]]:
    """The equations of a jaxpr and of all that it holds, in program order, and how often `count` calls execute each, in
    all branches of a conditional.
    """
    for equation in jaxpr.eqns:
        yield equation, count
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner, count * turns(equation))
