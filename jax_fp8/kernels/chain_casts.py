"""Casts that move from one kernel of a chain to the kernel before.

    attention → y, bfloat16 → GEMM that casts y        becomes        attention that casts y → y, E4M3 → GEMM

A cast by a known scale costs the kernel that has the numbers in its registers next to nothing. The kernel behind would
have to read them, cast them and write them first. What is multiplied stays the same to the bit.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jax_fp8.core.formats import E4M3
from jax_fp8.jaxprs.equations import Atom, array_of, is_view, variables
from jax_fp8.jaxprs.flat import run_equation
from jax_fp8.kernels.few_rows import WARPGROUP_ROWS, has_warpgroups

ATTENTION, GEMM = "jax_fp8_cached_attention", "jax_fp8_few_rows_gemm"
ABSENT_SCALE = 11  # the operand of an attention that has no scale of its result


class _Moved(NamedTuple):
    """The equations that change: who makes the array, views of it, and who reads it and casts it no more."""

    producer: int
    views: tuple[int, ...]
    consumer: int


def with_casts_before(program: ClosedJaxpr) -> ClosedJaxpr:
    """A flat program of kernels, in which results that only one GEMM reads are cast where they are made."""
    moved = _moved_casts(program) if has_warpgroups() else []
    if not moved:
        return program

    def run(*operands: jax.Array) -> list[jax.Array]:
        return _run(program, operands, moved)

    return jax.make_jaxpr(run)(*map(array_of, program.jaxpr.invars))


def _moved_casts(program: ClosedJaxpr) -> list[_Moved]:
    equations = program.jaxpr.eqns
    maker = {var: number for number, equation in enumerate(equations) for var in equation.outvars}
    readers = Counter(var for equation in equations for var in variables(equation.invars))
    readers.update(variables(program.jaxpr.outvars))

    def maker_for_one(atom: Atom) -> int | None:
        """The equation that makes what one equation alone reads."""
        return maker.get(atom) if isinstance(atom, Var) and readers[atom] == 1 else None

    found = []
    for consumer, equation in enumerate(equations):
        if not _casts_rows(equation):
            continue
        atom, scale, views = equation.invars[0], equation.invars[2], []
        while (number := maker_for_one(atom)) is not None and is_view(equations[number]):
            views.append(number)
            atom = equations[number].invars[0]
        if number is None or not _may_cast(equations[number], atom):
            continue
        if isinstance(scale, Literal) or maker.get(scale, -1) < number:
            found.append(_Moved(number, tuple(views), consumer))
    return found


def _target(equation: JaxprEqn) -> str:
    return equation.params["target_name"] if equation.primitive.name == "ffi_call" else ""


def _casts_rows(equation: JaxprEqn) -> bool:
    """Whether it is a GEMM of few rows that casts them, and does nothing else before."""
    if _target(equation) != GEMM:
        return False
    attributes = dict(equation.params["attributes"])
    return attributes["casts"] and attributes["norm"] == "" and array_of(equation.invars[0]).shape[0] <= WARPGROUP_ROWS


def _may_cast(equation: JaxprEqn, result: Atom) -> bool:
    """Whether a kernel can cast its first result, in bfloat16."""
    if equation.outvars[0] is not result or array_of(result).dtype != jnp.bfloat16:
        return False
    if _target(equation) == ATTENTION:
        return array_of(equation.invars[ABSENT_SCALE]).shape == (0, 0)
    is_gemm = _target(equation) == GEMM and not equation.params["input_output_aliases"]
    return is_gemm and not dict(equation.params["attributes"])["casts_d"]


def _run(program: ClosedJaxpr, operands: Sequence[jax.Array], moved: Sequence[_Moved]) -> list[jax.Array]:
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *operands], strict=True))
    consumers = {one.consumer: one for one in moved}
    producers = {one.producer: one for one in moved}
    views = {number for one in moved for number in one.views}

    def value(atom: Atom) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        if number in views:
            values[equation.outvars[0]] = value(equation.invars[0]).reshape(array_of(equation.outvars[0]).shape)
            continue
        if number not in producers and number not in consumers:
            run_equation(jaxpr, equation, values)
            continue
        arrays, attributes = [*map(value, equation.invars)], dict(equation.params["attributes"])
        results = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in map(array_of, equation.outvars)]
        if number in consumers:
            attributes["casts"], results = False, results[:1]
        if number in producers:
            reader = jaxpr.eqns[producers[number].consumer]
            scale, row = value(reader.invars[2]), dict(reader.params["attributes"])["a_row"]
            results[0] = jax.ShapeDtypeStruct(results[0].shape, E4M3)
            if _target(equation) == ATTENTION:
                arrays[ABSENT_SCALE], attributes["attended_row"] = scale, np.int32(row)
            else:
                arrays, attributes = [*arrays, scale], attributes | {"casts_d": True, "d_row": np.int32(row)}
        aliases = dict(equation.params["input_output_aliases"])
        call = jax.ffi.ffi_call(equation.params["target_name"], results, input_output_aliases=aliases)
        values.update(zip(equation.outvars, call(*arrays, **attributes), strict=False))  # less the room for a cast
    return [*map(value, jaxpr.outvars)]
