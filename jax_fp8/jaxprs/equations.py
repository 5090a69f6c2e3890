"""What one equation of a jaxpr holds: the jaxprs in it, how its operands reach them, and how often they run.

jax changes how it writes these down (a scan counts its operands in jax 0.10, and has a tree of them since 0.11; a
jaxpr with its constants was a class of its own, and is a jaxpr since 0.11). Nobody else has to know.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params


class ScanParts(NamedTuple):
    """The body of a scan, and where constants, carry and xs are among the operands, carry and ys among the results. In
    the body they are in the same places, of xs and ys an element each.
    """

    body: Any
    consts: slice
    carry: slice
    xs: slice
    last_carry: slice
    ys: slice


def scan_parts(equation: Any) -> ScanParts:
    params, (body,) = equation.params, inner_jaxprs(equation)
    if "num_consts" in params:  # jax 0.10
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = map(len, params["ft_in"].unpack())
    first_x = consts + carry
    return ScanParts(
        body, slice(consts), slice(consts, first_x), slice(first_x, None), slice(carry), slice(carry, None)
    )


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
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if name == "scan" or len(inner) != 1:
        return None
    is_call = name == "shard_map" or _types(equation) == _types(inner[0])  # shards have other shapes
    return inner[0] if is_call else None


def _types(of) -> list[list[tuple]]:
    return [
        [(getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)) for atom in atoms]
        for atoms in (of.invars, of.outvars)
    ]


def turns(equation: Any, unknown: float = math.inf) -> Any:
    """How often an equation executes what it holds; `unknown` where only a run can tell, as of a while loop."""
    name = equation.primitive.name
    return equation.params["length"] if name == "scan" else unknown if name == "while" else 1


def all_equations(jaxpr: Any, count: float = 1) -> Iterator[tuple[Any, float]]:
    """The equations of a jaxpr and of all that it holds, in program order, and how often `count` calls execute each;
    those of a conditional in all its branches.
    """
    for equation in jaxpr.eqns:
        yield equation, count
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner, count * turns(equation))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
