"""Whether two traced functions compute the same: their jaxprs, equation by equation.

What is compared is the flow of values through operations, their shapes and dtypes, and all numbers in a program:
literals, constants, and parameters of operations. What is not compared is what has not been traced yet, such as the
backward of a `jax.custom_vjp`, and any name.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

_NUMBERS = bool, int, float, complex, np.generic, np.dtype, enum.Enum, type(None)


def compute_the_same(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether two programs take arguments of the same types, and do the same with them."""
    return one is other or (_are_alike(one.consts, other.consts) and _jaxprs_are_alike(one.jaxpr, other.jaxpr))


def _jaxprs_are_alike(one, other) -> bool:
    counterpart: dict[Any, Any] = {}  # of each variable of the one that of the other

    def are_defined_alike(variables, others) -> bool:
        counterpart.update(zip(variables, others, strict=False))
        return len(variables) == len(others) and all(a.aval == b.aval for a, b in zip(variables, others, strict=True))

    def are_used_alike(atoms, others) -> bool:
        return len(atoms) == len(others) and all(map(is_used_alike, atoms, others))

    def is_used_alike(atom, other) -> bool:
        if isinstance(atom, Literal) and isinstance(other, Literal):
            return atom.aval == other.aval and _are_alike(atom.val, other.val)
        return not isinstance(atom, Literal) and counterpart.get(atom) is other

    def equations_are_alike(one, other) -> bool:
        return (
            one.primitive is other.primitive
            and are_used_alike(one.invars, other.invars)
            and are_defined_alike(one.outvars, other.outvars)
            and one.params.keys() == other.params.keys()
            and all(_are_alike(value, other.params[name]) for name, value in one.params.items())
        )

    return one is other or (
        are_defined_alike([*one.constvars, *one.invars], [*other.constvars, *other.invars])
        and len(one.eqns) == len(other.eqns)
        and all(map(equations_are_alike, one.eqns, other.eqns))
        and are_used_alike(one.outvars, other.outvars)
    )


def _are_alike(one, other) -> bool:
    """Of values; those that are no numbers, programs or made of such count as alike."""
    if one is other:
        return True
    if isinstance(one, ClosedJaxpr) and isinstance(other, ClosedJaxpr):
        return compute_the_same(one, other)
    if hasattr(one, "eqns") and hasattr(other, "eqns"):
        return _jaxprs_are_alike(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_are_alike, one, other))
    if isinstance(one, np.ndarray | jax.Array) or isinstance(other, np.ndarray | jax.Array):
        return _bits(one) == _bits(other)
    if isinstance(one, _NUMBERS) or isinstance(other, _NUMBERS):
        return type(one) is type(other) and repr(one) == repr(other)  # as NaN is like NaN, and 0 unlike -0
    return True


def _bits(array) -> Any:
    """What two equal arrays have in common. Of one that is being traced nothing is known but that it is itself."""
    if isinstance(array, Tracer):
        return id(array)
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    array = np.asarray(array)
    return array.shape, array.dtype, array.tobytes()
