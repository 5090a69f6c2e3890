"""The inside of one equation of a jaxpr: the jaxprs in it, how its operands reach them, and how often they run.

jax changes how it represents these: a scan counts its operands in jax 0.10 and has a tree of them since 0.11; a jaxpr
with its constants was a class of its own and is a jaxpr since 0.11. Other files need not know.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

Atom = Var | Literal


class ScanParts(NamedTuple):
    """The body of a scan, and the positions of constants, carry and xs among the operands, of carry and ys among the
    results. The body has the same positions, with one element of xs and ys.
    """

    body: Jaxpr
    consts: slice
    carry: slice
    xs: slice
    last_carry: slice
    ys: slice


def scan_parts(equation: JaxprEqn) -> ScanParts:
    params, (body,) = equation.params, inner_jaxprs(equation)
    if "num_consts" in params:  # jax 0.10
        consts, carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = map(len, params["ft_in"].unpack())
    first_x = consts + carry
    return ScanParts(
        body, slice(consts), slice(consts, first_x), slice(first_x, None), slice(carry), slice(carry, None)
    )


def inner_jaxprs(equation: JaxprEqn, platform: str | None = None) -> list[Jaxpr]:
    """The jaxprs in an equation.

    Args:
      platform: of the branches of `jax.lax.platform_dependent`, return only that for this platform; None is all.
    """
    platforms = equation.params.get("branches_platforms")
    inner = [*jaxprs_in_params(equation.params)]
    if platform is None or platforms is None:
        return inner
    own = (number for number, names in enumerate(platforms) if names and platform in names)
    return [inner[next(own, len(inner) - 1)]]  # the default branch is the last one


def called_jaxpr(equation: JaxprEqn) -> Jaxpr | None:
    """The jaxpr that takes an equation's operands in order and returns its results, as in `jax.jit`, `jax.checkpoint`,
    `jax.custom_vjp`, `jax.custom_jvp` and `jax.shard_map`; None for any other equation.
    """
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if name == "scan" or len(inner) != 1:
        return None
    # Inside of a shard_map arrays have the shapes of shards, so types differ there.
    is_call = name == "shard_map" or _types(equation) == _types(inner[0])
    return inner[0] if is_call else None


def _types(program: JaxprEqn | Jaxpr) -> list[list[tuple[object, object]]]:
    """Shapes and dtypes of the operands and of the results."""
    return [
        [(getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)) for atom in atoms]
        for atoms in (program.invars, program.outvars)
    ]


def turns(equation: JaxprEqn, unknown: float = math.inf) -> Any:
    """How often an equation runs the jaxprs in it; `unknown` for a while loop, whose iterations only a run can tell."""
    name = equation.primitive.name
    return equation.params["length"] if name == "scan" else unknown if name == "while" else 1


def all_equations(jaxpr: Jaxpr, count: float = 1) -> Iterator[tuple[JaxprEqn, float]]:
    """The equations of a jaxpr and of all jaxprs in it, in program order, and how often `count` calls run each of them,
    as if a conditional ran all of its branches.
    """
    for equation in jaxpr.eqns:
        yield equation, count
        for inner in inner_jaxprs(equation):
            yield from all_equations(inner, count * turns(equation))


def array_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an atom that is an array."""
    return jax.ShapeDtypeStruct(getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_view(equation: JaxprEqn) -> bool:
    """Whether the only result has the elements of the first operand in the same order, in another shape."""
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        return array_of(equation.outvars[0]).size == array_of(equation.invars[0]).size
    return name in ("squeeze", "expand_dims") or (name == "reshape" and params.get("dimensions") is None)
