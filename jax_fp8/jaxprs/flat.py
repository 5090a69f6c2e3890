"""A traced program as one platform runs it, without calls: each is replaced by the equations that it calls.

    cond(platform) [cuda: custom_partitioning(ffi_call), default: ...]  ─for "cuda"→  ffi_call

A flat program is right on its platform only, and on one device: a rule of `custom_partitioning` is gone.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import Atom, array_of, called_jaxpr, inner_jaxprs, variables

OPAQUE = ("shard_map",)  # calls whose inside has other shapes


def flat_program(program: ClosedJaxpr, platform: str) -> ClosedJaxpr:
    """The program without calls and without dead code."""

    def run(*operands: jax.Array) -> list[jax.Array]:
        return _run(program.jaxpr, [*program.consts], operands, platform)

    return without_dead_code(jax.make_jaxpr(run)(*map(array_of, program.jaxpr.invars)))


def run_equation(jaxpr: Jaxpr, equation: JaxprEqn, values: dict[Var, jax.Array]) -> None:
    """Run an equation of a jaxpr: it finds its operands among the values, and adds its results."""
    read = [*dict.fromkeys(variables(equation.invars))]
    alone = jaxpr.replace(constvars=[], invars=read, outvars=equation.outvars, eqns=[equation])
    results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*(values[var] for var in read))
    values.update(zip(equation.outvars, results, strict=True))


def _run(jaxpr: Jaxpr, consts: Sequence[jax.Array], operands: Sequence[jax.Array], platform: str) -> list[jax.Array]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))

    def value(atom: Atom) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        found = _called(equation, platform)
        if found is None:
            run_equation(jaxpr, equation, values)
            continue
        inner, atoms = found
        scope = str(equation.source_info.name_stack)
        with jax.named_scope(scope) if scope else nullcontext():
            results = _run(inner, [], [*map(value, atoms)], platform)
        values.update(zip(equation.outvars, results, strict=True))
    return [*map(value, jaxpr.outvars)]


def _called(equation: JaxprEqn, platform: str) -> tuple[Jaxpr, Sequence[Atom]] | None:
    """What an equation calls, and with which operands; None for one that is no call. One whose inside has constants
    stays a call.
    """
    if equation.params.get("branches_platforms") is not None:
        inner, atoms = inner_jaxprs(equation, platform)[0], equation.invars[1:]
    else:
        inner, atoms = called_jaxpr(equation), equation.invars
    if inner is None or inner.constvars or equation.primitive.name in OPAQUE:
        return None
    return inner, atoms
