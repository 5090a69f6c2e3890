"""Whether two traced functions compute the same: a comparison of their jaxprs, equation by equation.

It compares the flow of values through operations, their shapes and dtypes, and all numbers in a program: literals,
constants, and parameters of operations. It does not compare names, nor functions that jax has not traced yet, such as
the backward of a `jax.custom_vjp`.
"""

import enum
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jax_fp8.jaxprs.equations import Atom

_NUMBERS = bool, int, float, complex, np.generic, np.dtype, enum.Enum, type(None)


def compute_the_same(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether two programs take arguments of the same types, and compute the same of them."""
    return one is other or (_are_equal(one.consts, other.consts) and _jaxprs_are_equal(one.jaxpr, other.jaxpr))


def _jaxprs_are_equal(one: Jaxpr, other: Jaxpr) -> bool:
    counterpart: dict[Var, Var] = {}  # for each variable of `one`, that of `other`

    def are_defined_equally(variables: Sequence[Var], others: Sequence[Var]) -> bool:
        counterpart.update(zip(variables, others, strict=False))
        return len(variables) == len(others) and all(a.aval == b.aval for a, b in zip(variables, others, strict=True))

    def are_used_equally(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
        return len(atoms) == len(others) and all(map(is_used_equally, atoms, others))

    def is_used_equally(atom: Atom, other: Atom) -> bool:
        if isinstance(atom, Literal) and isinstance(other, Literal):
            return atom.aval == other.aval and _are_equal(atom.val, other.val)
        return not isinstance(atom, Literal) and counterpart.get(atom) is other

    def equations_are_equal(one: JaxprEqn, other: JaxprEqn) -> bool:
        return (
            one.primitive is other.primitive
            and are_used_equally(one.invars, other.invars)
            and are_defined_equally(one.outvars, other.outvars)
            and one.params.keys() == other.params.keys()
            and all(_are_equal(value, other.params[name]) for name, value in one.params.items())
        )

    return one is other or (
        are_defined_equally([*one.constvars, *one.invars], [*other.constvars, *other.invars])
        and len(one.eqns) == len(other.eqns)
        and all(map(equations_are_equal, one.eqns, other.eqns))
        and are_used_equally(one.outvars, other.outvars)
    )


def _are_equal(one: object, other: object) -> bool:
    """Whether two values in a program are equal. Values that hold neither numbers nor programs count as equal."""
    if one is other:
        return True
    if isinstance(one, ClosedJaxpr) and isinstance(other, ClosedJaxpr):
        return compute_the_same(one, other)
    if isinstance(one, Jaxpr) and isinstance(other, Jaxpr):
        return _jaxprs_are_equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, np.ndarray | jax.Array) or isinstance(other, np.ndarray | jax.Array):
        return _bits(one) == _bits(other)
    if isinstance(one, _NUMBERS) or isinstance(other, _NUMBERS):
        return type(one) is type(other) and repr(one) == repr(other)  # by repr, NaN equals NaN, and 0 is not -0
    return True


def _bits(array: object) -> Hashable:
    """A value that two arrays share if they are equal. A traced array has no numbers yet, and equals only itself."""
    if isinstance(array, Tracer):
        return id(array)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.shape, array.dtype, array.tobytes()
